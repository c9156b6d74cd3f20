"""Simulated time: how long replies take, who is there, who is first, and asynchronous clients."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from headstart.config.recipe import Clients, Recipe
from headstart.core.ledger import Ledger
from headstart.data import Federation
from headstart.engine.client_states import ClientStates
from headstart.engine.clock import DAY, Clock
from headstart.engine.local import LocalClients
from headstart.engine.round import Costs, play_rounds
from headstart.engine.server import Server
from headstart.errors import HeadstartError, RecipeError
from headstart.heads import LinearHead
from headstart.records import Record
from headstart.records.record import curves, grouped
from headstart.report.page import write_figures
from headstart.report.tables import remarks
from headstart.runner import run
from headstart.runner.dry_run import dry_run
from tests.helpers import Bench, cohort_of, context_of
from tests.runner.test_dry_run import images, tiny

HEAD = {"method": "fedavg", "train": "head", "rounds": 3, "lr": 0.01, "batch_size": 20}
HOUR = 3600.0


def recipe_of(stage: dict[str, Any], clients: dict[str, Any] | None = None, count: int = 6) -> Recipe:
    data = {"dataset": "digits", "partition": {"kind": "iid", "clients": count}}
    table = {"data": data, "model": {"backbone": "features"}, "stages": [stage]}
    return Recipe.parse(table | ({} if clients is None else {"clients": clients}))


def traced(folder: Path, text: str) -> dict[str, Any]:
    (folder / "machines.csv").write_text(text)
    return {"trace": str(folder / "machines.csv")}


# ------------------------------------------------------------------------------------------------------------ machines


def test_a_reply_takes_its_bytes_and_its_passes() -> None:
    """1 MB down at 8 Mbit/s is 1 s, ten passes of 10⁹ at 10⁹ a second 10 s, 1 MB up at 4 Mbit/s 2 s; or half that."""
    rates = Clients(uplink=4e6, downlink=8e6, flops=1e9)
    none = np.zeros(0)
    clock = Clock(rates, np.array([1.0, 2.0]), np.zeros(0, np.int64), none, none, operations=1e9)
    million = np.full(2, 10**6)
    assert clock.seconds(np.array([0, 1]), million, million, np.full(2, 10)).tolist() == [13.0, 6.5]


def test_a_trace_says_who_is_fast_and_who_is_there(tmp_path: Path) -> None:
    rows = "client,speed,from,until\na,0.5,22,2\na,,12,13\n1,3,,\nc,,9,17\n"
    clock = Clock.of(Clients(**traced(tmp_path, rows), availability=0.5), ["a", "b", "c", "d"], 0)
    assert clock.speed.tolist() == [0.5, 3.0, 1.0, 1.0]
    hours = {"a": [0, 1, 12, 22, 23], "c": [*range(9, 17)]}
    for hour in (*range(24), *range(24, 48)):
        clock.now = hour * HOUR + 60
        there = clock.available()
        assert (there[0], there[2]) == (hour % 24 in hours["a"], hour % 24 in hours["c"])
    clock.now = 3 * HOUR
    assert clock.waits(np.array([0, 2])).tolist() == [9 * HOUR, 6 * HOUR]
    only = np.array([True, False, False, False])
    clock.wait(only)
    assert clock.now == pytest.approx(12 * HOUR, abs=0.01)


def test_clients_are_there_for_their_share_of_the_day() -> None:
    names = [str(number) for number in range(400)]
    clock = Clock.of(Clients(availability=0.25, speed_spread=0.7), names, 3)
    there = []
    for minute in range(0, 1440, 5):
        clock.now = 5 * DAY + 60.0 * minute
        there.append(clock.available())
    assert np.mean(there, axis=0) == pytest.approx(0.25, abs=0.01)
    assert np.mean(there, axis=1) == pytest.approx(0.25, abs=0.1)  # at any hour, others
    assert np.log(clock.speed).std() == pytest.approx(0.7, rel=0.1)
    assert not np.array_equal(Clock.of(clock.rates, names, 4).speed, clock.speed)
    np.testing.assert_array_equal(Clock.of(clock.rates, names, 3).speed, clock.speed)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("client,speed\nz,1\na,fast\na,0\n", "line 2: there is no client 'z'; line 3: speed must be a number"),
        ("client,from,until\na,9,25\n", r"line 2: until must be an hour from 0 to 24 \(got 25\)"),
        ("client,from\na,9\n", "has the columns client, from; give client, and speed"),
        ("name,speed\na,9\n", "has the columns name, speed"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(HeadstartError, match=sentence):
        Clock.of(Clients(**traced(tmp_path, text)), ["a", "b"], 0)
    with pytest.raises(HeadstartError, match="cannot read"):
        Clock.of(Clients(trace=str(tmp_path / "nothing.csv")), ["a"], 0)


# ---------------------------------------------------------------------------------------------------------------- runs


def rounds_of(path: Path) -> dict[int, list[dict[str, str]]]:
    found: dict[int, list[dict[str, str]]] = {}
    for row in csv.DictReader((path / "rounds.csv").open()):
        found.setdefault(int(row["round"]), []).append(row)
    return found


def weight(path: Path) -> np.ndarray:
    return LinearHead.load(path / "model" / "head.safetensors").weight


def test_a_clock_changes_no_model_and_adds_up_the_slowest_of_each_round(tmp_path: Path) -> None:
    slow = traced(tmp_path, "client,speed\nclient-1,0.25\n") | {"uplink": 1e5, "downlink": 1e6}
    plain, timed = recipe_of(HEAD), recipe_of(HEAD, slow)
    assert "simulated_seconds" not in run(plain, tmp_path / "plain").summary
    summary = run(timed, tmp_path / "timed").summary
    np.testing.assert_array_equal(weight(tmp_path / "timed"), weight(tmp_path / "plain"))
    expected = 0.0
    for rows in rounds_of(tmp_path / "timed").values():
        took = {row["client"]: int(row["bytes_down"]) * 8 / 1e6 + int(row["bytes_up"]) * 8 / 1e5 for row in rows}
        assert len(took) == 6
        expected += max(seconds * (4 if name == "client-1" else 1) for name, seconds in took.items())
    assert summary["simulated_seconds"] == pytest.approx(expected, abs=2e-3)
    record = Record.read(tmp_path / "timed")
    (curve,) = curves(grouped([record]))
    assert curve.costs["simulated_seconds"][-1] == pytest.approx(expected, abs=2e-3)
    assert (np.diff(curve.costs["simulated_seconds"]) > 0).all()
    assert f"fedavg: simulated time: {expected:,.0f} s ({expected / 3600:,.2f} h)" in remarks(summary["stages"][0])
    names = write_figures(tmp_path / "figures", [record])
    assert "accuracy-by-simulated-seconds.svg" in names
    assert not any("simulated" in name for name in write_figures(tmp_path / "more", [Record.read(tmp_path / "plain")]))


def test_of_those_asked_the_first_count(tmp_path: Path) -> None:
    """Half as many more are asked; of clients 0 to 5, each slower than the one before, the last of a round are late."""
    trace = "client,speed\n" + "".join(f"{client},{1 / (1 + client)}\n" for client in range(6))
    stage = HEAD | {"clients_per_round": 2, "over_selection": 0.5, "rounds": 6}
    recipe = recipe_of(stage, traced(tmp_path, trace))
    run(recipe, tmp_path / "run")
    for rows in rounds_of(tmp_path / "run").values():
        assert len(rows) == 3
        *first, last = sorted(rows, key=lambda row: row["client"])
        assert [row["left_out"] for row in first] == ["", ""]
        assert last["left_out"] == "late: 2 others were faster"
    (_, bill), *_ = dry_run(recipe, Federation.of(recipe))[1]
    assert (
        bill.ledger.bytes_up.sum() == Record.read(tmp_path / "run").metrics[-1]["bytes_up"]
    )  # the late have sent, too


def test_who_leaves_and_who_is_late_do_not_count(tmp_path: Path) -> None:
    """Client 0 is there for the first second of the day; client 1 takes more than the deadline, and is waited for."""
    trace = f"client,speed,from,until\n0,,0,{1 / 3600}\n1,0.01,,\n"
    clients = traced(tmp_path, trace) | {"uplink": 1e4}
    summary = run(recipe_of(HEAD | {"rounds": 1, "deadline": 60.0}, clients), tmp_path / "run").summary
    (rows,) = rounds_of(tmp_path / "run").values()
    why = {row["client"]: row["left_out"] for row in rows}
    assert why["client-0"] == "it could not be reached any more after 1 s"
    assert why["client-1"].startswith("late: ")
    assert why["client-1"].endswith("and the deadline is 60 s")
    assert {why[f"client-{number}"] for number in range(2, 6)} == {""}
    assert summary["simulated_seconds"] == 60.0


def test_closed_forms_wait_for_everybody(tmp_path: Path) -> None:
    clients = traced(tmp_path, "client,from,until\n2,5,6\n")
    summary = run(recipe_of({"method": "fedncm"}, clients), tmp_path / "run").summary
    assert 5 * HOUR < summary["simulated_seconds"] < 5 * HOUR + 10
    assert {row["left_out"] for row in rounds_of(tmp_path / "run")[1]} == {""}


# ------------------------------------------------------------------------------------------------- asynchronous clients


@pytest.mark.parametrize("method", [HEAD, HEAD | {"method": "fedadam", "compress": "top-k", "top_k": 0.1}])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_a_buffer_for_everybody_is_fedavg(tmp_path: Path, method: dict[str, Any], spread: float) -> None:
    clients = {"speed_spread": spread, "uplink": 1e5}
    plain = run(recipe_of(method, clients), tmp_path / "plain").summary
    buffered = run(recipe_of(method | {"buffer": 6}, clients), tmp_path / "buffered").summary
    np.testing.assert_array_equal(weight(tmp_path / "buffered"), weight(tmp_path / "plain"))
    for name in ("bytes_up", "bytes_down"):
        assert buffered[name] == plain[name]
    assert buffered["simulated_seconds"] == pytest.approx(plain["simulated_seconds"], abs=2e-3)


@pytest.mark.parametrize("keys", [{"buffer": 3}, {"over_selection": 0.01}], ids=["buffer", "over-selection"])
def test_updates_that_are_held_are_not_the_next_clients(tmp_path: Path, keys: dict[str, Any]) -> None:
    """A backbone trains for one client after the other in the same memory, its statistics and personal heads too."""
    stage = {"method": "fedper", "train": "all", "rounds": 2, "lr": 0.05, "batch_size": 8, "augment": "none"}
    table = images(tiny(tmp_path / "resnet", "resnet"), stage).model_dump(mode="json", exclude_none=True)
    for name, more in (("plain", {}), ("held", keys)):
        timed = {**table, "tasks": [], "clients": {"speed_spread": 1.0}, "stages": [stage | more]}
        summary = run(Recipe.parse(timed), tmp_path / name).summary
        assert not summary["stages"][0]["dropped"]
        assert summary["simulated_seconds"] > 0
    plain, held = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "held"))
    assert any(name.endswith("running_var") for name in plain)
    mine = [(tmp_path / name / "checkpoint/clients-0/personal.bin").read_bytes() for name in ("plain", "held")]
    assert mine[0] == mine[1]
    assert any(mine[0])
    for name, array in plain.items():
        np.testing.assert_array_equal(held[name], array, err_msg=name)


def test_updates_count_by_their_age(tmp_path: Path) -> None:
    """Of three clients, whose replies take 1, 2 and 4 of some time, each reply is a step. By hand: client 0 replies at
    1; at 2 it replies again, and client 1 with an update of the first model: two steps old, it counts for 3^-½ of
    itself. At 4, client 2's has seen 4 steps of client 0 and 2 of client 1: 7^-½."""
    trace = "client,speed\n0,1\n1,0.5\n2,0.25\n"
    exact = {"uplink": 2.0**20, "downlink": 2.0**22}  # sums of such times have no rounding
    recipe = recipe_of(HEAD | {"rounds": 7, "buffer": 1}, traced(tmp_path, trace) | exact, 3)
    (stage,), federation = recipe.stages, Federation.of(recipe)
    bench = Bench(stage, context_of(stage, 10, 64, (0, 0), 3, int(federation.sizes.sum())))
    assert {len(str(size)) for size in federation.sizes.tolist()} == {3}  # and messages are equally long
    features, ledger = federation.dataset.train.features(), Ledger.open(3, 0.0)
    states = ClientStates(tmp_path / "states", 3, {})
    assert recipe.clients is not None
    clock = Clock.of(recipe.clients, federation.names, 0)
    server = Server(stage, bench.method, bench.channel, federation, bench.init())
    clients = LocalClients(bench.runtime, federation, features, states, clock)
    models, who = [server.state.params], []

    def note(round: int, state: Any) -> None:
        models.append(state.params)
        who.append([client for client, _, _ in ledger.latest])

    play_rounds(server, clients, Costs(ledger, np.zeros(3, np.int64), True, clock), (0, 0), note)
    assert who == [[0], [0], [1]] * 2 + [[2]]
    assert ledger.bytes_up.tolist() == [4 * ledger.bytes_up[2], 2 * ledger.bytes_up[2], ledger.bytes_up[2]]
    assert ledger.simulated_seconds == 4 * (8 * ledger.bytes_down[2] / 2**22 + 8 * ledger.bytes_up[2] / 2**20)
    for client, step, age in ((1, 2, 2), (2, 6, 6)):
        rows, _ = federation.rows_of(np.array([client]))
        cohort = cohort_of(bench, client, features, rows, federation.dataset.train.labels[rows])
        (reply,) = bench.answer(cohort, bench.broadcast(bench.init()))
        for name, after in models[step + 1].items():
            moved = after - models[step][name]
            expected = reply.message.arrays[f"update.{name}"] / np.sqrt(1.0 + age)
            np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-9)


def test_asynchronous_clients_learn_in_less_simulated_time(tmp_path: Path) -> None:
    clients = {"speed_spread": 1.5, "uplink": 1e5}
    stage = HEAD | {"clients_per_round": 6}
    waits = run(recipe_of(stage | {"rounds": 10}, clients, 12), tmp_path / "waits").summary
    steps = run(
        recipe_of(stage | {"rounds": 30, "buffer": 2}, clients, 12), tmp_path / "steps"
    ).summary  # as many updates
    assert steps["simulated_seconds"] < waits["simulated_seconds"] / 2
    assert steps["accuracy"] > waits["accuracy"] - 0.05
    again = run(recipe_of(stage | {"rounds": 30, "buffer": 2}, clients, 12), tmp_path / "again").summary
    assert again["simulated_seconds"] == steps["simulated_seconds"]
    np.testing.assert_array_equal(weight(tmp_path / "again"), weight(tmp_path / "steps"))


# ------------------------------------------------------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "secure": ({"secure": True, "buffer": 2}, "buffer: secure aggregation needs clients that are known before"),
    "privacy": (
        {"privacy": {"epsilon": 5.0}, "weighting": "uniform", "over_selection": 0.5},
        "over_selection: privacy is accounted for where chance alone draws clients",
    ),
    "both": ({"buffer": 2, "over_selection": 0.5}, "over_selection: asynchronous clients are replaced"),
    "scaffold": ({"method": "scaffold", "buffer": 2}, "buffer: scaffold sends 'control', too"),
    "fednova": ({"method": "fednova", "buffer": 2}, "buffer: fednova sends 'steps', too"),
    "feddyn": ({"method": "feddyn", "buffer": 2}, "buffer: feddyn adds up the updates of all rounds"),
    "local-only": ({"method": "local-only", "buffer": 2}, "buffer: with local-only nothing travels"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_asynchronous_is_said(what: str) -> None:
    keys, sentence = REFUSED[what]
    with pytest.raises(RecipeError) as refused:
        recipe_of(HEAD | keys, {})
    (problem,) = refused.value.problems
    assert problem.startswith(f"stages.0.{sentence}")


def test_without_speeds_nobody_is_first() -> None:
    for key in ("buffer", "over_selection"):
        with pytest.raises(RecipeError, match=rf"stages\.0\.{key}: who is first depends on how fast clients are"):
            recipe_of(HEAD | {key: 1})
    with pytest.raises(HeadstartError, match=r"stages\.0\.buffer: 7 updates of different clients, and there are 6"):
        run(recipe_of(HEAD | {"buffer": 7}, {}))
