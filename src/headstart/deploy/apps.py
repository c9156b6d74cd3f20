"""Flower's apps: a recipe on its simulation runtime, and the `ServerApp` and `ClientApp` of a deployment."""

from __future__ import annotations

import logging
import os
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from headstart.deploy.guard import LOG, check_guarded
from headstart.errors import HeadstartError

if TYPE_CHECKING:  # a process loads what it needs
    from headstart.channel.secure import Identity
    from headstart.config.recipe import Recipe
    from headstart.engine.node import Node
    from headstart.runner import Result

server = ServerApp()
client = ClientApp()


# ------------------------------------------------------------------------------------------------------- a deployment


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the recipe of the app with nodes that hold their own data; go on where an earlier run was interrupted.

    Run configuration: `recipe` (its text), `nodes` (names of the nodes, with commas), `out` (the run directory),
    `wait` (seconds after which the run starts without those that have not come; empty: none), and `test` (the server's
    own data to test on; empty: nodes test on theirs).
    """
    import numpy as np

    from headstart.data import Federation
    from headstart.engine.grid import Nodes
    from headstart.engine.server_log import ServerLog
    from headstart.report import remarks
    from headstart.runner import run_federation

    check_guarded("superlink")
    config = context.run_config
    recipe = _recipe(str(config["recipe"]))
    names = tuple(name.strip() for name in str(config["nodes"]).split(","))
    out = Path(str(config["out"]))
    numbers = {name: number for number, name in enumerate(names)}
    nodes = Nodes(grid, recipe, numbers, ServerLog(Path(os.environ[LOG])))
    nodes.available(len(names), float(str(config.get("wait") or "inf")))
    if not nodes.node_info:
        raise HeadstartError(f"none of the nodes came: {', '.join(names)}")
    test = str(config.get("test") or "") or None
    nodes.agree(_known(recipe, test))
    sizes = np.array([nodes.node_info.get(number, {"examples": 0})["examples"] for number in range(len(names))])
    members = np.array([nodes.task_of(number) for number in range(len(names))]) if recipe.tasks else None
    federation = Federation.apart(recipe, names, sizes, nodes.agreed["dim"], test, members)
    resume = (out / "recipe.toml").is_file()
    result = run_federation(recipe, federation, out, resume, Progress(recipe, len(names)), nodes)
    for stage in result.summary["stages"]:
        for remark in remarks(stage):
            print(remark, flush=True)


class Progress:
    """Says how far a run is, and how long the rest of the stage takes; `metrics.jsonl` has all figures."""

    def __init__(self, recipe: Recipe, clients: int) -> None:
        self.recipe, self.clients = recipe, clients
        self._before = -1, 0, time.monotonic()  # the stage and the rounds of the line before, and when that was

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Print a line of metrics in plain words."""
        from headstart.core.metrics import SHOWN

        stage, done, now = metrics["stage"], metrics["round"], time.monotonic()
        rounds = self.recipe.stages[stage].rounds_for(self.clients)
        last, played, since = self._before
        played = played if last == stage else 0
        left = (now - since) / max(done - played, 1) * (rounds - done)
        self._before = stage, done, now
        parts = [f"{name} {metrics[name]:.4f}" for name in (*SHOWN, "loss") if metrics.get(name) is not None]
        parts += [f"{metrics['bytes_up']:,} bytes up, {metrics['bytes_down']:,} down"]
        parts += [f"about {left:,.0f} s left in the stage"] if left else []
        print(f"stage {stage} ({metrics['method']}), round {done} of {rounds}: {', '.join(parts)}", flush=True)


def _known(recipe: Recipe, test: str | None) -> dict[str, Any]:
    """What the server itself knows of the backbone and the features that nodes have to have."""
    import numpy as np

    from headstart.data import Federation

    if recipe.model.backbone != "features":
        from headstart.backbones import load_backbone

        return {"weights": load_backbone(recipe.model_of(0)).weights_digest()}
    if test is None:
        return {}
    return {"dim": Federation.apart(recipe, (), np.zeros(0, np.int64), 0, test).dataset.test.dim}


@client.query()
def answer(message: Message, context: Context) -> Message:
    """The answer of a node with its own data.

    Node configuration: `name`, `data` (a path as in a recipe's `dataset`), `state` (a folder for what is to last), and
    optionally `recipe` (a file: the node takes part in this recipe only) and `limits` (a node.toml). For recipes with
    several tasks also `task` (the name of the node's own). `signing_key` (an OpenSSH Ed25519 private key) and `peers`
    (a file with a line for every node, its name and public key, in the order of the server's list of nodes) say which
    client the node is; recipes with secure sums need them.
    """
    from headstart.config.node import NodeLimits
    from headstart.data import Federation
    from headstart.engine.node import Node
    from headstart.engine.node_errors import untold
    from headstart.engine.respond import refuse, respond, run_of

    config = context.node_config
    try:
        check_guarded("supernode")
        recipe = _recipe(str(context.run_config["recipe"]))
        if "recipe" in config and _recipe(Path(str(config["recipe"])).read_text(encoding="utf-8")) != recipe:
            raise HeadstartError("the server runs another recipe than the one that this node agreed to")
        name = str(config["name"])
        with untold():
            federation = Federation.silo(recipe, str(config["data"]), name, str(config.get("task") or ""))
        limits = NodeLimits.load(Path(str(config["limits"]))) if "limits" in config else NodeLimits()
        folder = Path(str(config["state"])) / run_of(message)
        node = Node(recipe, federation, folder, True, _identity(config, name), limits)
    except KeyError as error:
        return refuse(message, HeadstartError(f"the node has no {error} in its configuration"))
    except Exception as error:  # Flower would send what it says to the server, paths included
        return refuse(message, error, *map(str, config.values()))
    return respond(message, node, name)


def _identity(config: Mapping[str, Any], name: str) -> Identity | None:
    """Which client the node is, and as whom it signs; None where the configuration does not say."""
    from headstart.channel.secure import Identity

    if not (config.get("signing_key") and config.get("peers")):
        return None
    return Identity.load(Path(str(config["signing_key"])), Path(str(config["peers"])), name)


def _recipe(text: str) -> Recipe:
    from headstart.config.recipe import Recipe

    return Recipe.parse(tomllib.loads(text))


# -------------------------------------------------------------------------------------------------------- a simulation

_NODES: dict[tuple[str, str], Node] = {}
"""Of this process, by recipe and folder: a process of a simulation answers for many clients."""


def simulate(
    recipe: Recipe,
    out: Path | str | None = None,
    resume: bool = False,
    on_metrics: Callable[[dict[str, Any]], object] | None = None,
) -> Result:
    """Run a recipe on Flower's simulation runtime, whose nodes clients share; otherwise as `headstart.run`."""
    from flwr.simulation import run_simulation

    from headstart.data import Federation
    from headstart.engine.grid import Nodes
    from headstart.engine.shared_nodes import SharedNodes
    from headstart.records import RunDirectory
    from headstart.runner import run_federation

    if out is not None and not resume:
        RunDirectory.check_free(Path(out))
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    federation, text = Federation.of(recipe), recipe.to_toml()
    found: list[Result] = []
    server, client = ServerApp(), ClientApp()
    with TemporaryDirectory() as temporary:
        folder = Path(out).absolute() / "checkpoint" if out is not None else Path(temporary)

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            shared = SharedNodes(grid, federation.n_clients)
            nodes = Nodes(shared, recipe, {name: number for number, name in enumerate(federation.names)})
            nodes.available(federation.n_clients)
            path = Path(out) if out is not None else None
            found.append(run_federation(recipe, federation, path, resume, on_metrics, nodes, folder))

        @client.query()
        def answer(message: Message, context: Context) -> Message:
            from headstart.deploy.apps import simulated

            return simulated(text, folder, message)

        config: Any = {
            "init_args": {"include_dashboard": False, "logging_level": "error", "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        run_simulation(server, client, min(federation.n_clients, 2 * (os.cpu_count() or 1)), backend_config=config)
    return found[0]


def simulated(text: str, folder: Path, message: Message) -> Message:
    """The reply of a simulated node, which several clients share."""
    from headstart.engine.respond import respond
    from headstart.engine.shared_nodes import reply_to_all

    node = simulated_node(text, folder)
    return reply_to_all(message, lambda request, client: respond(request, node, node.federation.names[client]))


def simulated_node(text: str, folder: Path) -> Node:
    """This process's node of a simulation, which replies for any client."""
    from headstart.data import Federation
    from headstart.engine.node import Node

    key = text, str(folder)
    if key not in _NODES:
        recipe = _recipe(text)
        _NODES.clear()
        _NODES[key] = Node(recipe, Federation.of(recipe), folder, deployed=False)
    return _NODES[key]
