"""What a stage trains of a body: what its features depend on; a gradient that is missing is an error."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headstart.config.recipe import Recipe
from headstart.errors import HeadstartError
from tests.helpers import Bench, context_of
from tests.methods.test_bodies import HEAD, SEED, C, D, N, Plain, Run, backbone_of, bits, pixels_backbone


class Skipping(Plain):
    """Leaves its first layer out while it trains, as layer dropping does."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 4, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        maps = self.other(pixels) if self.training else self.other(pixels) + self.one(pixels)
        return self.two(maps.tanh()).mean(dim=(2, 3))


def test_a_missing_gradient_is_an_error(tmp_path: Path) -> None:
    network = Skipping()
    run = Run(tmp_path, backbone_of(network), previous=HEAD)
    before = bits(network)
    with pytest.raises(HeadstartError, match=r"does not depend on 2 parameters \(body.one.weight, body.one.bias\)"):
        run.answer(0)
    assert bits(network) == before


def test_a_body_whose_features_have_no_gradient_is_refused(tmp_path: Path) -> None:
    class Frozen(Plain):
        def forward(self, pixels: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(pixels)

    with pytest.raises(HeadstartError, match="no parameter of tiny has a gradient; set train to 'head'"):
        Run(tmp_path, backbone_of(Frozen()), previous=HEAD)
    run = Run(tmp_path, backbone_of(Frozen()), previous=HEAD, train="head").play()
    assert run.state.params["head.weight"].shape == (3, D)


@pytest.mark.parametrize("method", ["fedavg", "fedmezo", "distmezo"])
def test_a_body_without_parameters_has_nothing_to_check(method: str) -> None:
    table = {"method": method, "train": "all", "rounds": 1, "lr": 0.1}
    stage = Recipe.parse({"data": {"dataset": "x"}, "stages": [table]}).stages[0]
    backbone = pixels_backbone()
    bench = Bench(stage, context_of(stage, C, backbone.dim, SEED, 1, N, backbone=backbone))
    assert bench.method.network.trained.keys() == {"head.weight", "head.bias"}
