"""Directions of a network's parameters as tensors, piece by piece; drawn once for all that reads them where there is
room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.solvers.directions import BLOCK, blocks, direction, signs

# Bytes of directions that are kept between two passes.
_ROOM = 64 << 20
# Signs that are made numbers at a time: few enough to stay in a core's cache until they are added.
_SIGNS = 1 << 17


class Drawn:
    """The directions of a seed for some parameters, by number and name.

    A direction is never whole in memory unless it is kept: what adds it to a parameter does so piece by piece.
    """

    def __init__(self, parameters: Mapping[str, Tensor], stage: Any) -> None:
        self._signs = stage.perturbation == "rademacher"
        size = sum(parameter.numel() for parameter in parameters.values()) * stage.num_directions
        self._has_room = (size // 8 if self._signs else 4 * size) <= _ROOM
        self._seed, self._kept = -1, dict[tuple[int, str], Tensor]()
        """The directions of the last seed, where there is room for all of them."""

    def pieces(
        self, seed: int, number: int, name: str, parameter: Tensor, factor: float
    ) -> Iterator[tuple[int, int, Tensor]]:
        """A direction times a factor: where each piece begins and ends among the parameter's numbers, and the piece,
        which may be changed and holds until the next."""
        size = parameter.numel()
        if self._signs:
            yield from self._signed(self._whole(seed, number, name, parameter), size, factor)
        elif self._has_room:
            whole = self._whole(seed, number, name, parameter)
            for start in range(0, size, BLOCK):
                stop = min(start + BLOCK, size)
                yield start, stop, whole[start:stop].mul(factor)
        else:
            for block, values in blocks(seed, number, name, size):
                start = block * BLOCK
                yield start, start + len(values), torch.from_numpy(values).to(parameter.device).mul_(factor)

    def rows(self, seed: int, number: int, name: str, parameter: Tensor, factor: float, rows: Tensor) -> Tensor | None:
        """Some rows [r, d] of a direction times a factor; None where they are not to be had without the others."""
        size = parameter.numel()
        width = size // len(parameter)
        if self._signs:
            if width % 8:
                return None
            packed = self._whole(seed, number, name, parameter).view(len(parameter), width // 8)[rows]
            return _table(factor, packed.device)[packed.int()].view(len(rows), width)
        if self._has_room:
            return self._whole(seed, number, name, parameter).view(len(parameter), width)[rows].mul(factor)
        places = rows.cpu().numpy()[:, None] * width + np.arange(width)
        wanted, found = np.unique(places // BLOCK), np.empty(places.shape, np.float32)
        for block, values in blocks(seed, number, name, size, wanted.tolist()):
            here = places // BLOCK == block
            found[here] = values[places[here] - block * BLOCK]
        return torch.from_numpy(found).to(parameter.device).mul_(factor)

    def _whole(self, seed: int, number: int, name: str, parameter: Tensor) -> Tensor:
        """A whole direction: normal numbers, or packed signs; kept where there is room."""
        if seed != self._seed:
            self._seed, self._kept = seed, {}
        found = self._kept.get((number, name))
        if found is None:
            drawn = (signs if self._signs else direction)(seed, number, name, parameter.numel())
            found = torch.from_numpy(drawn).to(parameter.device)
            if self._has_room:
                self._kept[number, name] = found
        return found

    def _signed(self, packed: Tensor, size: int, factor: float) -> Iterator[tuple[int, int, Tensor]]:
        """Packed signs as plus and minus the factor, eight of them at a time."""
        table = _table(factor, packed.device)
        room = torch.empty(min(_SIGNS // 8, len(packed)), 8, device=packed.device)
        for start in range(0, size, _SIGNS):
            stop = min(start + _SIGNS, size)
            bits = packed[start // 8 : -(-stop // 8)].int()
            torch.index_select(table, 0, bits, out=room[: len(bits)])
            yield start, stop, room.view(-1)[: stop - start]


def _table(factor: float, device: torch.device) -> Tensor:
    """[256, 8]: of every byte, plus and minus the factor for its bits, the lowest first."""
    byte, place = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return torch.where(byte >> place & 1 == 1, factor, -factor).float()
