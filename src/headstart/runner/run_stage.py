"""One stage of a run, from the model it starts from to the model it leaves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.channel.accounting import large_delta
from headstart.channel.figures import FiguresChannel
from headstart.core.files import secret
from headstart.core.ledger import Ledger
from headstart.core.message import Array, Scalar
from headstart.core.metrics import wilson_interval
from headstart.core.plan import part_of
from headstart.core.seeds import Secret, Seed, extended
from headstart.core.state import pack, unpack
from headstart.engine.buffered import Flights
from headstart.engine.client import ClientRuntime
from headstart.engine.client_states import ClientStates, RemoteStates
from headstart.engine.clock import Clock
from headstart.engine.local import LocalClients, shared_examples
from headstart.engine.model_store import PRETRAINED
from headstart.engine.round import Costs, Transport, play_rounds
from headstart.engine.server import Server
from headstart.engine.setup import StageSetup, Start, method_of, plan_of
from headstart.errors import HeadstartError
from headstart.methods import Population, Task
from headstart.records import Checkpoint, StageModel
from headstart.runner.costs import paper_cost
from headstart.runner.evaluators import Evaluator, LocalEvaluator, NodeEvaluator
from headstart.runner.observers import Observers, StageRecord

if TYPE_CHECKING:
    from headstart.engine.flower import FlowerClients
    from headstart.runner.run_recipe import Run

log = logging.getLogger("headstart")


def run_stage(run: Run, number: int, saved: Checkpoint | None) -> None:
    """One stage; saved: the round to go on from, where it was interrupted."""
    stage = StageRun(run, number, saved)
    server, clients, observers = stage.server, stage.clients, Observers(stage)
    if (stage.settings.personalises or stage.answers_already) and saved is None:
        observers(-1, server.state)
    if saved is not None and not saved.progress.get("evaluated", True):
        observers.finish_round(server.state)
    first = stage.rounds if observers.out_of_patience else stage.record.done
    play_rounds(server, clients, stage.costs, stage.draw_seed, observers, first)
    if stage.states.finalise(stage.own):  # from here on, what earlier stages have left with the clients is not needed
        observers.save(server.state)
    stage.leave(observers.kept(server.state))


class StageRun:
    """A stage of a run: what it starts from, who takes part, and what is noted of it."""

    def __init__(self, run: Run, number: int, saved: Checkpoint | None) -> None:
        self.run, self.number = run, number
        self.settings = run.recipe.stages[number]
        if (sizes := run.federation.remote_sizes) is not None:  # of all that it started with, before it was interrupted
            self.settings = self.settings.deployed(int(np.count_nonzero(sizes)))
        self.seed = (run.recipe.seed, number)
        self.federation = run.federation.pooled() if self.settings.pooled else run.federation
        self.remote = self.federation.remote_sizes is not None
        self.begin = self._begin()
        run.store.load(self.begin.body)
        self.personal = self._personal()
        self.plan = plan_of(self.settings, self.personal, run.store.fixed_head)
        self.before = self._before()
        """Features of the evaluated split before the stage, where it changes those of all clients."""
        module, norm_statistics = run.store.module, run.store.norm_statistics
        self.tasks = self._tasks()
        hides = self.settings.privacy is not None and self.remote
        self.noise: Seed = Secret(secret(run.folder / "noise.secret")) if hides else ()
        self.method, self.channel = method_of(self.settings, self.plan, self.seed, run.store, self.tasks, self.noise)
        if self.settings.validates_temperature:
            self._give_validation()
        self.start = Start(self._weights(), module, norm_statistics, self.personal, self._own_names())
        self.rounds = self.settings.rounds_for(self.federation.n_clients)
        if warning := self._large_delta():
            log.warning("stages.%d.privacy.delta: %s", number, warning)
        self.validates = self.settings.trains and run.federation.dataset.validation is not None
        self._embed()
        self._open(saved)

    def _open(self, saved: Checkpoint | None) -> None:
        """The server, the ledger and the clients' states, as they are at first or in a checkpoint."""
        simulated = None if self.run.recipe.clients is None else 0.0
        self.ledger, slots, self.record = Ledger.open(self.federation.n_clients, simulated), None, StageRecord()
        if saved is None or saved.stage is None:
            state = self.method.init()
        else:
            self.ledger, slots = saved.stage.ledger, saved.stage.slots
            state = unpack(self.method.state_type, saved.stage.state)
            if self.method.replays:  # clients in this process share the weights that have taken the log's steps
                for task in range(len(self.tasks)):
                    self.method.load(self.method.model(state, task), task)
            progress = saved.progress
            self.record = StageRecord(progress["round"], progress["metrics"], progress["best"])
        self.states = self._states(slots)
        self.server = Server(self.settings, self.method, self.channel, self.federation, state)
        if self.settings.buffer and saved is not None and saved.stage is not None:
            self.server.under_way = unpack(Flights, saved.stage.under_way)
        if self.settings.share:
            self.server.data = shared_examples(self.settings.share, self.federation, self._source(), self.seed)

    # --------------------------------------------------------------------------------------------- what it starts from

    def _begin(self) -> StageModel:
        """The model that the stage starts from."""
        origin = self.run.origin(self.number)
        if origin == PRETRAINED:
            tasks = range(len(self.run.federation.tasks))
            return StageModel(tuple(self.run.store.label_words(task) for task in tasks), PRETRAINED)
        return self.run.models[origin]

    @property
    def answers_already(self) -> bool:
        """Whether the model it starts from answers without any training, so that round 0 is worth a look."""
        words, settings = self.run.store.label_words(), self.settings
        untrained = self.run.origin(self.number) == PRETRAINED and settings.head_init == "previous"
        return words is not None and untrained and settings.trains and not self._tested_by_nodes

    def _own_names(self) -> frozenset[str]:
        """Parameters that are each client's own already."""
        names = self.begin.states.shapes if self.begin.states else {}
        return frozenset(name.partition("@")[0].removeprefix("personal.") for name in names)

    def _personal(self) -> frozenset[str]:
        """Parts of the model that are each client's own already."""
        parts = frozenset(part_of(name) for name in self._own_names())
        if self.settings.needs_shared_body and parts - {"head", "hidden"}:
            raise HeadstartError(
                f"stages.{self.number}.compute: the earlier stage gave every client a backbone of its own; "
                "fine-tune instead"
            )
        return parts

    def _tasks(self) -> tuple[Task, ...]:
        """What is known of each task."""
        federation, module = self.federation, self.run.store.module
        tasks = []
        for number, name in enumerate(federation.tasks):
            classes, clients = federation.classes_of(number), federation.clients_of(number)
            population = Population(len(clients), int(federation.sizes[clients].sum()))
            values = module.values[number] if module and module.values else None
            head, target = self.begin.heads[number], federation.dataset.target
            tasks.append(Task(name, classes.stop - classes.start, population, head, values, target))
        return tuple(tasks)

    def _weights(self) -> Mapping[str, Array]:
        """The weights of the backbone where earlier stages have trained it; on nodes they are needed as they are
        now."""
        if self.run.store.weights == PRETRAINED:
            return {}
        arrays = self.run.store.arrays()
        return arrays if self.run.nodes is None else {name: array.copy() for name, array in arrays.items()}

    def _give_validation(self) -> None:
        """The validation split, to those who calibrate on it."""
        federation, features = self.run.federation, self.run.store.features("validation")
        for task, method in enumerate(self.method.methods):
            rows = federation.examples_of(task, "validation")
            labels = federation.dataset.validation.labels[rows] - federation.classes_of(task).start  # type: ignore[union-attr]
            method.validation = features[rows], labels  # type: ignore[attr-defined]

    def _before(self) -> Any:
        """Features of the evaluated split, to be compared with those after the stage; None where they stay."""
        store = self.run.store
        shares = "shared" in (self.plan.body, self.plan.module) and not store.fixed_head
        return store.known(self.settings.eval_split) if shares and not self.remote else None

    def _embed(self) -> None:
        """Features, before the clock of the stage starts, and with a progress bar of their own."""
        splits = ["train", self.settings.eval_split, *(["validation"] if self.validates else [])]
        for split in () if self.plan.changes_features else splits:
            if len(getattr(self.federation.dataset, split)):  # a server may hold none
                self.run.store.features(split)

    @cached_property
    def setups(self) -> dict[tuple[int, bool], StageSetup]:
        """The setup of a client of a task, without and with personal parameters from earlier stages."""
        found = {}
        for task in range(len(self.tasks)):
            setup = StageSetup.of(
                self.seed, self.settings, self.plan, self.tasks, task, self.start, self.method.replays
            )
            found[task, False], found[task, True] = setup, setup.without(self.start.own)
        return found

    # -------------------------------------------------------------------------------------------------- who takes part

    @property
    def draw_seed(self) -> Seed:
        """What draws clients. Sampling amplifies privacy only where nobody knows who was drawn: then a secret does."""
        remote = self.run.nodes is not None and not self.settings.pooled
        return extended(self.noise, *self.seed) if remote else self.seed

    @property
    def noises_totals(self) -> bool:
        """Whether this server hides somebody from whoever sees the models."""
        return self.remote and self.settings.privacy is not None and self.settings.privacy.noise == "server"

    def _states(self, slots: Any) -> ClientStates:
        """What stays with clients: here, or on machines of their own."""
        count, shapes, earlier = self.federation.n_clients, self.runtime.client_state, self.begin.states
        if self.remote:
            return RemoteStates(count, shapes, slots, earlier)

        def inherits(name: str) -> bool:
            return self.settings.head_init == "previous" or not name.startswith("personal.head.")

        folder, durable = self.run.folder / f"clients-{self.number}", self.run.directory.path is not None
        return ClientStates(folder, count, shapes, slots, earlier, inherits, durable)

    def _source(self) -> Any:
        """What clients read here: examples where the backbone changes, features where it does not."""
        return self.run.store.inputs() if self.plan.changes_features else self.run.store.features("train")

    @property
    def runtime(self) -> ClientRuntime:
        """What a client does."""
        return ClientRuntime(self.method, self.channel)

    @cached_property
    def clock(self) -> Clock | None:
        """Simulated time, from where the stages before have left it."""
        clients = self.run.recipe.clients
        if clients is None or self.settings.pooled:
            return None
        clock = Clock.of(clients, self.federation.names, self.run.recipe.seed)
        clock.operations = self.run.store.flops_per_pass
        clock.began, clock.now = self.run.spent["simulated_seconds"], self.ledger.simulated_seconds or 0.0
        return clock

    @cached_property
    def clients(self) -> Transport:
        """The clients: in this process, or on nodes."""
        if self.run.nodes is None or self.settings.pooled:
            waits = self.settings.communicates and self.settings.trains  # others are asked whenever they are there
            clock = self.clock if waits else None
            return LocalClients(self.runtime, self.federation, self._source(), self.states, clock)
        from headstart.engine.flower import FlowerClients

        return FlowerClients(
            self.run.nodes, self.settings, self.number, self._members, self.setups, self.states, self._earlier(),
            self.channel.vector_shapes, self.figures, lambda: self.channel.shared, rounds_done=max(self.record.done, 0),
        )  # fmt: skip

    @property
    def _members(self) -> Any:
        """[K] The task of each client."""
        return self.federation.tasks_of(np.arange(self.federation.n_clients))

    def _earlier(self) -> list[tuple[int, ClientStates]]:
        """The stages whose clients have something of their own that this one goes on from, the last one first."""
        found, number = [], self.number
        while (number := self.run.origin(number)) != PRETRAINED and (states := self.run.models[number].states):
            found.append((number, states))
            if not isinstance(states, RemoteStates):  # it has brought along all there was before
                break
        return found

    @property
    def costs(self) -> Costs:
        """What asking clients costs; who has something of its own already needs less of earlier stages' work."""
        if self.settings.pooled:
            return Costs(self.ledger, np.zeros(self.federation.n_clients, np.int64), self.settings.communicates)
        states = self.begin.states
        owns = [states is not None and states.has(client) for client in range(self.federation.n_clients)]
        sizes = {key: setup.nbytes for key, setup in self.setups.items()}
        # Whose task is not known is not asked.
        needs = np.array([sizes.get((int(task), has), 0) for task, has in zip(self._members, owns, strict=True)])
        return Costs(self.ledger, needs, self.settings.communicates, self.clock)

    # ------------------------------------------------------------------------------------------------- what is noted

    @cached_property
    def figures(self) -> list[FiguresChannel]:
        """What nodes of each task tell of tests."""
        clients, noise = self.federation.n_clients, extended(self.noise, *self.seed)
        return [FiguresChannel.of(self.settings, clients, noise, task.n_classes, task.target) for task in self.tasks]

    @property
    def _tested_by_nodes(self) -> bool:
        """Whether nodes are asked how good the model is: the server has no data, or every client its own model."""
        return self.remote and (self.method.personal or not len(self.federation.dataset.test))

    @cached_property
    def evaluator(self) -> Evaluator:
        """Looks at the model here, or asks the nodes."""
        federation, changes = self.federation, self.plan.changes_features
        if not self._tested_by_nodes:
            return LocalEvaluator(self.run.federation, self.run.store, self.method, self.states, changes)
        if not self.settings.tests_on_nodes:
            log.warning(
                "stages.%d: nodes test no models under privacy without test_epsilon%s: the accuracy is not known",
                self.number, "" if self.method.personal else ", and the server was given no test data",
            )  # fmt: skip
        clients: FlowerClients = self.clients  # type: ignore[assignment]
        return NodeEvaluator(federation, self.method, clients, self.run.store.generates)

    # -------------------------------------------------------------------------------------------------- what it leaves

    def own(self, client: int) -> dict[str, Any]:
        """What is a client's own now, by the names of its state."""
        task = int(self.federation.tasks_of(np.array([client]))[0])
        kept = self.method.personal_params(partial(self.states.read, clients=np.array([client])), task)
        names = {f"personal.{name}{end}": name for name in kept for end in ("", f"@{self.federation.tasks[task]}")}
        return {full: kept[name][0] for full, name in names.items() if full in self.states.shapes}

    def leave(self, state: Any) -> None:
        """The model of the state that the stage ends with, and what the summary has of it."""
        last, ledger, settings = self.server.state, self.ledger, self.settings
        counts = self.federation.counts[(ledger.forward_passes > 0) | (ledger.last_round >= 0)]
        if settings.privacy and settings.privacy.from_server:  # how many examples there are is not to be known
            counts = np.zeros_like(counts)
        done = self.record.done
        cost = paper_cost(settings, self.method, self.tasks, self.run.store.dim, done, counts, last)
        self._save(state)
        self.run.stages.append(
            {
                "method": settings.method,
                "rounds": done,
                "eval_split": settings.eval_split,
                **({"keep": "best"} if settings.keep == "best" else {}),
                **self.record.metrics,
                **self._certainty(),
                **{name: value for name, value in self.record.best.items() if name.startswith("best_")},
                **ledger.totals(),
                "published_bytes": cost.bytes,
                "published_compute": cost.forward_passes,
                "published_formula": cost.formula,
                "chosen": dict(self.method.selected(state)) if len(self.tasks) == 1 else {},
                **self.privacy(),
                "dropped": ledger.dropped,
                "absent": ledger.absent,
            }
        )
        self.run.spent = {name: round(self.run.spent[name] + cost, 3) for name, cost in ledger.totals().items()}

    def _certainty(self) -> dict[str, Any]:
        """The 95 % confidence interval of the accuracy, where it is known how many examples were tested."""
        accuracy, tested = self.record.metrics.get("accuracy"), self.record.metrics.get("test_examples")
        if accuracy is None or not tested:
            return {}
        return {"accuracy_interval": list(wilson_interval(accuracy, tested))}

    def privacy(self) -> dict[str, Any]:
        """What the rounds so far and the tests on nodes have spent, where they guarantee anything."""
        guarantee, found = self.channel.spent(self.record.done), dict[str, Any]()
        if guarantee:
            warning = self._large_delta()
            found["privacy"] = guarantee | ({"warning": warning} if warning else {})
        if (guarantee := self.figures[0].guarantee) and self._tested_by_nodes:
            found["test_privacy"] = guarantee
        return found

    def _large_delta(self) -> str | None:
        """What to say of the stage's δ, by the number of examples or clients, as far as it is known."""
        privacy = self.settings.privacy
        if privacy is None:
            return None
        if self.settings.trains:
            return large_delta(privacy.delta, "client", self.federation.n_clients)
        return large_delta(privacy.delta, "example", int(self.federation.sizes.sum()))

    def _save(self, state: Any) -> None:
        """The model of a state, for later stages and for the user."""
        run, changes = self.run, self.plan.changes_features
        heads, values = [], []
        for task in reversed(range(len(run.federation.tasks))):  # the first task's module is what stays on the backbone
            heads.append(self.method.load(self.method.model(state, task), task))
            values.append(run.store.module_values())
        version, body = None, self.begin.body
        if changes:
            trained = self.plan.body == "shared" or self.method.folds
            version = run.store.keep(self.number, self.settings.norm_statistics, values[::-1], trained)
            body = self.number
        run.models.append(StageModel(tuple(heads[::-1]), body, self.states if self.states.shapes else None))
        run.directory.save_model(self.number, run.models[-1], version)
        if version is not None and self.number + 1 < len(run.recipe.stages):
            run.store.remember(self.number, run.directory.kept(self.number, version))
        if self.method.replays:
            run.directory.save_log(self.number, pack(state))
        if self.settings.keep_statistics:
            clients, names = state.clients, run.federation.names
            held = {"names": json.dumps({names[int(client)]: int(client) for client in clients})}
            about: dict[str, Scalar] = {
                **held,
                "classes": json.dumps(run.federation.dataset.classes),
                "last": len(names) - 1,
            }
            run.directory.save_statistics(self.number, pack(state), about)
