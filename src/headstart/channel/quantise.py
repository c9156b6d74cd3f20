"""`compress = "int8"`: updates in a quarter of the bytes, right on average.

Every array is divided by its largest entry over 127 and rounded at random to one of the two whole numbers beside it,
the nearer one more often, so that the expected value is the array itself (Alistarh et al., "QSGD", NeurIPS 2017, with
127 levels and the largest entry as the norm). Travels: the whole numbers as int8, and the divisors as float32.
"""

from __future__ import annotations

import numpy as np

from headstart.channel.links import Link
from headstart.core.message import Message
from headstart.core.reply import Sender
from headstart.errors import MessageError

_LEVELS = 127
_ROUNDING = 0x148


class Quantise(Link):
    """Whole numbers of eight bits on the way, float32 before and after; what belongs to no parameter stays as it is."""

    lossy = True

    def __init__(self, seed: tuple[int, ...]) -> None:
        """seed: the run's, and the stage's number; rounding hides nothing, and is the same wherever a client is."""
        self.seed = seed

    def encode(self, message: Message, sender: Sender) -> Message:
        """Every array rounded at random, by the seed, the round and the client."""
        rng = np.random.default_rng([*self.seed, _ROUNDING, sender.round, sender.client])
        arrays = dict(message.arrays)
        names = _parameters(message)
        scales = np.zeros(len(names), np.float32)
        for number, name in enumerate(names):
            largest = np.abs(arrays[name]).max(initial=0.0)
            scales[number] = np.float32(largest / _LEVELS) if np.isfinite(largest) else np.nan
            steps = arrays[name] / scales[number] if scales[number] > 0 else np.zeros_like(arrays[name])
            low = np.floor(steps)
            up = rng.random(low.shape) < np.asarray(steps - low, np.float32)
            arrays[name] = np.clip(low + up, -_LEVELS, _LEVELS).astype(np.int8)
        return Message({**arrays, "scales": scales}, message.scalars)

    def decode(self, message: Message, sender: Sender) -> Message:
        """Float32 again."""
        names = _parameters(message)
        scales = message.array("scales", "float32", (len(names),))
        if scales.min(initial=0.0) < 0:
            raise MessageError("array 'scales' holds a negative number")
        arrays = {name: array for name, array in message.arrays.items() if name != "scales"}
        with np.errstate(over="ignore"):  # what is not finite is refused by the next link
            for name, scale in zip(names, scales, strict=True):
                arrays[name] = np.asarray(message.array(name, "int8", arrays[name].shape) * scale)
        return Message(arrays, message.scalars)


def _parameters(message: Message) -> list[str]:
    """Names of the arrays that belong to a parameter, in an order that does not depend on how they travel."""
    return sorted(name for name in message.arrays if "." in name)
