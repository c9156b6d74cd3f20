"""A federation: one data set, and who holds which of its examples. Clients are index views, never copies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from headstart.config.partition import WITHOUT_CLASSES, Domains, Natural, by_classes
from headstart.config.recipe import ONE_TASK, Data, Recipe
from headstart.data.examples import Dataset, Examples, Ints, Joined, Kind
from headstart.data.load import load_dataset, load_silo
from headstart.data.partition import UNUSED, follow, partition
from headstart.errors import HeadstartError


@dataclass(frozen=True, eq=False)
class Federation:
    """The clients of a run. Classes and examples of tasks lie one after the other.

    owners: [N] the client of each training example, -1 for none; test_owners: [M] the same for the test split, or
    None where all clients share it; names: [K]; members: [K] the task of each client, by its number, -1 for one that
    has not said which; None where there is one task; class_starts: [T] the first class of each task.
    """

    dataset: Dataset
    owners: Ints
    test_owners: Ints | None
    names: tuple[str, ...]
    tasks: tuple[str, ...] = (ONE_TASK,)
    members: Ints | None = None
    class_starts: tuple[int, ...] = (0,)
    remote_sizes: Ints | None = None
    """[K] training examples of clients that hold them elsewhere, as they say."""

    @classmethod
    def of(cls, recipe: Recipe, given: Any = None) -> Federation:
        """Load the data of a recipe and deal them out; given: the data themselves, where they are in memory."""
        if recipe.data is not None:
            return cls.of_data(recipe.data, recipe.seed, recipe.model.task == "generate", given)
        if given is not None:
            raise HeadstartError("data: several tasks have data each; name them in the recipe's [[tasks]]")
        unlabelled = recipe.model.task == "generate"
        parts = [cls.of_data(task, recipe.seed, unlabelled) for task in recipe.tasks]
        return cls._joined(parts, [task.name for task in recipe.tasks])

    @classmethod
    def of_data(cls, data: Data, seed: int, unlabelled: bool = False, given: Any = None) -> Federation:
        """The federation of one data set; unlabelled: of prompts and completions; given: of what is in memory."""
        dataset = load_dataset(data, seed, unlabelled=unlabelled, given=given)
        how = data.partition
        if dataset.target != "classes" and how.kind not in WITHOUT_CLASSES:
            raise HeadstartError(f"data.partition.{by_classes(how.kind)}")
        train = dataset.train
        owners = partition(train, len(dataset.classes), how, seed)
        clients = int(owners.max()) + 1
        names = tuple(f"client-{number}" for number in range(clients))
        if isinstance(how, Natural) and train.clients is not None:
            names = tuple(dataset.clients[train.clients[first]] for first in _firsts(owners, clients))
        if isinstance(how, Domains) and train.domains is not None:
            domains = [dataset.domains[train.domains[first]] for first in _firsts(owners, clients)]
            names = tuple(
                domains
                if how.clients_per_domain == 1
                else (f"{d}-{n % how.clients_per_domain}" for n, d in enumerate(domains))
            )
        federation = cls(dataset, owners, None, names)
        if how.test == "shared":
            return federation
        return cls(dataset, owners, _test_owners(federation, how, seed), names)

    @classmethod
    def silo(cls, recipe: Recipe, path: str, name: str, task: str = "") -> Federation:
        """One client with its own data; task: which one is its own, where the recipe has several."""
        number = recipe.task_number(task)
        dataset = load_silo(_data_of(recipe)[number], path, recipe.seed, recipe.model.task == "generate")
        return cls(dataset, np.zeros(len(dataset.train), np.int64), None, (name,), (recipe.task_names[number],))

    @classmethod
    def apart(
        cls,
        recipe: Recipe,
        names: tuple[str, ...],
        sizes: Ints,
        dim: int,
        test: str | None,
        members: Ints | None = None,
    ) -> Federation:
        """The server's view of clients that hold their data themselves: their names, how many examples they have, and,
        where the recipe has several tasks, which is whose (members [K]).

        dim: the length of their features, where the data are features; test: the server's own data to test on; with
        several tasks, a folder with a file or a folder for each, called as the task.
        """
        kind: Kind = "features" if recipe.model.backbone == "features" else "image"
        source, none = np.zeros((0, dim), np.float32), np.zeros(0, np.int64)
        parts = []
        for data, task in zip(_data_of(recipe), recipe.task_names, strict=True):
            generates = recipe.model.task == "generate"
            classes = ("text",) if generates else tuple(map(str, data.classes or ()))
            target = data.target or "classes"
            values = None if target == "classes" else np.zeros((0, len(classes)))
            nothing = Examples(kind, source, (), none, none, targets=values)
            dataset = Dataset("the clients' own data", classes, nothing, nothing, target=target)
            if test is not None:
                dataset = load_silo(data, _of_task(test, task) if recipe.tasks else test, recipe.seed, generates)
            parts.append(cls(dataset, np.full(len(dataset.train), UNUSED), None, ()))
        whole = cls._joined(parts, list(recipe.task_names)) if recipe.tasks else parts[0]
        return replace(whole, names=names, members=members, remote_sizes=sizes)

    @classmethod
    def _joined(cls, parts: list[Federation], tasks: list[str]) -> Federation:
        """The federations of several tasks as one."""
        datasets = [part.dataset for part in parts]
        kinds = {task: dataset.kind for task, dataset in zip(tasks, datasets, strict=True)}
        if len(set(kinds.values())) > 1:
            raise HeadstartError(f"tasks: one backbone reads them all, and they are of several kinds: {kinds}")
        others = [task for task, dataset in zip(tasks, datasets, strict=True) if dataset.target != "classes"]
        if others:
            raise HeadstartError(
                f"tasks: {', '.join(others)} has no classes; targets of other kinds are for one [data]"
            )
        lengths = {task: d.train.dim for task, d in zip(tasks, datasets, strict=True) if d.kind == "features"}
        if len(set(lengths.values())) > 1:
            raise HeadstartError(f"tasks: features of all tasks are of one length, and theirs are {lengths}")
        if len({part.test_owners is None for part in parts}) > 1:
            raise HeadstartError("tasks: set partition.test to the same value ('shared' or 'follow') in every task")
        class_starts = [0, *np.cumsum([len(dataset.classes) for dataset in datasets])]
        clients = [part.n_clients for part in parts]
        client_starts = [0, *np.cumsum(clients)]

        def examples(split: str) -> Examples:
            given = [getattr(dataset, split) for dataset in datasets]
            labels = [each.labels + first for each, first in zip(given, class_starts, strict=False)]
            count = sum(len(each) for each in given)
            return Examples(datasets[0].kind, Joined(tuple(given)), (), np.arange(count), np.concatenate(labels))

        def owners(given: list[Ints]) -> Ints:
            return np.concatenate([np.where(o >= 0, o + f, UNUSED) for o, f in zip(given, client_starts, strict=False)])

        followed = [part.test_owners for part in parts if part.test_owners is not None]
        dataset = Dataset(
            "+".join(tasks),
            tuple(f"{task}: {name}" for task, each in zip(tasks, datasets, strict=True) for name in each.classes),
            examples("train"),
            examples("test"),
            examples("validation") if all(dataset.validation is not None for dataset in datasets) else None,
        )
        return cls(
            dataset,
            owners([part.owners for part in parts]),
            owners(followed) if followed else None,
            tuple(f"{task}/{name}" for task, part in zip(tasks, parts, strict=True) for name in part.names),
            tuple(tasks),
            np.repeat(np.arange(len(parts)), clients),
            tuple(map(int, class_starts[:-1])),
        )

    @property
    def class_names(self) -> list[tuple[str, ...]]:
        """The classes of each task, as its own data name them."""
        if len(self.tasks) == 1:
            return [self.dataset.classes]
        return [
            tuple(name.removeprefix(f"{task}: ") for name in self.dataset.classes[self.classes_of(number)])
            for number, task in enumerate(self.tasks)
        ]

    def clients_of(self, task: int) -> Ints:
        """The clients of a task, by its number."""
        return np.arange(self.n_clients) if self.members is None else np.flatnonzero(self.members == task)

    def classes_of(self, task: int) -> slice:
        """The classes of a task, by its number."""
        return slice(*(*self.class_starts, len(self.dataset.classes))[task : task + 2])

    def examples_of(self, task: int, split: str) -> Ints:
        """Positions of a task's examples in a split."""
        labels, classes = getattr(self.dataset, split).labels, self.classes_of(task)
        return np.flatnonzero((labels >= classes.start) & (labels < classes.stop))

    def tasks_of(self, clients: Ints) -> Ints:
        """The task of each client [M]."""
        return np.zeros(len(clients), np.int64) if self.members is None else self.members[clients]

    @property
    def n_clients(self) -> int:
        """Number of clients K."""
        return len(self.names)

    @property
    def unused(self) -> int:
        """Training examples that no client holds."""
        if self.remote_sizes is not None:
            return 0
        return int(np.count_nonzero(self.owners == UNUSED))

    @cached_property
    def counts(self) -> Ints:
        """Training examples [K, C] of each class at each client; all in one class where they are remote, since of
        which classes they are is the clients' own business."""
        if self.remote_sizes is not None:
            return np.eye(1, len(self.dataset.classes), dtype=np.int64) * self.remote_sizes[:, None]
        held = self.owners >= 0
        n_classes = len(self.dataset.classes)
        keys = self.owners[held] * n_classes + self.dataset.train.labels[held]
        return np.bincount(keys, minlength=self.n_clients * n_classes).reshape(self.n_clients, n_classes)

    @cached_property
    def sizes(self) -> Ints:
        """Training examples [K] of each client."""
        return np.asarray(self.counts.sum(axis=1))

    def pooled(self) -> Federation:
        """The same examples in one place, held by one client."""
        return Federation(self.dataset, np.minimum(self.owners, 0), None, ("everybody",))

    def rows_of(self, clients: Ints) -> tuple[Ints, Ints]:
        """Positions in the training split of these clients' examples, client after client, and their owners."""
        starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        sizes = self.sizes[clients]
        offsets = np.repeat(starts[clients] - (np.cumsum(sizes) - sizes), sizes)
        return self._by_client[np.arange(sizes.sum()) + offsets], np.repeat(clients, sizes)

    @cached_property
    def _by_client(self) -> Ints:
        order = np.argsort(self.owners, kind="stable")
        return order[self.unused :]


def _data_of(recipe: Recipe) -> Sequence[Data]:
    """The data of each task."""
    return recipe.tasks if recipe.data is None else (recipe.data,)


def _of_task(folder: str, task: str) -> str:
    """Of a folder with data for each task, the path of one."""
    place = Path(os.path.expanduser(folder))
    found = [path for path in place.iterdir() if task in (path.name, path.stem)] if place.is_dir() else []
    if len(found) != 1:
        raise HeadstartError(
            f"test {folder}: with several tasks it is a folder that holds one file or folder for each, called as the "
            f"task; for {task!r} it has {len(found)}"
        )
    return str(found[0])


def _firsts(owners: Ints, clients: int) -> Ints:
    """Position of each client's first example."""
    order = np.argsort(owners, kind="stable")
    return order[np.searchsorted(owners[order], np.arange(clients))]


def _test_owners(federation: Federation, how: object, seed: int) -> Ints:
    """Owners of the test split: by the data's own clients or domains, otherwise by class as in training."""
    train, test = federation.dataset.train, federation.dataset.test
    if isinstance(how, Natural) and train.clients is not None and test.clients is not None:
        number = np.full(len(federation.dataset.clients), UNUSED)
        number[train.clients] = federation.owners
        return number[test.clients]
    if isinstance(how, Domains) and train.domains is not None and test.domains is not None:
        held = np.zeros((federation.n_clients, len(federation.dataset.domains)), np.int64)
        np.add.at(held, (federation.owners, train.domains), 1)
        return follow(held, test.domains, seed)
    return follow(federation.counts, test.labels, seed)
