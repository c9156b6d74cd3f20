"""A plan for more clients than there are: by hand, against real runs with as many, and what runs out first."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config.recipe import Recipe
from headstart.engine.clock import DAY
from headstart.runner import run
from headstart.runner.forecast import Fleet, Plan, make_plan
from tests.command import Command

TRAINED = {"method": "fedavg", "train": "head", "rounds": 6, "lr": 0.01, "participation": 0.5, "evaluate_every": 6}


def digits(clients: int, *stages: dict[str, Any]) -> Recipe:
    partition = {"kind": "iid", "clients": clients}
    model = {"backbone": "features"}
    return Recipe.parse({"data": {"dataset": "digits", "partition": partition}, "model": model, "stages": list(stages)})


@pytest.mark.parametrize("stage", [{"method": "fedncm"}, {"method": "fed3r"}, {"method": "fedcof"}, TRAINED])
def test_a_plan_for_three_times_the_clients_is_within_a_tenth_of_a_run_with_them(stage: dict[str, Any]) -> None:
    (planned,) = make_plan(digits(8, stage), Fleet(clients=24)).stages
    measured = run(digits(24, stage)).summary
    assert planned.bytes_up == pytest.approx(measured["bytes_up"], rel=0.1)
    assert planned.bytes_down == pytest.approx(measured["bytes_down"], rel=0.1)
    # A client has a third of the examples in the run, and as many as before in the plan.
    assert planned.forward_passes / 3 == pytest.approx(measured["forward_passes"], rel=0.1)


def test_a_round_takes_what_links_and_arithmetic_take_by_hand() -> None:
    fleet = Fleet(clients=10**6, uplink=1e6, downlink=8e6, availability=0.1, server_link=1e10)
    stage = {name: value for name, value in TRAINED.items() if name != "participation"}
    recipe = digits(8, stage | {"clients_per_round": 1000})
    (planned,) = make_plan(recipe, fleet).stages
    # [10, 64] and [10] in float32, and a header; both ways, for each of 6 rounds of 1000 clients.
    values = 4 * (10 * 64 + 10)
    assert planned.per_round == 1000
    each = planned.bytes_up / 6000
    assert values + 100 < each < values + 300
    down = planned.bytes_down / 6000
    assert planned.round_seconds == pytest.approx(
        max(8 * each / 1e6 + 8 * down / 8e6, 1000 * 8 * each / 1e10), rel=1e-6
    )
    assert planned.rounds_per_day == pytest.approx(DAY / planned.round_seconds)
    assert planned.slowest == "the clients' uplinks"


def test_a_round_that_asks_everybody_waits_until_everybody_was_there() -> None:
    (planned,) = make_plan(digits(8, {"method": "fedncm"}), Fleet(clients=1000, availability=0.25)).stages
    assert planned.round_seconds == pytest.approx(0.75 * DAY, rel=1e-3)
    assert planned.slowest == "waiting for clients to be available"


@pytest.mark.parametrize("keys", [{}, {"buffer": 2, "rounds": 40}], ids=["waiting", "buffer"])
def test_simulated_time_is_the_plans(keys: dict[str, Any]) -> None:
    """Of eight clients that are equally fast, a buffer of two is full four times in the time of a reply."""
    stage = {name: value for name, value in TRAINED.items() if name != "participation"} | {"clients_per_round": 8}
    table = digits(16, stage).model_dump(mode="json", exclude_none=True) | {"tasks": [], "stages": [stage | keys]}
    timed = Recipe.parse(table | {"clients": {"uplink": 1e5, "downlink": 1e6}})
    (planned,) = make_plan(timed, Fleet.of(timed.clients, server_link=1e12)).stages
    (waiting,) = make_plan(digits(16, stage), Fleet.of(timed.clients, server_link=1e12)).stages
    assert planned.round_seconds == pytest.approx(waiting.round_seconds / (4 if keys else 1), rel=0.01)
    assert planned.exact == (not keys)
    summary = run(timed).summary
    assert summary["simulated_seconds"] == pytest.approx(planned.rounds * planned.round_seconds, rel=0.02)
    assert planned.bytes_up == pytest.approx(summary["bytes_up"], rel=0.02)


def of(plan: Plan, resource: str) -> Any:
    (found,) = [limit for limit in plan.limits if limit.resource == resource]
    return found


def test_means_of_every_client_fill_the_memory_before_sums_do() -> None:
    fleet = Fleet(server_memory=64e9, server_disk=1e15)
    sums, rows = (make_plan(digits(8, {"method": name}), fleet) for name in ("fedncm", "fedcof"))
    # FedCOF keeps ten means of 64 numbers of each client, twice while it solves; FedNCM's sums do not grow.
    assert of(rows, "server memory").needed[10**6] > 2 * 4 * 640 * 10**6
    assert of(sums, "server memory").needed[10**6] < 2 * 4 * 640 * 10**6 / 10
    assert of(rows, "server memory").enough_for < of(sums, "server memory").enough_for
    enough = of(sums, "server memory").enough_for
    least, most = (
        make_plan(digits(8, {"method": "fedncm"}), Fleet(clients=round(by * enough))).stages[0].server_memory
        for by in (1, 1.03)
    )
    assert least <= 64e9 < most


def test_limits_are_in_the_order_in_which_they_run_out() -> None:
    plan = make_plan(digits(8, {"method": "fed3r"}, TRAINED), Fleet())
    enough = [limit.enough_for for limit in plan.limits]
    assert enough == sorted(enough)
    assert len(enough) == 6


def write(path: Path, *stages: dict[str, Any]) -> Path:
    path.write_text(digits(8, *stages).to_toml())
    return path


def test_the_command_shows_tables_and_json(tmp_path: Path, command: Command) -> None:
    recipe = write(tmp_path / "recipe.toml", {"method": "fedncm"}, TRAINED)
    options = ("--clients", 10**6, "--uplink", "1Mbps", "--availability", 0.1, "--flops", "5GFLOPS")
    shown = command("plan", recipe, *options, cwd=tmp_path)
    assert shown.returncode == 0
    assert "at 10⁹ clients:" in shown.stdout
    assert "a simulation of the recipe here" in shown.stdout
    found = json.loads(command("plan", recipe, *options, "--json", cwd=tmp_path).stdout)
    assert [stage["method"] for stage in found["stages"]] == ["fedncm", "fedavg"]
    assert found["stages"][0]["clients"] == 10**6
    assert not np.isinf(found["stages"][0]["bytes_up"])
    assert not list(tmp_path.glob("runs*"))


def test_every_mistake_is_told_at_once(tmp_path: Path, command: Command) -> None:
    recipe = write(tmp_path / "recipe.toml", {"method": "fedncm"})
    wrong = ("--uplink", "fast", "--flops", "-3", "--availability", 2, "--clients", 0)
    refused = command("plan", recipe, *wrong, cwd=tmp_path)
    assert refused.returncode == 2
    for option in ("--uplink fast", "--flops -3", "--availability 2", "--clients 0"):
        assert option in refused.stderr
