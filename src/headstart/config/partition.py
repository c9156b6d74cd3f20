"""Partitions: who holds which example of a data set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from headstart.config.keys import Table


class PartitionKeys(Table):
    """What all partitions have in common."""

    test: Literal["shared", "follow"] = "shared"
    """Whether clients share one test split, or each gets a part of it that follows its training classes."""


class IID(PartitionKeys):
    """Examples dealt at random, sizes equal to within one."""

    kind: Literal["iid"]
    """How examples are dealt out to clients."""
    clients: PositiveInt = 100
    """How many clients hold the examples."""


class Dirichlet(PartitionKeys):
    """Equal sizes, class shares per client from Dirichlet(alpha), clients filled in turn (FedNCM, FedCOF)."""

    kind: Literal["dirichlet"] = "dirichlet"
    """How examples are dealt out to clients."""
    clients: PositiveInt = 100
    """How many clients hold the examples."""
    alpha: PositiveFloat = 0.1
    """How alike clients are: near 0, a client has examples of few classes; above 100, all have the same shares."""
    leftovers: Literal["report", "assign"] = "report"
    """What becomes of the examples that do not fill a client evenly: reported as unused (papers), or dealt out."""


class DirichletByClass(PartitionKeys):
    """Each class cut among the clients by Dirichlet(alpha) shares (Yurochkin et al.); sizes vary."""

    kind: Literal["dirichlet-by-class"]
    """How examples are dealt out to clients."""
    clients: PositiveInt = 100
    """How many clients hold the examples."""
    alpha: PositiveFloat = 0.1
    """How alike clients are: near 0, a client has examples of few classes; above 100, all have the same shares."""
    min_examples: PositiveInt = 1
    """Shares are drawn again until every client has so many."""


class Shards(PartitionKeys):
    """So many single-class shards per client (FedBABU, LG-FedAvg, FedRep)."""

    kind: Literal["shards"]
    """How examples are dealt out to clients."""
    clients: PositiveInt = 100
    """How many clients hold the examples."""
    shards_per_client: PositiveInt = 2
    """Shards of one class each that a client holds."""


class Classes(PartitionKeys):
    """So many distinct classes per client, the same number of examples of each (FedYolo)."""

    kind: Literal["classes"]
    """How examples are dealt out to clients."""
    clients: PositiveInt = 20
    """How many clients hold the examples."""
    classes_per_client: PositiveInt = 2
    """Distinct classes that a client holds."""
    examples_per_client: PositiveInt | None = None
    """Rounded down to a multiple of the classes; unset: as many as every client can have."""


class Natural(PartitionKeys):
    """The clients that the data name."""

    kind: Literal["natural"]
    """How examples are dealt out to clients."""
    clients: PositiveInt | None = None
    """Keep so many of them, drawn at random; unset keeps all."""
    min_examples: PositiveInt = 1
    """Clients with fewer training examples are left out."""
    max_examples: PositiveInt | None = None
    """Of a client with more training examples, so many are kept at random; unset keeps all."""


class Domains(PartitionKeys):
    """Each domain of the data is held by its own clients."""

    kind: Literal["domains"]
    """How examples are dealt out to clients."""
    clients_per_domain: PositiveInt = 1
    """Among how many clients each domain is split at random."""


Partition = Annotated[
    IID | Dirichlet | DirichletByClass | Shards | Classes | Natural | Domains, Field(discriminator="kind")
]

PARTITIONS: dict[str, type[PartitionKeys]] = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "dirichlet-by-class": DirichletByClass,
    "shards": Shards,
    "classes": Classes,
    "natural": Natural,
    "domains": Domains,
}
WITHOUT_CLASSES = ("iid", "natural", "domains")
"""Partitions that do not ask for the class of an example."""


def by_classes(kind: str) -> str:
    """What is wrong with a partition of targets that are no classes."""
    return f"kind: {kind!r} deals examples out by their classes, and these have none; use {', '.join(WITHOUT_CLASSES)}"
