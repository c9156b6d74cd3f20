"""A finished closed form with clients added, removed, and new classes: its head solved for again.

The statistics of every client are on disk (`keep_statistics`). The head is always that of their sum in the order of the
clients, so that a head without a client has the bits of one that never had it. The head before and the head after are
tested on the same examples: the run's test split, where it is here, and those of the clients that were added.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.channel.channel import channel_of
from headstart.config.recipe import Recipe
from headstart.core.files import write_json
from headstart.core.message import Message, Scalar
from headstart.core.metrics import Metrics
from headstart.core.reply import Sender
from headstart.core.state import pack, unpack
from headstart.data.examples import Examples
from headstart.data.load import load_dataset, load_silo
from headstart.engine.client import ClientRuntime
from headstart.errors import HeadstartError, nearest
from headstart.export.model import Model
from headstart.heads import LinearHead
from headstart.methods import Population, StageContext, Task, build
from headstart.methods.closed_form import ClosedForm, ClosedFormState
from headstart.records import RunDirectory, StageModel
from headstart.runner.evaluation import evaluate, evaluate_targets
from headstart.solvers.cohort import Cohort


@dataclass(frozen=True, eq=False)
class Updated:
    """A run after an update: its clients and classes by name, and how many examples are behind the head."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    examples: int
    test_examples: int = 0
    """Those that the head before and the head after were tested on."""
    before: Metrics = field(default_factory=dict)
    after: Metrics = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    """Classes of which nobody has an example."""


def update(
    run: Path, add: Mapping[str, str] | None = None, remove: Sequence[str] = (), classes: Sequence[str] = ()
) -> Updated:
    """Add clients (a name, and where their data are), remove clients, add classes; then solve and write the model.

    Without any of these, an update that was interrupted is finished: its statistics say what it was.
    """
    model = Model.load(run)
    stage = model.recipe.stages[-1]
    directory, number = RunDirectory(run), len(model.recipe.stages) - 1
    if not stage.keep_statistics:
        raise HeadstartError(
            f"{run}: no client's statistics were kept; only a last stage with keep_statistics = true can be updated"
        )
    with directory.lock():
        saved = directory.load_statistics(number)
        names: dict[str, int] = json.loads(str(saved.scalars["names"]))
        known = tuple(json.loads(str(saved.scalars["classes"])))
        state = unpack(ClosedFormState, Message(saved.arrays, json.loads(str(saved.scalars["state"]))))
        last, noted = int(saved.scalars["last"]), _noted(directory, saved)
        _check(run, model, names, known, add or {}, remove, classes)
        known += tuple(classes)
        gone = {str(names.pop(name)) for name in remove}
        method = _method(model, number, len(known), len(state.clients) - len(gone) + len(add or {}))
        n_classes = method.summary.n_classes
        kept = {c: replace(s, n_classes=n_classes) for c, s in state.clients.items() if c not in gone}
        tests = _own_test(model, known)
        for name, path in (add or {}).items():
            last += 1
            train, test = _read(model, path, known)
            kept |= _told(model, method, train, last)
            names[name], tests = last, [*tests, *([test] if len(test) else [])]
        state = method.of_clients(kept)
        if not state.rows:
            raise HeadstartError(f"{run}: nobody is left; start another run")
        head = method.head(state)
        before, after = _tested(model, [_widened(model.head, len(known)), head], tests)
        examples = sum(int(each.counts.sum()) for each in kept.values())
        if add or remove or classes:
            entry = {"added": list(add or {}), "removed": list(remove), "classes": list(classes), "clients": len(names)}
            tested = {"test_examples": sum(map(len, tests)), "before": before, "after": after}
            noted = [*noted, {**entry, "examples": examples, **tested}]
        about: dict[str, Scalar] = {"names": json.dumps(names), "classes": json.dumps(known), "last": last}
        if noted:
            about |= {"updates": len(noted), "update": json.dumps(noted[-1])}
        directory.save_statistics(number, pack(state), about)
        directory.save_model(number, StageModel((head,), directory.load_model(number)[0].body), None)
        (task,) = directory.classes()
        directory.save_final(None, [head], [task], [known])
        if noted:
            write_json(run / "summary.json", {**(directory.summary() or {}), "updates": noted})
    empty = tuple(name for name, bias in zip(known, head.bias, strict=True) if np.isneginf(bias))
    return Updated(tuple(names), known, examples, sum(map(len, tests)), before, after, empty)


def _noted(directory: RunDirectory, saved: Message) -> list[dict[str, Any]]:
    """What the updates so far have changed since the figures in the summary, and how good the head was before and
    after; the last one may have been interrupted before the summary told of it."""
    noted = list((directory.summary() or {}).get("updates", []))
    if len(noted) < int(saved.scalars.get("updates", 0)):
        noted.append(json.loads(str(saved.scalars["update"])))
    return noted


def _check(
    run: Path,
    model: Model,
    names: Mapping[str, int],
    known: Sequence[str],
    add: Mapping[str, str],
    remove: Sequence[str],
    classes: Sequence[str],
) -> None:
    """Refuse what cannot be, all at once and before anything is written."""
    problems = []
    for option, given in (("--add", [*add]), ("--remove", [*remove]), ("--class", [*classes])):
        problems += [f"{option}: a name is empty; leave it out, or give one"] if not all(map(str.strip, given)) else []
        twice = [name for name, often in Counter(given).items() if often > 1]
        problems += [f"{option}: {name!r} is given more than once; give it once" for name in twice]
    problems += [
        f"--remove: {name!r} is no client of {run}; {nearest(name, names)}" for name in remove if name not in names
    ]
    problems += [
        f"--add: {name!r} is a client already; remove it first" for name in add if name in set(names) - {*remove}
    ]
    problems += [f"--class: {name!r} is a class already" for name in classes if name in known]
    if classes and model.target != "classes":
        problems.append(f"--class: the targets of {run} are no classes ({model.target}); leave it out")
    if problems:
        raise HeadstartError("\n".join(problems))


def _method(model: Model, number: int, n_classes: int, clients: int) -> ClosedForm:
    """The method of the run's last stage."""
    recipe: Recipe = model.recipe
    stage: Any = recipe.stages[number]
    tasks = (Task("default", n_classes, Population(clients), target=model.target),)
    method = build(stage, StageContext(tasks, model.width, (recipe.seed, number), stage.plan))
    assert isinstance(method, ClosedForm)
    return method


def _read(model: Model, path: str, classes: Sequence[str]) -> tuple[Examples, Examples]:
    """The training and the test examples of a client that is added."""
    target = None if model.target == "classes" else model.target
    data = model.data.model_copy(update={"classes": tuple(classes), "target": target})
    dataset = load_silo(data, path, model.recipe.seed)
    if not len(dataset.train):
        raise HeadstartError(f"--add {path}: it has no example of the classes {', '.join(classes)}")
    return dataset.train, dataset.test


def _own_test(model: Model, classes: Sequence[str]) -> list[Examples]:
    """The run's test split, its classes numbered as these; none where its data are not here, as after a deployment."""
    try:
        dataset = load_dataset(model.data, model.recipe.seed)
    except HeadstartError:
        return []
    if dataset.target != "classes":
        return [dataset.test]
    return [dataset.test.relabelled(np.array([classes.index(name) for name in dataset.classes])[dataset.test.labels])]


def _widened(head: LinearHead, classes: int) -> LinearHead:
    """The head with classes that it does not know, masked."""
    more = classes - len(head.bias)
    bias = np.pad(head.bias, (0, more), constant_values=-np.inf)
    return replace(head, weight=np.pad(head.weight, ((0, more), (0, 0))), bias=bias)


def _tested(model: Model, heads: Sequence[LinearHead], tests: Sequence[Examples]) -> list[Metrics]:
    """The metrics of each head on all of these examples; none where there are none."""
    if not tests:
        return [{} for _ in heads]
    features = np.concatenate([model.features(each) for each in tests])
    if model.target == "classes":
        labels = np.concatenate([each.labels for each in tests])
        return [evaluate(head, features, labels).metrics() for head in heads]
    targets = np.concatenate([each.targets for each in tests if each.targets is not None])
    return [evaluate_targets(head, features, targets, model.target).metrics() for head in heads]


def _told(model: Model, method: ClosedForm, train: Examples, number: int) -> dict[str, Any]:
    """What a client with these examples says, as the server reads it, under its number."""
    channel = channel_of(method.stage, method, method.context.seed, {"default": 1}, ())

    def nothing(name: str, start: Any) -> Any:
        raise AssertionError("a closed form keeps nothing with a client")

    owners = np.full(len(train), number)
    cohort = Cohort(
        np.array([number]),
        model.features(train),
        np.arange(len(train)),
        train.labels,
        owners,
        np.array([True]),
        nothing,
        targets=train.targets,
    )
    (reply,) = ClientRuntime(method, channel).answer(cohort, Message(scalars={"round": 0}))
    total: Any = channel.total()
    channel.add(total, reply, Sender(number, 0))
    return {str(client): statistics for client, statistics in total.kept.items()}
