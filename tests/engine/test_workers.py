"""Several clients at once give what they give one after the other; what goes wrong in a process is told."""

import gc
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.engine.workers import WORKERS, Workers, worker_count
from headstart.errors import HeadstartError
from headstart.runner import run
from tests.disk import contents


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """As many as a worker of two has on two cores: bits of a backbone depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Jobs:
    """What is done with a number."""

    def __init__(self) -> None:
        self.prepared = 0

    def prepare_worker(self) -> None:
        self.prepared += 1

    def work(self, job: Any) -> Any:
        if job == "sentence":
            raise HeadstartError("image 7 cannot be read")
        if job == "bug":
            raise KeyError("no such thing")
        if job == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "collect":
            gc.collect()
        return os.getpid(), self.prepared, job


def test_results_are_in_the_order_of_the_jobs_and_processes_live_on() -> None:
    owner = Jobs()
    workers = Workers(owner, 3)
    first, second = list(workers.map(range(40))), list(workers.map(range(2)))
    assert [job for _, _, job in first] == list(range(40))
    assert {prepared for _, prepared, _ in first} == {1}
    assert os.getpid() not in (pids := {pid for pid, _, _ in first})
    assert {pid for pid, _, _ in second} <= pids
    assert len(pids) <= 3
    assert not owner.prepared


@pytest.mark.parametrize(
    ("job", "kind", "sentence"),
    [
        ("sentence", HeadstartError, "^image 7 cannot be read$"),
        ("bug", RuntimeError, "in a worker process:(.|\n)*KeyError: 'no such thing'"),
        ("killed", HeadstartError, f"a worker process was ended by SIGKILL; .* set {WORKERS} to fewer"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_told_and_the_next_jobs_are_done(
    job: str, kind: type[Exception], sentence: str
) -> None:
    owner = Jobs()
    workers = Workers(owner, 2)
    with pytest.raises(kind, match=sentence):
        list(workers.map([0, job, 2, 3]))
    assert not multiprocessing.active_children()
    assert [each for _, _, each in workers.map([4, 5])] == [4, 5]


def test_jobs_that_nobody_waits_for_any_more_are_given_up_and_processes_end_with_their_owner() -> None:
    owner = Jobs()
    workers = Workers(owner, 2)
    results = workers.map(range(9))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert [each for _, _, each in workers.map([7])] == [7]  # not one of those before
    assert multiprocessing.active_children()
    del workers, results
    gc.collect()
    assert not multiprocessing.active_children()


def test_a_worker_does_not_end_the_workers_of_others_that_nobody_holds_any_more() -> None:
    owner = Jobs()
    lost, others = Workers(owner, 1), Workers(owner, 1)
    assert len(list(lost.map([0]))) == 1
    held: list[Any] = [lost]
    held.append(held)  # found by whoever collects first: the worker, in its copy of the memory
    gc.disable()
    try:
        del lost, held
        assert [each for _, _, each in others.map(["collect", "collect"])] == ["collect", "collect"]
        assert len(multiprocessing.active_children()) == 2
    finally:
        gc.enable()
    gc.collect()
    assert len(multiprocessing.active_children()) == 1


@pytest.mark.parametrize("given", ["0", "two", "-1", ""])
def test_a_number_of_workers_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(WORKERS, given)
    with pytest.raises(HeadstartError, match=f"{WORKERS} must be a whole number, 1 or more"):
        worker_count()


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedrep"])
def test_two_workers_leave_the_same_bits_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Shared weights with their batch norm, states that clients keep, personal heads; in two rounds."""
    rng, count = np.random.default_rng(0), 40
    data = {
        "X": rng.integers(0, 255, (count, 16, 16, 3), np.uint8), "y": np.arange(count) % 2,
        "client": np.arange(count) // 2 % 4, "split": np.where(np.arange(count) < 32, 0, 2),
    }  # fmt: skip
    stage = {
        "method": method,
        "train": "all",
        "rounds": 2,
        "participation": 0.75,
        "batch_size": 4,
        "lr": 0.05,
        "evaluate_every": 2,
    }
    recipe = {"model": {"backbone": "conv4", "weights": "random"}, "stages": [stage]}
    found, forked = [], list[int]()
    for workers in ("1", "2"):
        monkeypatch.setenv(WORKERS, workers)
        out = tmp_path / workers
        run(recipe, out, data=data, on_metrics=lambda _: forked.append(len(multiprocessing.active_children())))
        found.append({name: each for name, each in contents(out).items() if name.startswith(("model/", "clients"))})
    assert found[0] == found[1]
    assert forked == [0, 2]
