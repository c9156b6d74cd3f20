"""What is wrong with one stage of a recipe: keys that exclude each other, and what a method does not do, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headstart.config.channel_checks import channel_errors
from headstart.config.stage import STAGES, Stage


@dataclass(frozen=True)
class RecipeContext:
    """What the checks of a stage need to know of the rest of its recipe."""

    several_tasks: bool
    has_clock: bool
    """Whether a table says how fast clients are."""
    has_body: bool
    """Whether there is a backbone: the data are not features."""
    quantised: bool
    model_task: str
    target: Any
    """What is learned, as the table of data says it."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> RecipeContext:
        """Of the table of a recipe, which need not be valid."""
        model, data = table.get("model"), table.get("data")
        model, data = model if isinstance(model, dict) else {}, data if isinstance(data, dict) else {}
        return cls(
            several_tasks=bool(table.get("tasks")),
            has_clock="clients" in table,
            has_body=model.get("backbone") != "features",
            quantised=bool(model.get("quantise")),
            model_task=str(model.get("task", "classify")),
            target=data.get("target"),
        )


def stage_errors(number: int, stage: Mapping[str, Any], context: RecipeContext) -> list[str]:
    """All that is wrong with the stage of this number, as far as no single key shows it."""
    problems = []
    if context.target in ("regression", "multilabel"):
        problems += [f".{problem}" for problem in _target_errors(stage, context.target)]
    problems += [f".{problem}" for problem in _first_reply_errors(stage, context.has_clock)]
    problems += _key_errors(number, stage, context)
    problems += _quantised_errors(stage) if context.quantised else []
    if context.model_task != "classify":
        problems += _words_errors(stage, context)
    return [f"stages.{number}{problem}" for problem in problems]


def _key_errors(number: int, stage: Mapping[str, Any], context: RecipeContext) -> list[str]:
    """Keys of a stage that do not go together; problems begin with the key they are about."""
    tasks = context.several_tasks
    problems, kind, start = [], STAGES.get(str(stage.get("method"))), stage.get("start")
    if isinstance(start, int) and start >= number:
        problems.append(f".start: {start} is not an earlier stage; the first stage has number 0")
    key, train = _trained(stage)
    if train not in (None, "head") and not context.has_body and not stage.get("compute"):
        problems.append(f".{key}: the data are features, there is no backbone to train; use 'head'")
    if kind is not None:
        problems += _method_errors(stage, kind, train, tasks)
    for one, other in (("clients_per_round", "participation"), ("local_epochs", "local_steps")):
        if {one, other} <= stage.keys():
            problems.append(f": set {one} or {other}, not both")
    if stage.get("head") == "mlp" and stage.get("head_init") == "zeros":
        problems.append(".head_init: an MLP of zeros has no gradient; use 'random'")
    if kind is not None:
        problems += channel_errors(stage, kind, tasks)
    return problems


def _method_errors(stage: Mapping[str, Any], kind: type[Any], train: Any, tasks: bool) -> list[str]:
    """What a method does not do, by what it says of itself; problems begin with the key they are about."""
    method, problems = stage["method"], []
    body, head = kind.representation, kind.classifier
    personal = "personal" in (body, head, kind.lora_b)
    if head == "frozen" and train == "all":
        problems.append(f".train: {method}'s head stays as it is; use 'body'")
    if head == "frozen" and train == "head" and stage.get("head") != "mlp":
        problems.append(
            f".train: {method} trains what is below the head; with 'head' alone, set head to 'mlp', whose hidden "
            "layers are what is below"
        )
    if "personal" in (body, head) and body != head and train == "body":
        problems.append(f".train: {method} trains a head too; use 'all'")
    if kind.pooled and {"clients_per_round", "participation"} & stage.keys():
        problems.append(f": {method} has no clients to sample from")
    if stage.get("share") and (tasks or not kind.communicates or personal):
        problems.append(".share: a server that trains on a share is for one task and one model")
    elif stage.get("share") and stage.get("share_train") == "body" and train == "head":
        problems.append(".share_train: no backbone is trained; use 'all'")
    if stage.get("keep") == "best" and (personal or kind.twin):
        problems.append(".keep: personal models are those of the last round; use 'last'")
    if stage.get("keep") == "best" and kind.phased:
        problems.append(f".keep: {method}'s first rounds train other parameters; use 'last'")
    if stage.get("patience") and kind.phased:
        problems.append(f".patience: {method}'s first rounds train other parameters, and it has to reach the last ones")
    if stage.get("momentum") and kind.plain_sgd:
        problems.append(f".momentum: {method} is defined for plain local SGD; leave it 0")
    both = kind.phased or kind.lora_b or kind.products
    if stage.get("freeze_a") and (train != "lora" or both):
        problems.append(
            f".freeze_a: {f'the factors of {method} both change' if both else 'A is a factor of a lora'}; "
            f"leave it out{'' if both else ', or set train to lora'}"
        )
    ranks, rank = stage.get("ranks"), stage.get("rank", 8)
    more = [each for each in ranks if isinstance(each, int)] if isinstance(ranks, list | tuple) else []
    if isinstance(rank, int) and max(more, default=0) > rank:
        problems.append(f".ranks: {max(more)} is more than the server's {rank}; set rank to it, or more")
    if train == "prefix":
        whole = [key for key in ("blocks", "checkpoint_gradients") if stage.get(key)]
        problems += [f".{key}: a prefix is in the cache of all blocks at once; leave it out" for key in whole]
    if train in ("all", "body") and stage.get("blocks") is not None:
        problems.append(
            f".blocks: with {train!r} all blocks train; leave it out, or train 'norms', 'lora' or another module in "
            "the last blocks"
        )
    if stage.get("batch_share") is not None and stage.get("batch_size", "full") != "full":
        problems.append(": set batch_share or batch_size, not both")
    if stage.get("probe_rounds") and "probe_rounds" in kind.model_fields:
        problems += [f".{problem}" for problem in _probe_errors(stage)]
    if stage.get("optimiser") == "adamw" and (kind.plain_sgd or kind.sgd_only):
        problems.append(f".optimiser: {method} is defined for local SGD; use 'sgd'")
    elif stage.get("optimiser") == "adamw" and stage.get("momentum"):
        problems.append(".momentum: adamw has its own; leave it out")
    return problems


def _trained(stage: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that says what a stage trains, and what it says."""
    kind, key = STAGES.get(str(stage.get("method"))), "update" if stage.get("method") == "personalise" else "train"
    return key, stage.get(key, kind.model_fields[key].default if kind and key in kind.model_fields else None)


def _target_errors(stage: Mapping[str, Any], target: str) -> list[str]:
    """What a stage does not do with targets that are no classes."""
    problems, kind, privacy = [], STAGES.get(str(stage.get("method"))), stage.get("privacy")
    if kind is not None and not kind.any_target:
        problems.append(f"method: {stage['method']} learns classes, and data.target is {target!r}; use fed3r")
    if isinstance(privacy, Mapping) and "test_epsilon" in privacy:
        problems.append("privacy.test_epsilon: errors have no largest value for noise to hide; test on the server")
    return problems


def _words_errors(stage: Mapping[str, Any], context: RecipeContext) -> list[str]:
    """What a stage asks of a head, where the model answers in words; problems begin with the key they are about."""
    problems, kind = [], STAGES.get(str(stage.get("method")))
    generates = context.model_task == "generate"
    key = "update" if stage.get("method") == "personalise" else "train"
    if stage.get(key) == "head":
        problems.append(f".{key}: a model that answers in words has no head to train; use 'lora', 'norms' or 'all'")
    if stage.get("head_init", "previous") != "previous" or stage.get("head") == "mlp":
        problems.append(": a model that answers in words has its own head; leave head_init and head out")
    if kind and kind.trains and "personal" == kind.classifier != kind.representation:
        problems.append(f".method: {stage['method']} gives clients heads of their own, and there are none; use fedavg")
    problems += [
        f".{key}: a model that answers in words has its own head; leave {key} out"
        for key in ("compute", *(["without_head"] if generates else []))
        if stage.get(key)
    ]
    if kind and generates and not kind.trains:
        problems.append(f".method: {stage['method']} computes a head, and a model that generates has none; use fedavg")
    elif kind and context.several_tasks and not kind.trains:
        problems.append(
            f".method: {stage['method']} computes heads on features of one length, and words are each task's own; "
            "leave model.task and label_words out, for heads on the states that the prompts end in"
        )
    return problems


def _quantised_errors(stage: Mapping[str, Any]) -> list[str]:
    """What would change weights of few bits, which stay as they are; problems begin with the key they are about."""
    kind, (key, train) = STAGES.get(str(stage.get("method"))), _trained(stage)
    if train in ("body", "all", "norms"):
        return [f".{key}: a backbone that model.quantise rounds stays frozen; use 'lora', another module, or 'head'"]
    if kind and (kind.phased or kind.folds):
        return [f".method: {stage['method']} changes weights that model.quantise rounds; use fedavg or flexlora"]
    return []


def _probe_errors(stage: Mapping[str, Any]) -> list[str]:
    """What does not go with a rate that is measured."""
    problems, rounds = [], stage.get("rounds", 100)
    if "lr" not in stage:
        problems.append("lr: with probe_rounds it is a share of the rate that is measured; give it, such as 0.3")
    if stage.get("beta2") is not None:
        problems.append("beta2: it makes the rate independent of the slopes, and probe_rounds measures it; use one")
    if isinstance(rounds, int) and rounds <= stage["probe_rounds"]:
        problems.append(f"probe_rounds: all of the {rounds} rounds would measure and none would step; use fewer")
    return problems


def _first_reply_errors(stage: Mapping[str, Any], timed: bool) -> list[str]:
    """Why the first clients of a round, or of all, cannot be the ones that count."""
    kind, problems = STAGES.get(str(stage.get("method"))), list[str]()
    asked = [key for key in ("over_selection", "buffer") if stage.get(key) and kind and key in kind.model_fields]
    for key in asked:
        if not timed:
            problems.append(f"{key}: who is first depends on how fast clients are; add a [clients] table")
        if kind and (kind.pooled or not kind.communicates):
            problems.append(f"{key}: with {stage['method']} nothing travels; leave it out")
        if stage.get("secure"):
            problems.append(f"{key}: secure aggregation needs clients that are known before; leave one of the two out")
        if stage.get("privacy") is not None:
            problems.append(
                f"{key}: privacy is accounted for where chance alone draws clients; leave one of the two out"
            )
    if len(asked) == 2:
        problems.append("over_selection: asynchronous clients are replaced as soon as they have replied; leave it out")
    if kind and "buffer" in asked:
        others = [block for block in (*kind.sends, *kind.numbers) if block != "update"]
        reasons = {
            f"sends {(others or [''])[0]!r}, too, which is of its own round": others,
            "adds up the updates of all rounds, each as it was sent": kind.accumulates and not others,
            "multiplies the factors of each client": kind.products,
            "sends other values in its first rounds than in its last": kind.phased,
        }
        problems += [f"buffer: {stage['method']} {why}; use fedavg" for why, holds in reasons.items() if holds]
    return problems


_PARTNERS: dict[str, tuple[str, Any]] = {
    "secure_group": ("secure", True), "secure_threshold": ("secure", True), "top_k": ("compress", "top-k"),
    "trim": ("combine", "trimmed-mean"), "hidden": ("head", "mlp"), "staleness": ("buffer", None),
}  # fmt: skip
"""Keys that have an effect beside one value of another key only; None: beside any."""


def idle_keys(stage: Stage) -> list[str]:
    """Keys that have no effect, which may be left from a value that is tried out beside others."""
    fields, found = type(stage).model_fields, []
    for key, (partner, value) in _PARTNERS.items():
        if key not in fields or getattr(stage, key) == fields[key].default:
            continue
        given = getattr(stage, partner)
        if given is None or (value is not None and given != value):
            wanted = "" if value is None else f" = {'true' if value is True else repr(value)}"
            found.append(f"{key}: it has no effect without {partner}{wanted}")
    return found
