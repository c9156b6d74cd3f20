"""FedBABU: body aggregation and body update (Oh et al., "FedBABU: toward enhanced representation for federated image
classification", ICLR 2022, algorithm 1).

The head is random, the same on all clients, and stays as it is; clients train and the server averages what is below
it. Travels, both ways: the body. A `personalise` stage then fine-tunes on each client. With μ > 0 each client is pulled
towards the global body: FedProx+BABU.
"""

from __future__ import annotations

from headstart.methods.fedprox import FedProxMethod


class FedBABUMethod(FedProxMethod):
    """FedAvg, or FedProx, under a plan that freezes the head."""
