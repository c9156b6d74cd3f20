"""What a recipe will cost before it runs: for its own clients, and for as many as there may be."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headstart.config.recipe import Clients, Recipe
from headstart.core.ledger import peak_memory
from headstart.data import Federation
from headstart.engine.clock import DAY, reply_seconds
from headstart.methods.base import ALONE
from headstart.runner.check_federation import check_federation
from headstart.runner.dry_run import dry_run
from headstart.runner.dry_stage import Bill
from headstart.runner.run_recipe import Run
from headstart.runner.run_stage import StageRun
from headstart.solvers.cohort import Cohort

_USUAL = Clients()
SCALES = (10**6, 10**9)
"""Numbers of clients that every plan looks at."""
# Of every client, whether it is asked or not, a server has in memory: five whole numbers of the ledger, its name, and
# what a round's draw is made of; a checkpoint has the five numbers.
_LISTED, _SAVED = 40 + 80 + 24, 40
_PROBED = 4096
"""Examples that the probe of a simulation's speed goes through."""


@dataclass(frozen=True)
class Fleet:
    """The clients' machines and the server's, in bits and operations a second, and bytes."""

    clients: int | None = None
    """How many; those of the recipe's data where that is None."""
    uplink: float = _USUAL.uplink
    downlink: float = _USUAL.downlink
    availability: float = _USUAL.availability
    """Share of the day that a client can be asked in."""
    flops: float = _USUAL.flops
    server_link: float = 1e9
    server_memory: float = field(
        default_factory=lambda: float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    )
    server_disk: float = field(default_factory=lambda: float(shutil.disk_usage(".").free))

    @classmethod
    def of(cls, machines: Clients | None, **given: Any) -> Fleet:
        """As a recipe has its clients' machines, but for what is given."""
        keys = {"uplink", "downlink", "flops", "availability"}
        return cls(**((machines or _USUAL).model_dump(include=keys) | given))


@dataclass(frozen=True)
class Forecast:
    """What one stage costs with so many clients."""

    method: str
    clients: int
    rounds: int
    per_round: int
    client_up: float
    """Bytes that a client sends over the whole stage, on average over those that are asked."""
    client_up_most: float
    client_down: float
    bytes_up: float
    bytes_down: float
    forward_passes: float
    server_memory: float
    server_disk: float
    round_seconds: float
    rounds_per_day: float
    days: float
    slowest: str
    """What a round spends most of its time on."""
    exact: bool


@dataclass(frozen=True)
class Limit:
    """A resource of a stage that grows with the clients, and how many it is enough for."""

    stage: int
    resource: str
    available: float
    needed: Mapping[int, float]
    """By the number of clients."""
    enough_for: float
    """Clients; infinite where it does not grow."""


@dataclass(frozen=True)
class Plan:
    """The bill of a recipe."""

    stages: tuple[Forecast, ...]
    """With the fleet's clients."""
    limits: tuple[Limit, ...]
    """What runs out, the first one first."""
    simulation_seconds: float
    simulation_memory: float
    simulation_disk: float
    flops_per_pass: float
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values; what has no end is null."""
        found: dict[str, Any] = _finite(asdict(self))
        return found


def _finite(value: Any) -> Any:
    """The same with None in the place of infinity."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and np.isinf(value) else value


def make_plan(recipe: Recipe, fleet: Fleet) -> Plan:
    """What a recipe costs with its own data's clients here, and with a fleet's."""
    federation = Federation.of(recipe)
    check_federation(recipe, federation)
    run, stages = dry_run(recipe, federation)
    speed = Speed.of(run, [stage for stage, _ in stages])
    clients = fleet.clients or federation.n_clients
    bills = [bill for _, bill in stages]
    forecasts = tuple(forecast(bill, clients, fleet, speed.flops) for bill in bills)
    limits = [limit for number, bill in enumerate(bills) for limit in _limits(number, bill, fleet, speed.flops)]
    features = 4 * run.store.dim * (len(federation.dataset.train) + len(federation.dataset.test))
    own = [forecast(bill, federation.n_clients, fleet, speed.flops) for bill in bills]
    return Plan(
        forecasts,
        tuple(sorted(limits, key=lambda limit: limit.enough_for)),
        speed.seconds(stages),
        peak_memory() + features + max(one.server_memory for one in own),
        (features if run.store.backbone else 0)
        + max(one.server_disk for one in own)
        + sum(2 * federation.n_clients * bill.kept for bill in bills),
        speed.flops,
        tuple(_notes(bills, fleet, federation, run.store.backbone is None)),
    )  # fmt: skip


def forecast(bill: Bill, clients: int, fleet: Fleet, flops: float) -> Forecast:
    """A stage with so many clients, whose messages are as large on average as those of the recipe's own."""
    stage, ledger = bill.settings, bill.ledger
    here = len(ledger.bytes_up)
    rounds, per_round = (
        (bill.rounds, 1) if stage.pooled else (stage.rounds_for(clients), stage.buffer or stage.asked(clients))
    )
    asked, replied = int(bill.asked.sum()), int(np.count_nonzero(bill.asked))
    turns = float(rounds * per_round)
    if not stage.trains:
        turns = float(stage.passes * min(clients, stage.rounds_per_pass(clients) * per_round))
    everybody = 1 if stage.pooled else clients
    # Of N clients, of whom each round draws m, so many are drawn at least once.
    seen = turns / stage.passes if not stage.trains else everybody * -np.expm1(rounds * _log1m(per_round / everybody))
    up = ledger.bytes_up.sum() / asked * turns
    setup = bill.setup.sum() / replied * seen
    down = (ledger.bytes_down.sum() - bill.setup.sum()) / asked * turns + setup
    passes = bill.first_passes.sum() / replied * seen
    passes += (ledger.forward_passes.sum() - bill.first_passes.sum()) / asked * turns
    state = bill.state + bill.state_per_client * (seen - replied)
    saved = state + _SAVED * everybody
    most = float((ledger.bytes_up / np.maximum(bill.asked, 1)).max() * turns / seen)
    if clients == here:  # then who is drawn how often is known
        most = float(ledger.bytes_up.max())
    parts = reply_seconds(down / turns, passes / turns * flops, up / turns, fleet)
    server = 8 * max(up, down) / rounds / fleet.server_link
    waiting = max(0.0, per_round / everybody - fleet.availability) * DAY if not stage.pooled else 0.0
    # Of asynchronous clients, as many updates come in a reply's time as clients are at work.
    rate = stage.buffer / stage.sampled(clients) if stage.buffer else 1.0
    seconds = max(rate * sum(parts.values()), server) + waiting
    parts |= {"the server's link": server, "waiting for clients to be available": waiting}
    return Forecast(
        stage.method, clients, rounds, per_round, up / seen, most, down / seen, up, down, passes,
        2 * state + bill.total + bill.held * per_round + _LISTED * everybody, 2 * saved,
        seconds, DAY / seconds if seconds else float("inf"), rounds * seconds / DAY,
        max(parts, key=lambda name: parts[name]) if seconds else "nothing", bill.exact,
    )  # fmt: skip


def _log1m(share: float) -> float:
    return float(np.log1p(-share)) if share < 1 else -np.inf


def _limits(number: int, bill: Bill, fleet: Fleet, flops: float) -> list[Limit]:
    """What grows with the clients of a stage: the server's memory, its disk, and the time of a round."""

    def needed(resource: str, clients: int) -> float:
        found = forecast(bill, clients, fleet, flops)
        return {
            "server memory": found.server_memory, "server disk": found.server_disk,
            "a round within a day": found.round_seconds,
        }[resource]  # fmt: skip

    limits = {
        "server memory": fleet.server_memory, "server disk": fleet.server_disk, "a round within a day": DAY,
    }  # fmt: skip
    found = []
    for resource, available in limits.items():
        at = {scale: needed(resource, scale) for scale in SCALES}
        found.append(Limit(number, resource, available, at, _enough(lambda n, r=resource: needed(r, n), available)))
    return found


def _enough(needed: Any, available: float) -> float:
    """The largest number of clients, to two digits, whose need is met; what is needed only grows."""
    low, high = 0.0, 15.0  # powers of ten
    if needed(10**15) <= available:
        return float("inf")
    if needed(1) > available:
        return 0.0
    while high - low > 0.004:
        middle = (low + high) / 2
        low, high = (middle, high) if needed(round(10**middle)) <= available else (low, middle)
    return float(round(10**low))


def _notes(bills: list[Bill], fleet: Fleet, federation: Federation, of_features: bool) -> list[str]:
    """What was assumed."""
    notes = []
    if fleet.clients is not None and fleet.clients != federation.n_clients:
        notes.append(
            f"messages and examples of {fleet.clients:,} clients are taken to be, on average, those of the recipe's "
            f"{federation.n_clients:,}"
        )
    if of_features:
        notes.append("the data are features: what it takes clients to compute them is not in the times")
    if any(bill.settings.privacy and bill.settings.privacy.from_server for bill in bills):
        notes.append("clients that hide how many examples they have count no forward passes")
    if any(bill.settings.secure for bill in bills):
        notes.append("keys and shares of secure aggregation are not counted: on nodes, each sum takes them besides")
    if any(not bill.exact for bill in bills):
        notes.append(
            "bytes marked ≈ depend on what only the run will know; the others are exact for the recipe's clients"
        )
    if any(bill.settings.trains and bill.settings.patience for bill in bills):
        notes.append("patience may end a stage earlier")
    return notes


# ------------------------------------------------------------------------------------------------- how fast it is here


@dataclass(frozen=True)
class Speed:
    """What this machine needs: measured on a few examples of the data, and on made-up features."""

    flops: float
    """Floating-point operations of a forward pass of one example."""
    per_pass: float
    """Seconds of a forward pass."""
    per_example: tuple[float, ...]
    """Of each stage: seconds for an example of a client in a round on features that are at hand."""
    run: Run

    @classmethod
    def of(cls, run: Run, stages: list[StageRun]) -> Speed:
        """Measured."""
        flops, per_pass = _forward(run)
        return cls(flops, per_pass, tuple(_per_example(stage) for stage in stages), run)

    def seconds(self, stages: Sequence[tuple[StageRun, Bill]]) -> float:
        """Of a simulation of all stages in this process, tests included, reading the recipe's data not."""
        dataset = self.run.federation.dataset
        total = self.per_pass * (len(dataset.train) + len(dataset.test))
        for (stage, bill), each in zip(stages, self.per_example, strict=True):
            examples = float((stage.federation.sizes * bill.asked).sum())
            if stage.plan.changes_features:
                tests = len(dataset.test) * -(-bill.rounds // bill.settings.evaluate_every)
                total += self.per_pass * (float(bill.ledger.forward_passes.sum()) + tests)
            else:
                total += each * examples
        return total


def _forward(run: Run) -> tuple[float, float]:
    """Operations and seconds of a forward pass of one example; nothing where the data are features."""
    if run.store.backbone is None:
        return 0.0, 0.0
    rows, flops = np.arange(min(8, len(run.federation.dataset.train))), run.store.flops_per_pass
    began = time.perf_counter()
    run.store.embedded("train", rows)
    return flops, (time.perf_counter() - began) / len(rows)


def _per_example(stage: StageRun) -> float:
    """Seconds for an example in a round, of the first clients of the federation on made-up features."""
    if stage.plan.changes_features:
        return 0.0
    federation, method = stage.federation, stage.method
    runtime = stage.runtime
    mine = federation.clients_of(0)
    several = max(1, int(np.searchsorted(np.cumsum(federation.sizes[mine]), _PROBED)))
    mine = mine[: 1 if runtime.memory_per_client >= ALONE else several]
    rows, owners = federation.rows_of(mine)
    train = federation.dataset.train
    source = np.random.default_rng([0xF0CA]).standard_normal((len(rows), stage.run.store.dim)).astype(np.float32)

    def nothing(name: str, start: Any) -> Any:
        zeros = np.zeros((len(mine), *runtime.client_state[name]), np.float32)
        return zeros if start is None else zeros + start

    targets = None if train.targets is None else train.targets[rows]
    cohort = Cohort(
        mine, source, np.arange(len(rows)), train.labels[rows], owners, np.ones(len(mine), np.bool_), nothing,
        targets=targets,
    )  # fmt: skip
    message = method.broadcast(method.init(), 0, -1)
    took = []
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        runtime.answer(cohort, message)
        took.append(time.perf_counter() - began)
    return took[-1] / max(len(rows), 1)
