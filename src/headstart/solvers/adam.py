"""AdamW on clients (Loshchilov and Hutter, ICLR 2019): moments start anew in every round and stay with nobody."""

from __future__ import annotations

from torch import Tensor

_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class Moments:
    """Running means of a parameter's gradients and of their squares."""

    def __init__(self, like: Tensor) -> None:
        self.first, self.second, self.steps = like.new_zeros(like.shape), like.new_zeros(like.shape), 0

    def direction(self, gradient: Tensor) -> Tensor:
        """The step along one more gradient, before the learning rate; weight decay is the caller's."""
        (one, two), self.steps = _BETAS, self.steps + 1
        self.first.mul_(one).add_(gradient, alpha=1 - one)
        self.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        scale = (self.second / (1 - two**self.steps)).sqrt_().add_(_EPSILON)
        return self.first / (1 - one**self.steps) / scale
