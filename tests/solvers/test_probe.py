"""How a backbone computes, where it is left open: the fastest way of the first batch, and nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.runner import run
from headstart.solvers import probe
from tests.disk import contents
from tests.methods.test_bodies import HEAD, Normed, Run, backbone_of, bits

WAYS = [("float32", "channels-last"), ("float32", "contiguous"), ("bfloat16", "channels-last"),
        ("bfloat16", "contiguous")]  # fmt: skip


def timing(monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, str], float]) -> list[tuple[str, str]]:
    """Let each way take so long; returns the ways that are measured, as they come."""
    tried, real = list[tuple[str, str]](), probe._seconds

    def pretended(network: Any, *batch: Any) -> float:
        tried.append((network.precision, network.memory_format))
        assert real(network, *batch) > 0
        return seconds[tried[-1]]

    monkeypatch.setattr(probe, "_seconds", pretended)
    return tried


@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_way_is_chosen_once_and_gives_what_a_recipe_gives_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: tuple[str, str]
) -> None:
    tried = timing(monkeypatch, {way: 1.0 if way == fastest else 2.0 for way in WAYS})
    auto, named = Normed(), Normed()
    open_run = Run(tmp_path / "auto", backbone_of(auto), previous=HEAD, precision="auto", memory_format="auto").play()
    assert sorted(set(tried)) == sorted(WAYS)
    assert len(tried) == 3 * len(WAYS)  # on the first batch alone
    same = Run(
        tmp_path / "named", backbone_of(named), previous=HEAD, precision=fastest[0], memory_format=fastest[1]
    ).play()
    assert len(tried) == 3 * len(WAYS)
    for what in ("params", "statistics"):  # running statistics have not seen the batch that was measured more often
        left, right = getattr(open_run.state, what), getattr(same.state, what)
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[name], right[name]) for name in left)
    network = open_run.bench.method.network
    assert (network.precision, network.memory_format) == fastest


def test_bfloat16_has_to_be_a_tenth_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing(monkeypatch, {way: 1.0 if way[0] == "float32" else 0.95 for way in WAYS})
    found = Run(tmp_path, backbone_of(Normed()), previous=HEAD, precision="auto").play()
    assert found.bench.method.network.precision == "float32"


def test_the_default_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = timing(monkeypatch, {})
    Run(tmp_path, backbone_of(Normed()), previous=HEAD).play()
    assert not tried


def test_a_loss_that_is_no_number_is_never_the_fastest(tmp_path: Path) -> None:
    found = Run(tmp_path, backbone_of(Normed()), previous=HEAD)
    network, labels = found.bench.method.network, torch.zeros(2, dtype=torch.long)
    batch = (torch.full((2, 6, 6, 3), float("nan")),)
    assert probe._seconds(network, batch, labels) == float("inf")


def test_another_layout_keeps_every_weight(tmp_path: Path) -> None:
    network = Normed()
    backbone = backbone_of(network)
    before = bits(network)
    model = Run(tmp_path, backbone, previous=HEAD, memory_format="contiguous").bench.method.network.model
    assert bits(network) == before
    weights = [each for each in network.parameters() if each.ndim == 4]
    assert weights
    assert all(each.is_contiguous() for each in weights)
    model.arrange("channels-last")
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in weights)
    assert bits(network) == before


def test_workers_go_by_what_the_first_client_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would measure otherwise, and they could choose differently."""
    rng, found = np.random.default_rng(0), list[Any]()
    data = {"X": rng.integers(0, 255, (20, 16, 16, 3), np.uint8), "y": np.arange(20) % 2,
            "client": np.arange(20) // 2 % 4, "split": np.where(np.arange(20) < 16, 0, 2)}  # fmt: skip
    stage = {"method": "fedavg", "train": "all", "rounds": 2, "batch_size": 4, "lr": 0.05}
    timing(monkeypatch, {way: 1.0 if way == WAYS[3] else 2.0 for way in WAYS})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for workers, keys in (("2", ("auto", "auto")), ("1", WAYS[3])):
            monkeypatch.setenv("HEADSTART_WORKERS", workers)
            table = stage | {"precision": keys[0], "memory_format": keys[1]}
            run({"model": {"backbone": "conv4", "weights": "random"}, "stages": [table]}, tmp_path / workers, data=data)
            made = contents(tmp_path / workers)
            found.append({name: each for name, each in made.items() if name.startswith("model/")})
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]
