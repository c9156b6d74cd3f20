"""What the papers charge a method for, by their own formulas: bytes, forward passes, parameters.

Where `headstart.runner.costs` has a paper's formula, that is the one which is called. K clients, R rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from headstart.config.stage import STAGES
from headstart.core.ledger import CostFacts
from headstart.runner import costs


def _facts(name: str, C: int, d: int, clients: int, rounds: int = 1) -> CostFacts:
    """Of a method with its defaults, whose clients have an example of each class."""
    keys = {"method": name} | ({"train": "head"} if name == "fedmezo" else {})
    stage = STAGES[name].model_validate(keys)
    return CostFacts(stage, C, d, clients, rounds, np.ones((clients, C), np.int64))


def fedncm(C: int, d: int, clients: int = 100) -> int:
    """Bytes of FedNCM (FedNCM, appendix A): one round of linear probing, 2 · C · d · K · 4."""
    return costs.fedncm(_facts("fedncm", C, d, clients)).bytes


def training(C: int, d: int, rounds: int, body: int = 0, clients: int = 100) -> int:
    """Bytes of training the head, and a body of so many parameters (FedNCM, appendix A; FedCOF, appendix H).

    2 · (C · d + body) · K · R · 4. The bodies that the papers count are not always those of a network, so that no
    method can be asked.
    """
    return 2 * (C * d + body) * clients * rounds * 4


def passes(rounds: int, examples: int, per_example: int = 1) -> int:
    """Forward passes (FedNCM, Eq. 6): R · N for a head, three times that for the whole model."""
    return per_example * rounds * examples


def means(means: int, d: int) -> int:
    """Bytes of so many class means, as FedNCM and FedCOF send them (FedCOF, appendix H): P · d · 4."""
    return means * d * 4


def fed3r(means: int, d: int, clients: int) -> int:
    """Bytes of Fed3R (FedCOF, appendix H): (P · d + K · d²) · 4."""
    held = np.zeros((clients, -(-means // clients)), np.int64)
    held.ravel()[:means] = 1
    return costs.fed3r(replace(_facts("fed3r", held.shape[1], d, clients), counts=held)).bytes


def oracle(means: int, d: int) -> int:
    """Bytes of a mean and a covariance for each class of a client (FedCOF, appendix H): P · (d + d²) · 4."""
    return means * (d + d * d) * 4


def prompt_tuning(C: int, d: int, rounds: int, pools: int, clients: int) -> int:
    """Bytes of head and prompts (FedCOF, appendix H): 2 · (C · R + prompts of all rounds) · d · K · 4."""
    return 2 * (C * rounds + pools) * d * clients * 4


def fedmezo(rounds: int, clients: int = 10) -> int:
    """Bytes of FedMeZO (thesis, Eq. 6): R · (K + 2 · K), one byte for a seed and for a scalar, one direction."""
    return costs.fedmezo(_facts("fedmezo", 2, 1, clients, rounds)).bytes


def slora(primed: int, rounds: int, body: int, density: float, lora: int, clients: int = 10) -> int:
    """Bytes of SLoRA (thesis, Eq. 7): (R₁ · density · body + R₂ · LoRA) · K · 4, up."""
    return round((primed * density * body + rounds * lora) * clients * 4)


def module(kind: str, d: int, blocks: int, C: int) -> int:
    """Parameters of a module and a head (FedYolo, table 3): eight units, ranks or prompts in every block."""
    per_block = {"adapter": 2 * 8 * d + 8 + d, "lora": 2 * 2 * 8 * d, "vpt": 8 * d}[kind]
    return full(blocks * per_block, d, C)


def full(body: int, d: int, C: int) -> int:
    """Parameters of a body and a head with bias."""
    return body + C * d + C


FORMULAS: Mapping[str, Callable[..., int]] = {
    formula.__name__: formula
    for formula in (fedncm, training, passes, means, fed3r, oracle, prompt_tuning, fedmezo, slora, module, full)
}
