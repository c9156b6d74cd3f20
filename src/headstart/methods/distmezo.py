"""DistMeZO: every client takes MeZO steps of its own, with seeds of its own, and the server averages the weights.

The naive way to distribute MeZO (also what FederatedScope's FedMeZO does): whole models travel, as in FedAvg, and the
clients' directions have nothing in common.
"""

from __future__ import annotations

import numpy as np

from headstart.config.stage import DistMeZOStage
from headstart.core.statistics import Ints
from headstart.methods.training import TrainingMethod
from headstart.solvers.cohort import Cohort
from headstart.solvers.heads import LocalResult, Objective, Solver, Stack, learning_rate
from headstart.solvers.network import Network
from headstart.solvers.zeroth import ZerothOrder


class DistMeZOMethod(TrainingMethod[DistMeZOStage]):
    """FedAvg with zeroth-order steps on the clients."""

    needs_network = True

    def solver(self) -> Solver:
        """MeZO steps."""
        assert self.network is not None
        return ZerothSolver(self.network, self.stage, self.setting.seed)

    def round_passes(self, counts: Ints) -> int:
        """Two passes for each direction and step, over batches of the clients heard."""
        sizes = counts.sum(axis=1)
        seen = sizes if self.stage.batch_size == "full" else np.minimum(sizes, self.stage.batch_size)
        return 2 * self.stage.num_directions * self.stage.local_steps * int(seen.sum())

    def passes(self, size: int, steps: int, new: bool) -> int:
        """Through the body twice for each direction and step; once where only the head moves."""
        if not self.plan.changes_features:
            return size if new else 0
        return self.round_passes(np.array([[size]]))


class ZerothSolver:
    """Local MeZO steps of one client at a time, on batches of its own."""

    def __init__(self, network: Network, stage: DistMeZOStage, seed: tuple[int, ...]) -> None:
        self.network, self.stage, self.seed = network, stage, seed
        self.model = ZerothOrder(network, stage.epsilon, stage.temperature)

    def __call__(self, start: Stack, cohort: Cohort, round: int, objective: Objective) -> LocalResult:
        """start: parameters [1, …]; the cohort is one client."""
        stage, rate = self.stage, learning_rate(self.stage, round)
        (client,) = cohort.clients
        self.network.load({name: value[0] for name, value in start.items()})
        rng = np.random.default_rng([0xD157, *self.seed, round, int(client)])
        size = len(cohort.rows)
        for _ in range(stage.local_steps):
            count = size if stage.batch_size == "full" else min(stage.batch_size, size)
            rows, seed = np.sort(rng.permutation(size)[:count]), int(rng.integers(2**31))
            slopes = [self.model.slopes(cohort, rows, seed, n).mean() for n in range(stage.num_directions)]
            self.model.step(seed, np.array(slopes, np.float32), rate, stage.weight_decay)
        trained = {name: parameter.detach().cpu()[None].clone() for name, parameter in self.network.trained.items()}
        return LocalResult(trained, np.array([stage.local_steps]), {})
