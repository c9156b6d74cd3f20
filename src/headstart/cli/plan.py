"""The command that says what a recipe will cost before it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.shared import Imports, RecipeFile, Settings, show_table
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.runner.forecast import Forecast, Limit, Plan

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def plan(
    recipe: RecipeFile,
    settings: Settings = None,
    clients: Annotated[
        int | None, typer.Option(help="How many clients there will be; those of the recipe's data by default.")
    ] = None,
    uplink: Annotated[
        str | None, typer.Option(help="Of a client: 500kbps, 1Mbps; that of the recipe's clients table, or 10Mbps.")
    ] = None,
    downlink: Annotated[str | None, typer.Option(help="Of a client; that of the clients table, or 50Mbps.")] = None,
    availability: Annotated[
        float | None,
        typer.Option(help="Share of the day that a client can be asked in; that of the table, or 1."),
    ] = None,
    flops: Annotated[
        str | None, typer.Option(help="Of a client, in a second: 1T; those of its clients table, or 10GFLOPS.")
    ] = None,
    server_link: Annotated[str, typer.Option(help="Of the server, each way.")] = "1Gbps",
    server_memory: Annotated[str | None, typer.Option(help="Of the server: 64GB; this machine's by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    imports: Imports = None,
) -> None:
    """What a recipe will cost before it runs: bytes, passes, memory, disk, days, and what breaks first."""
    from headstart.config.recipe import Recipe
    from headstart.runner.forecast import Fleet, make_plan

    texts = {
        "--uplink": uplink, "--downlink": downlink, "--flops": flops, "--server-link": server_link,
        "--server-memory": server_memory,
    }  # fmt: skip
    given = _given(clients, availability, {option: text for option, text in texts.items() if text is not None})
    loaded = Recipe.load(recipe, settings or ())
    found = make_plan(loaded, Fleet.of(loaded.clients, **given))
    if as_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    _show(found)


def _given(clients: int | None, availability: float | None, texts: dict[str, str]) -> dict[str, Any]:
    """What the command line says of the machines; every mistake at once."""
    found, wrong = dict[str, Any](), list[str]()
    if clients is not None and clients < 1:
        wrong.append(f"--clients {clients}: must be 1 or more")
    if availability is not None and not 0 < availability <= 1:
        wrong.append(f"--availability {availability:g}: must be more than 0, and 1 at most")
    for option, text in texts.items():
        number = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgtp]?)(?:bps|bit/s|flops|flop/s|b)?", text.strip().lower())
        try:
            value = float(number[1]) * _PREFIXES[number[2]] if number else 0.0
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            wrong.append(f"{option} {text}: give a number greater than 0 with its unit, {_EXAMPLES[option]}")
        found[option.removeprefix("--").replace("-", "_")] = value
    if wrong:
        raise HeadstartError("\n".join(wrong))
    return found | {n: v for n, v in (("clients", clients), ("availability", availability)) if v is not None}


_EXAMPLES = {
    "--uplink": "such as 500kbps or 1Mbps", "--downlink": "such as 500kbps or 20Mbps",
    "--flops": "such as 10GFLOPS or 1T", "--server-link": "such as 1Gbps", "--server-memory": "such as 64GB",
}  # fmt: skip


def _show(found: Plan) -> None:
    from headstart.report import human_bytes

    stages = [f"stage {number}: {each.method}" for number, each in enumerate(found.stages)]
    show_table(["", *stages, "from"], _rows(found.stages))
    columns = ("what grows", "at hand", "at 10⁶ clients", "at 10⁹ clients", "enough for")
    show_table(columns, (_limit(each) for each in found.limits))
    for scale, name in zip((10**6, 10**9), ("10⁶", "10⁹"), strict=True):
        broken = [each for each in found.limits if each.needed[scale] > each.available]
        first = f"{broken[0].resource} of stage {broken[0].stage} runs out first" if broken else "nothing runs out"
        print(f"at {name} clients: {first}")
    print(
        f"a simulation of the recipe here: about {_time(found.simulation_seconds)}, "
        f"{human_bytes(found.simulation_memory)} of memory, {human_bytes(found.simulation_disk)} of disk"
    )
    for note in found.notes:
        print(note)


def _rows(stages: Sequence[Forecast]) -> Iterator[list[str]]:
    """Each figure of all stages, and where it comes from."""
    from headstart.report import human_bytes

    def size(name: str) -> list[str]:
        return [human_bytes(getattr(each, name)) for each in stages]

    def sent(name: str) -> list[str]:
        return [("" if each.exact else "≈ ") + human_bytes(getattr(each, name)) for each in stages]

    yield ["rounds", *(f"{each.rounds:,}" for each in stages), "the recipe, and the number of clients"]
    yield ["clients of a round", *(f"{each.per_round:,}" for each in stages), "participation or clients_per_round"]
    yield ["a client sends", *sent("client_up"), "messages by their layout, on average over those asked"]
    yield ["most of one client", *sent("client_up_most"), "the client with the largest messages"]
    yield ["a client receives", *sent("client_down"), "requests, and once what earlier stages made"]
    yield ["all clients send", *sent("bytes_up"), "rounds × clients × a message"]
    yield ["all clients receive", *sent("bytes_down"), "rounds × clients × a request"]
    yield ["forward passes", *(f"{each.forward_passes:,.0f}" for each in stages), "examples; a training step is three"]
    yield ["server memory", *size("server_memory"), "state, a round's total, the list of clients"]
    yield ["server disk", *size("server_disk"), "two checkpoints"]
    yield ["a round takes", *(_time(each.round_seconds) for each in stages), "links, arithmetic, availability"]
    yield ["of that, most", *(each.slowest for each in stages), "the longest part"]
    yield ["rounds a day", *(f"{each.rounds_per_day:,.3g}" for each in stages), "a day by a round"]
    yield ["days", *(f"{each.days:,.3g}" for each in stages), "all rounds"]


def _limit(each: Limit) -> list[str]:
    from headstart.report import human_bytes

    size = _time if each.resource.startswith("a round") else human_bytes
    enough = "any number" if each.enough_for == float("inf") else f"{each.enough_for:,.2g} clients"
    return [f"stage {each.stage}: {each.resource}", size(each.available), *map(size, each.needed.values()), enough]


def _time(seconds: float) -> str:
    """Seconds in the largest unit that they fill."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{1000 * seconds:.1f} ms"
