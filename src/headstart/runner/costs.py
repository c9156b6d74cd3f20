"""What the papers charge a method for: their own formulas, over what a stage did."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstart.core.directions import sent_directions
from headstart.core.ledger import COSTS, Cost, CostFacts, Published
from headstart.core.plan import Plan
from headstart.core.statistics import Ints
from headstart.methods import Method, Task


def fedncm(facts: CostFacts) -> Published:
    """Counted like one round of linear probing; the paper's table prints the compute as 1."""
    total = 2 * facts.n_classes * facts.dim * len(facts.counts) * 4
    return Published(total, facts.examples, "FedNCM paper, appendix A: 2 · C · d · K · 4 bytes, up and down")


def fed3r(facts: CostFacts) -> Published:
    """As the FedCOF paper counts it; half of the symmetric Gram matrix is redundant."""
    rows = int(np.count_nonzero(facts.counts))
    total = (rows * facts.dim + len(facts.counts) * facts.dim**2) * 4
    return Published(total, facts.examples, "FedCOF paper, appendix H: (P · d + K · d²) · 4 bytes, up")


def fedcof(facts: CostFacts) -> Published:
    """Bytes up of the P means, and of what K clients tell besides; the paper does not charge the counts."""
    d, stage = facts.dim, facts.stage
    if stage.covariance == "estimated" and stage.sent_within != "estimated":
        each, name = (d, "d") if stage.sent_within == "diagonal" else (1, "1")
        sizes, classes = facts.counts.sum(axis=1), np.count_nonzero(facts.counts, axis=1)
        sent = int(sent_directions(sizes, classes, stage.rank, d, stage.min_examples).sum()) * d
        if stage.sketched:
            sent = len(facts.counts) * min(stage.rank, d) * d
        numbers = f"(P · d + K · {name}{' + Σ r · d' * bool(stage.rank)})"
        formula = f"FedCOF paper, appendix H, and the scatter of clients: {numbers}"
        total = facts.rows * d + len(facts.counts) * each + sent
        return Published(total * 4, facts.examples, f"{formula} · 4 bytes, up")
    extra = {"estimated": 0, "full": d * d, "diagonal": d, "spherical": 1}[stage.covariance]
    what = "P · d" if not extra else f"P (d + {'d²' if extra == d * d else 'd' if extra == d else '1'})"
    return Published(facts.rows * (d + extra) * 4, facts.examples, f"FedCOF paper, appendix H: {what} · 4 bytes, up")


def closed_form(facts: CostFacts) -> Published:
    """Of a closed form that no paper counts: a mean of each class that a client has."""
    total = int(np.count_nonzero(facts.counts)) * facts.dim * 4
    return Published(total, facts.examples, "P · d · 4 bytes, up")


def training(facts: CostFacts) -> Published:
    """Both directions, without the bias of the head; every example in every local epoch."""
    return _exchanged(facts, _passes(facts))


def _exchanged(facts: CostFacts, passes: int) -> Published:
    """What training exchanges; passes: of a round."""
    plan: Plan = facts.stage.plan
    values = facts.shared - (facts.n_classes if plan.head == "shared" else 0)
    what = "(C · d + P)" if plan.changes_features else "C · d"
    total = round(2 * values * facts.per_round * facts.rounds * 4)
    formula = f"FedNCM paper, appendix A: 2 · {what} · K · R · 4 bytes, up and down"
    return Published(total, facts.rounds * passes, formula)


def no_communication(facts: CostFacts) -> Published:
    """No paper counts it."""
    return Published(0, facts.rounds * _passes(facts), "nothing travels")


def fedyolo(facts: CostFacts) -> Published:
    """One direction, and every parameter of a client's module and head."""
    total = round(4 * facts.shared * facts.per_round * facts.rounds)
    return Published(total, facts.rounds * _passes(facts), "FedYolo paper: T · M · P parameters of 4 bytes, one way")


def fedmezo(facts: CostFacts) -> Published:
    """The thesis counts one byte for a seed and for a scalar."""
    directions = facts.stage.num_directions
    total = facts.rounds * facts.per_round * (1 + 2 * directions)
    passes = 2 * directions * facts.rounds * int(seen_examples(facts.stage, facts.counts.sum(axis=1)).sum())
    return Published(total, passes, "thesis, Eq. 6: R · (K + 2 · K · num_z) bytes, up and down")


def distmezo(facts: CostFacts) -> Published:
    """As training, with two passes for each direction and step."""
    stage = facts.stage
    seen = int(seen_examples(stage, facts.counts.sum(axis=1)).sum())
    return _exchanged(facts, 2 * stage.num_directions * stage.local_steps * seen)


def slora(facts: CostFacts, primed: int, masked: int, lora: int) -> Published:
    """The thesis's Eq. 7 with the sizes of this model: one direction, without the head."""
    first = min(facts.rounds, primed)
    total = 4 * facts.per_round * (first * masked + (facts.rounds - first) * lora)
    formula = "thesis, Eq. 7: (R₁ · density · |W| + R₂ · |LoRA|) · K · 4 bytes, up"
    return Published(total, facts.rounds * _passes(facts), formula)


COSTS |= {
    "fedncm": fedncm, "fed3r": fed3r, "fedcof": fedcof, "fedyolo": fedyolo, "fedmezo": fedmezo, "distmezo": distmezo,
    "centralised": no_communication, "local-only": no_communication, "personalise": no_communication,
}  # fmt: skip


def paper_cost(
    stage: Any, method: Method[Any], tasks: tuple[Task, ...], dim: int, rounds: int, counts: Ints, state: Any
) -> Published:
    """The cost of a stage as its paper counts it; counts: [K, C] of the clients that replied."""
    clients = sum(task.population.clients for task in tasks)
    if not stage.trains:
        return _closed_forms(stage, method.methods, tasks, counts, getattr(state, "tasks", (state,)))
    # Where tasks differ, the mean over all clients.
    classes = sum(t.population.clients * t.n_classes for t in tasks) / clients
    if stage.method == "slora":  # modules of tasks are of one size
        parts: Any = (method.priming, method.tuning)  # type: ignore[attr-defined]
        facts = CostFacts(stage, classes, dim, clients, rounds, counts)  # type: ignore[arg-type]
        return slora(facts, method.switch, *(_module_size(part.methods[0].shapes) for part in parts))  # type: ignore[attr-defined]
    weighted = list(zip(method.methods, tasks, strict=True))
    shared = sum(t.population.clients * _size(getattr(part, "shapes", {})) for part, t in weighted) / clients
    facts = CostFacts(stage, classes, dim, clients, rounds, counts, shared=shared)  # type: ignore[arg-type]
    return COSTS.get(stage.method, training)(facts)


def _closed_forms(stage: Any, parts: Any, tasks: tuple[Task, ...], counts: Ints, states: Any) -> Published:
    """The sum over the tasks; a client's task is the one whose classes it has."""
    cost: Cost = COSTS.get(stage.method, closed_form)
    stops, costs = np.cumsum([task.n_classes for task in tasks]), []
    for part, task, stop, state in zip(parts, tasks, stops, states, strict=True):
        mine = counts[:, stop - task.n_classes : stop]
        mine = mine if len(tasks) == 1 else mine[mine.sum(axis=1) > 0]
        clients = task.population.clients
        costs.append(cost(CostFacts(stage, task.n_classes, part.summary.dim, clients, 1, mine, state.rows)))
    return Published(sum(one.bytes for one in costs), sum(one.forward_passes for one in costs), costs[0].formula)


def _passes(facts: CostFacts) -> int:
    """The forward passes of a round: every example in every local epoch, or those of the batches of the local steps.

    A step on the backbone counts as three.
    """
    examples = sum(batch_examples(facts.stage, int(size)) for size in facts.counts.sum(axis=1))
    return (3 if facts.stage.plan.changes_features else 1) * examples


def batch_examples(stage: Any, size: int) -> int:
    """Examples in the batches of a round of a client with so many; a meta step takes two batches of a half."""
    if not stage.local_steps:
        return int((stage.local_epochs or 1) * size)
    paired = stage.method == "per-fedavg"
    whole = -(-size // 2) if paired else size
    width = whole if stage.batch_size == "full" else min(stage.batch_size, whole)
    if not width:
        return 0
    steps: int = (2 if paired else 1) * stage.local_steps
    epochs, rest = divmod(steps, -(-size // width))
    return int(epochs * size + rest * width)


def seen_examples(stage: Any, sizes: Ints) -> Ints:
    """Examples [M] that a step looks at, of clients with so many [M]."""
    return np.array([stage.seen(size) for size in sizes.tolist()], np.int64)


def _size(shapes: Any) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


def _module_size(shapes: Any) -> int:
    return _size({name: shape for name, shape in shapes.items() if name.startswith("module.")})
