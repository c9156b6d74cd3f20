"""Commands of `headstart deploy` and `headstart node`."""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.shared import RecipeFile, console, of_disk, require_flower, require_forks, show_table
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.core.chain import Chain, Entry
    from headstart.deploy.admit import Server

deploy = typer.Typer(help="A federation of real machines.", no_args_is_help=True)
node = typer.Typer(help="A machine that holds data of its own.", no_args_is_help=True)


Unit = Annotated[bool, typer.Option("--unit", help="Print a unit for systemd, and do nothing else.")]
Container = Annotated[
    Path | None,
    typer.Option("--container", help="Write a Containerfile and a compose file into this folder, and do nothing else."),
]
Folder = Annotated[Path, typer.Argument(help="The server's folder.")]
KitFile = Annotated[Path, typer.Argument(help="The kit from the server.")]
NodeData = Annotated[str, typer.Option(help="The node's data: what a recipe may name as its dataset.")]
NodeTask = Annotated[str, typer.Option(help="The node's task, where the recipe has several.")]
NodeFolder = Annotated[
    Path | None, typer.Option(help="The folder of `headstart node init`; by default the one that holds the kit.")
]


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    recipe: RecipeFile,
    nodes: Annotated[
        str | None,
        typer.Option(help="To try it out on one machine, names of nodes, with commas; otherwise nodes are added."),
    ] = None,
    host: Annotated[str, typer.Option(help="Name or address of the server, as nodes reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port.")] = 9443,
) -> None:
    """Write what a federation of real machines needs: Flower's app, certificates; for a test also keys and scripts."""
    from headstart.config.recipe import Recipe

    require_flower()
    from headstart.deploy.admit import init_server
    from headstart.deploy.folder import init

    if nodes is None:
        init_server(folder, Recipe.load(recipe), host, port)
        print(f"{folder} is ready. Next: headstart deploy add {shlex.quote(str(folder))} NAME.request")
        return
    commands = init(folder, Recipe.load(recipe), [name.strip() for name in nodes.split(",")], host, port)
    print(f"{folder} is ready; {folder / 'README.md'} says what goes where. On one machine, each in a terminal:")
    print("\n".join(f"  {command}" for command in commands))


@deploy.command()
def add(
    folder: Folder,
    requests: Annotated[list[Path] | None, typer.Argument(help="Of nodes; none: kits are written anew.")] = None,
) -> None:
    """Admit nodes by the requests that they made, and write a kit for every node."""
    require_flower()
    from headstart.deploy.admit import Server, add
    from headstart.deploy.control import admit_at

    server = Server.load(folder)
    before = {node.name for node in server.admitted}
    new = add(server, requests or [])
    admit_at(server)
    print(f"admitted: {', '.join(new)}" if new else "nobody new was admitted")
    _tell_kits(server, before)


@deploy.command()
def revoke(folder: Folder, name: Annotated[str, typer.Argument(help="Of the node.")]) -> None:
    """Let a node's keys no longer participate, ever."""
    require_flower()
    from headstart.deploy.admit import Server, revoke
    from headstart.deploy.control import admit_at

    server = Server.load(folder)
    revoke(server, name)
    out = admit_at(server)
    print(f"{name} is revoked" + (", and no longer registered at the SuperLink" if out else ""))
    _tell_kits(server, {node.name for node in server.admitted})


@deploy.command()
def renew(folder: Folder) -> None:
    """Sign a new certificate of the server by the same authority; kits stay as they are."""
    require_flower()
    from headstart.deploy.admit import Server, renew

    end = renew(Server.load(folder))
    print(f"the server's new certificate ends on {end:%Y-%m-%d}; a server that runs takes it on within seconds")


@deploy.command()
def status(folder: Folder) -> None:
    """Nodes, how far the run has come, certificates, and whether the server listens."""
    require_flower()
    from headstart.deploy.admit import Server
    from headstart.deploy.control import listens
    from headstart.report.dashboard import STATUS, Gallery, status_lines, status_rows

    server = Server.load(folder)
    server.note()  # a folder that an earlier version made has no note yet
    (federation,) = Gallery([server.folder]).federations()
    show_table(STATUS, status_rows(federation))
    for line in status_lines(federation):
        print(line)
    for name, end in server.ends().items():
        print(f"certificates/{name}.pem ends on {end:%Y-%m-%d}")
    print(f"{server.host}:{server.port}: the SuperLink {'listens' if listens(server) else 'is off'}")


@deploy.command()
def log(folder: Folder) -> None:
    """The server's log: who was admitted and revoked, what nodes were asked, and what came back."""
    from headstart.engine.server_log import ServerLog

    found = ServerLog(folder / "state" / "log.jsonl")
    if not found.path.is_file():
        raise HeadstartError(f"{found.path}: there is no log; name the folder of a server that has admitted a node")
    columns = ("time", "event", "node", "run", "recipe", "stage", "round", "kind", "digest", "bytes")
    rows, length = list[list[str]](), {"run": 8, "recipe": 16, "digest": 16}
    for entry in (entries := found.entries()):
        entry["digest"] = entry.get("answer") or entry.get("question") or entry.get("key", "")[-16:]
        entry["time"] = entry["time"].removesuffix("+00:00")
        if "round" in entry:
            entry["round"] += 1  # counted from 1, as in every other table
        shown = {name: str(entry.get(name, ""))[: length.get(name)] for name in columns}
        known = (*columns, "previous", "answer", "question", "key", "of")
        facts = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in known)
        rows.append([*shown.values(), facts])
    show_table((*columns, "other facts"), rows)
    _tell_chain(found, entries)


def _tell_chain(chain: Chain, entries: Sequence[Entry]) -> None:
    print(f"{len(entries)} entries, {sum(entry.get('bytes', 0) for entry in entries):,} bytes; the chain is whole")
    print(f"the last line has the digest {chain.head()}")


def server(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(help="The run directory; by default `run` in the folder.")] = None,
    wait: Annotated[
        float | None, typer.Option(help="Seconds after which the run starts without missing nodes; by default never.")
    ] = None,
    test: Annotated[str, typer.Option(help="The server's own data to test on; by default nodes test on theirs.")] = "",
    unit: Unit = False,
    container: Container = None,
) -> None:
    """Run the recipe of a server's folder with its nodes: 0 finished, 1 failed, 2 a mistake, 130 interrupted."""
    require_forks()
    require_flower()
    from headstart.deploy.container import server_service
    from headstart.deploy.serve import serve
    from headstart.deploy.unit import unit as unit_of

    if unit:
        given = {"--out": out and out.absolute(), "--wait": wait, "--test": test and Path(test).absolute()}
        options = [str(word) for pair in given.items() if pair[1] for word in pair]
        print(unit_of("headstart server", ["server", folder.absolute(), *options], "on-failure"), end="")
        return
    if container is not None:
        _contain(container, "server", server_service(folder, out, wait, test))
        return
    with _interrupted():
        raise typer.Exit(serve(folder, _say, out, wait, test))


def _contain(folder: Path, name: str, service: dict[str, Any]) -> None:
    from headstart.deploy.container import write_container

    write_container(folder, name, service)
    print(f"{folder} has a Containerfile and a compose.yaml. Next: cd {shlex.quote(str(folder))}, then")
    print("docker compose up --build")


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _interrupted() -> Iterator[None]:
    """Ctrl-C is no error, and what a disk does not do may pass: status 1, at which a unit starts the command again. The
    processes that were started have ended."""
    try:
        yield
    except OSError as error:
        if error.errno in (None, errno.EPIPE):
            raise
        print(f"headstart: {of_disk(error)}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        raise typer.Exit(130) from None


def _tell_kits(server: Server, before: set[str]) -> None:
    kits = server.kits()
    if not kits:
        print("no node is admitted")
        return
    print(f"kits are in {server.kit_folder}; their fingerprint, to be compared over the phone: {kits[0].fingerprint()}")
    if others := [kit.name for kit in kits if kit.name in before]:
        print(f"every kit lists all nodes: send a new one to {', '.join(others)}, too")


@node.command("init")
def init_node(
    folder: Annotated[Path, typer.Argument(help="A new folder, on the node's own machine.")],
    name: Annotated[str, typer.Option(help="Of the node, such as hospital-a.")],
) -> None:
    """Make a node's private keys, which stay here, its limits, and the request that the server gets."""
    require_flower()
    from headstart.deploy.kit import init_node

    request = init_node(folder, name)
    print(f"{request} goes to the server, and nothing else: the keys in {folder} never leave this machine.")
    print(f"What may leave it is in {folder / 'node.toml'}.")


@node.command("run")
def run_node(
    kit: KitFile,
    data: NodeData,
    task: NodeTask = "",
    folder: NodeFolder = None,
    unit: Unit = False,
    container: Container = None,
) -> None:
    """Participate in the federation of a kit, until Ctrl-C."""
    require_forks()
    require_flower()
    from headstart.deploy.attend import attend
    from headstart.deploy.container import node_service
    from headstart.deploy.unit import unit as unit_of

    folder = folder or kit.parent
    if unit:
        data = str(Path(data).absolute()) if Path(data).exists() else data
        words = ["node", "run", str(kit.absolute()), "--data", data, "--folder", str(folder.absolute())]
        words += ["--task", task] if task else []
        print(unit_of(f"headstart node {kit.stem}", words, "always"), end="")
        return
    if container is not None:
        _contain(container, "node", node_service(kit, data, task, folder))
        return
    with _interrupted():
        raise typer.Exit(attend(kit, data, folder, _say, task))


@node.command()
def check(kit: KitFile, data: NodeData, task: NodeTask = "", folder: NodeFolder = None) -> None:
    """Look for all that would stop this node from taking part: 0 nothing is wrong, 2 something is."""
    require_flower()
    from headstart.deploy.check import NodeCheck

    wrong = 0
    for found in NodeCheck(kit, data, folder or kit.parent, task).findings():
        wrong += found.level == "wrong"
        _say(f"{found.level:<8} {found.about}: {found.text}")
    if wrong:
        _say(f"{wrong} {'check' if wrong == 1 else 'checks'} failed: the node cannot participate like this")
        raise typer.Exit(2)
    _say("nothing is wrong")


@node.command()
def ledger(state: Annotated[Path, typer.Argument(help="The node's state folder.")]) -> None:
    """All that ever left a node about its data: what was asked, what was answered, and the privacy spent."""
    from rich.table import Table

    from headstart.engine.node_ledger import NodeLedger

    found = NodeLedger(state)
    if not found.path.is_file():
        raise HeadstartError(f"{state}: there is no ledger; name the folder of a node, state/NAME in a deployment")
    left = Table("time", "run", "recipe", "stage", "round", "what", "question", "bytes", "other facts")
    for entry in (entries := found.entries()):
        known = (
            "previous",
            "time",
            "run",
            "recipe",
            "stage",
            "round",
            "kind",
            "question",
            "bytes",
            "privacy",
            "answer",
        )
        stage = f"{entry['stage']}: {entry['method']}" if "method" in entry else str(entry.get("stage", ""))
        facts = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in (*known, "method"))
        round = str(entry["round"] + 1) if "round" in entry else ""
        cells = entry["time"], entry["run"][:8], entry["recipe"][:16], stage, round, entry["kind"]
        left.add_row(*cells, entry.get("question", "")[:8], f"{entry.get('bytes', 0):,}", facts)
    columns = ("recipe", "stage", "what", "run", "unit", "epsilon", "of an example", "delta", "noise by")
    spent = Table(*columns, title="privacy spent")
    for (recipe, number, what, run), privacy in found.guarantees().items():
        guarantee = ["no guarantee"]
        if privacy:
            numbers = privacy["epsilon"], privacy.get("example_epsilon", privacy["epsilon"]), privacy["delta"]
            guarantee = [privacy["unit"], *(f"{number:.4g}" for number in numbers), privacy["noise"]]
        spent.add_row(recipe[:16], str(number), what, (run or "all")[:8], *guarantee)
    console().print(left, spent)
    _tell_chain(found, entries)
