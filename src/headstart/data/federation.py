"""A federation: one data set, and who holds which of its examples. Clients are index views, never copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headstart.data.examples import Dataset, Ints
from headstart.data.load import load_dataset
from headstart.data.partition import UNUSED, follow, partition
from headstart.recipe import Domains, Natural, Recipe


@dataclass(frozen=True, eq=False)
class Federation:
    """The clients of a run.

    owners: [N] the client of each training example, -1 for none; test_owners: [M] the same for the test split, or
    None where all clients share it; names: [K].
    """

    dataset: Dataset
    owners: Ints
    test_owners: Ints | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Recipe) -> Federation:
        """Load the data of a recipe and deal them out."""
        dataset = load_dataset(recipe.data, recipe.seed)
        how = recipe.data.partition
        train = dataset.train
        owners = partition(train, len(dataset.classes), how, recipe.seed)
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
        return cls(dataset, owners, _test_owners(federation, how, recipe.seed), names)

    @property
    def n_clients(self) -> int:
        """Number of clients K."""
        return len(self.names)

    @property
    def unused(self) -> int:
        """Training examples that no client holds."""
        return int(np.count_nonzero(self.owners == UNUSED))

    @cached_property
    def counts(self) -> Ints:
        """Training examples [K, C] of each class at each client."""
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
