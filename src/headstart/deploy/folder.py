"""A folder from which a federation of real machines is run: Flower's app, keys, certificates and start scripts.

Flower's SuperLink listens on one port with TLS, and every SuperNode proves who it is with a key of its own. Both are
started by `headstart.deploy.guard`: runs are started from the server's own machine only, and nodes execute no app but
the one made here. The certificates and keys are for a test federation; the folder's README says what changes for a
real one.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from headstart.config.describe import write_recipe
from headstart.config.recipe import Recipe
from headstart.core.files import rename_folder
from headstart.deploy.guard import FLOWER, app_digest, check_flower
from headstart.deploy.keys import DAYS, address_of, write_certificates, write_node_keys, write_signing_keys
from headstart.deploy.kit import LIMITS, check_name
from headstart.deploy.watch import note, now
from headstart.errors import HeadstartError
from headstart.records import NodeState

PORT = 9443
"""Of the SuperLink; the nodes' own ports, open on their machines only, are the ones after it."""
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def init(folder: Path, recipe: Recipe, nodes: Sequence[str], host: str = "127.0.0.1", port: int = PORT) -> list[str]:
    """Write everything that a federation of ``nodes`` needs into ``folder``; return the commands that run it.

    ``host`` is the name or the IPv4 address under which the nodes reach the SuperLink. The folder appears whole or
    not at all.
    """
    check_flower()
    _check_nodes(nodes, port)
    check_server(folder, recipe, host, port)
    with appearing(folder) as draft:
        _write(draft, recipe, nodes, host, port)
    return [shlex.quote(str(folder / script)) for script in ("superlink.sh", "nodes.sh", "run.sh")]


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``folder`` once it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield draft
        rename_folder(draft, folder)
    except OSError as error:
        if Path(str(error.filename)).is_relative_to(draft):  # of which nothing is left
            error.filename = str(folder / Path(error.filename).relative_to(draft))
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_server(folder: Path, recipe: Recipe, host: str, port: int) -> None:
    """Refuse what no server can be made of."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HeadstartError(f"{folder} is in use: name a folder that is empty or does not exist yet")
    tables = {"data": recipe.data} if recipe.data else {f"tasks.{n}": task for n, task in enumerate(recipe.tasks)}
    unnamed = [f"{place}.classes" for place, data in tables.items() if data.classes is None]
    if unnamed and recipe.model.task != "generate":
        raise HeadstartError(
            f"{', '.join(unnamed)}: name the classes, since nodes that hold their own data number them by it"
        )
    if recipe.clients is not None:
        raise HeadstartError("clients: nodes have their own speed; leave the table out, or simulate in one process")
    if address_of(host) is None and not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise HeadstartError(f"host {host!r}: give the server's DNS name or IPv4 address, without a port")
    if not 1 <= port <= 65535:
        raise HeadstartError(f"port {port}: choose one between 1 and 65535")


def _check_nodes(nodes: Sequence[str], port: int) -> None:
    if not nodes:
        raise HeadstartError("a federation needs a node: give every machine that holds data a name")
    for name in nodes:
        check_name(name)
    if len({name.lower() for name in nodes}) < len(nodes):
        raise HeadstartError(f"nodes {', '.join(nodes)}: every node needs a name of its own, whatever the case")
    if not 1 <= port <= 65535 - len(nodes):
        raise HeadstartError(f"port {port}: choose one between 1 and {65535 - len(nodes)}")


def write_server(folder: Path, recipe: Recipe, host: str) -> None:
    """The recipe, Flower's app and the certificates."""
    for name in ("app", "certificates"):
        (folder / name).mkdir()
    write_recipe(folder / "recipe.toml", recipe.to_toml())
    (folder / "app" / "pyproject.toml").write_text(_app(), encoding="utf-8")
    write_certificates(folder / "certificates", host)


def listen_on(host: str) -> str:
    """The address that the SuperLink listens on: all interfaces, unless nodes are on its own machine only."""
    address = ipaddress.IPv4Address("127.0.0.1") if host == "localhost" else address_of(host)
    return str(address) if address is not None and address.is_loopback else "0.0.0.0"


def _write(folder: Path, recipe: Recipe, nodes: Sequence[str], host: str, port: int) -> None:
    write_server(folder, recipe, host)
    for name in ("keys", "signing"):
        (folder / name).mkdir()
    (folder / "README.md").write_text(_readme(nodes), encoding="utf-8")
    write_node_keys(folder / "keys", nodes)
    write_signing_keys(folder, nodes)
    note(folder, (host, port), [NodeState(name, now()) for name in nodes])

    listen = listen_on(host)
    local = listen if listen != "0.0.0.0" else "127.0.0.1"
    _script(
        folder / "superlink.sh",
        "The SuperLink: open to nodes with an admitted key; runs are started from this machine only.",
        {"listen": (listen, "0.0.0.0: all interfaces; 127.0.0.1: this machine only"), "port": (str(port), "")},
        _SUPERLINK,
    )
    _script(
        folder / "run.sh",
        "Admit the nodes whose public keys are in keys/, and nobody else; run recipe.toml, and fail if the run does.",
        {
            "host": (local, "of the SuperLink, which takes this from its own machine only"),
            "port": (str(port), ""),
            "nodes": (",".join(nodes), "that participate"),
            "wait": ("", "seconds after which the run starts without the missing ones; empty: for ever"),
            "test": ("", "the server's own data to test on; empty: nodes test on theirs"),
            "out": ("$here/run", "the run directory, on the server's disk"),
        },
        _RUN,
    )
    digest = app_digest(folder / "app")
    scripts = " ".join(f"node-{name}.sh" for name in nodes)
    _script(folder / "nodes.sh", "All SuperNodes on this machine, to try the federation out.", {}, _NODES % scripts)
    for number, name in enumerate(nodes, start=1):
        (folder / f"node-{name}.toml").write_text(LIMITS, encoding="utf-8")
        _script(
            folder / f"node-{name}.sh",
            f"The SuperNode of {name}, next to the data that stay there.",
            {
                "host": (host, "of the SuperLink"),
                "port": (str(port), ""),
                "name": (name, ""),
                "data": (f"$here/data/{name}", "what a recipe may name as its dataset"),
                "task": ("", f"this node's: {', '.join(recipe.task_names)}" if recipe.tasks else "none: there is one"),
                "recipe": ("$here/recipe.toml", "the only one that this node takes part in"),
                "limits": (f"$here/node-{name}.toml", "what may leave this machine"),
                "signing_key": (f"$here/signing/{name}", "for secure aggregation"),
                "peers": ("$here/peers", "everybody's public keys for secure aggregation, in the order of run.sh"),
                "app": (digest, "SHA-256 of what this node executes; several with commas"),
                "local_port": (str(port + number), "any that is free; not seen from outside"),
            },
            _SUPERNODE,
        )


# ------------------------------------------------------------------------------------------------------ app and scripts


def _app() -> str:
    """Flower's description of the app; run.sh gives the values of its config."""
    return tomli_w.dumps(
        {
            "project": {
                "name": "federation",
                "version": "1.0.0",
                "description": "A headstart recipe on Flower's deployment runtime.",
                "license": "Apache-2.0",
                "dependencies": ["headstart[federation]"],
            },
            "tool": {
                "flwr": {
                    "app": {
                        "publisher": "headstart",
                        "components": {
                            "serverapp": "headstart.deploy.apps:server",
                            "clientapp": "headstart.deploy.apps:client",
                        },
                        "config": dict.fromkeys(("recipe", "nodes", "out", "wait", "test"), ""),
                    }
                }
            },
        }
    )


def _script(path: Path, purpose: str, variables: Mapping[str, tuple[str, str]], body: str) -> None:
    """An executable script: what it is for, its variables with a comment each, and what it does."""
    lines = ["#!/usr/bin/env bash", f"# {purpose}", "set -euo pipefail"]
    lines.append('here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)')
    for key, (value, comment) in variables.items():
        quoted = f'"{value}"' if value.startswith("$here") else shlex.quote(value)
        lines.append(f"{key}={quoted}" + (f"  # {comment}" if comment else ""))
    path.write_text("\n".join(lines) + "\n\n" + body, encoding="utf-8")
    path.chmod(path.stat().st_mode | 0o111)


_TOML = r'''# A text as TOML writes it, whatever is in it.
toml() {
    local text=${1//\\/\\\\}
    printf '"""\n%s"""' "${text//\"/\\\"}"
}
'''

_SUPERLINK = """\
export FLWR_HOME="$here/state/superlink" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2
mkdir -p "$FLWR_HOME"
cd -- "$here"
exec python3 -P -m headstart.deploy.guard superlink --host "$listen" --port "$port" \\
    --ssl-ca-certfile "$here/certificates/ca.pem" \\
    --ssl-certfile "$here/certificates/server.pem" --ssl-keyfile "$here/certificates/server.key" \\
    --enable-supernode-auth --database "$here/state/superlink.db" --disable-runtime-dependency-installation
"""

_SUPERNODE = (
    _TOML
    + """\
export FLWR_HOME="$here/state/$name/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
command -v headstart >/dev/null || { echo "activate the environment with headstart[federation]" >&2; exit 2; }
mkdir -p "$FLWR_HOME"
cd -- "$here"
cat >"$FLWR_HOME/node-config.toml" <<END
name = $(toml "$name")
data = $(toml "$data")
task = $(toml "$task")
recipe = $(toml "$recipe")
limits = $(toml "$limits")
state = $(toml "$here/state/$name")
signing_key = $(toml "$signing_key")
peers = $(toml "$peers")
END
# The node says goodbye on the first SIGINT that it hears, and ignores the others.
trap 'while kill -INT "$node" 2>/dev/null; do sleep 1; done; exit 0' INT TERM
# The SuperLink refuses a key that run.sh has not admitted yet, and for a minute one whose node was killed.
while true; do
    python3 -P -m headstart.deploy.guard supernode "$app" --superlink "$host:$port" --port "$local_port" \\
        --root-certificates "$here/certificates/ca.pem" --auth-supernode-private-key "$here/keys/$name" \\
        --node-config "$FLWR_HOME/node-config.toml" &
    node=$!
    status=0
    wait "$node" || status=$?
    case $status in 0 | 2) exit "$status" ;; esac # 2: a mistake that trying again does not mend
    echo "$name is not connected; next attempt in 5 seconds" >&2
    sleep 5 &
    wait "$!"
done
"""
)

_NODES = """\
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 0' INT TERM
for script in %s; do
    "$here/$script" &
done
wait
"""

_RUN = (
    _TOML
    + """\
export FLWR_HOME="$here/state/run" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir -p "$FLWR_HOME"
cat >"$FLWR_HOME/config.toml" <<END
[superlink.federation]
address = "$host:$port"
root-certificates = $(toml "$here/certificates/ca.pem")
END
cat >"$FLWR_HOME/values.toml" <<END
nodes = $(toml "$nodes")
wait = $(toml "$wait")
test = $(toml "$test")
out = $(toml "$out")
recipe = $(toml "$(<"$here/recipe.toml")")
END
if [[ -e $out/summary.json ]]; then
    echo "the run in $out is finished; another one needs another out in run.sh"
    exit 0
fi

until (: <"/dev/tcp/$host/$port") 2>/dev/null; do
    echo "waiting for the SuperLink at $host:$port" >&2
    sleep 2
done
python3 -P -m headstart.deploy.control "$here" "$host" "$port"
status() { flwr list federation --run-id "$run" --format json 2>/dev/null | grep -oE '"status": "[a-z:-]+"' || true; }
# A run for the same directory that goes on is followed, and not started a second time.
run="" before=""
[[ ! -e $FLWR_HOME/run ]] || { read -r run; read -r before; } <"$FLWR_HOME/run"
if [[ -n $run && $before == "$out" && $(status) =~ pending|starting|running ]]; then
    echo "a run is under way; this shows it from its beginning" >&2
else
    # It exits with 0 when it is refused, too.
    answer=$(flwr run "$here/app" federation --run-config "$FLWR_HOME/values.toml" --format json) || true
    run=$(grep -oE '"run-id": "[0-9]+"' <<<"$answer" | tr -dc 0-9) || { echo "$answer" >&2; exit 1; }
    { echo "$run"; echo "$out"; } >"$FLWR_HOME/run"
fi
flwr log "$run" federation
[[ $(status) == *finished:completed* ]]
"""
)


def _readme(nodes: Sequence[str]) -> str:
    name = nodes[0]
    return f"""\
# A federation

Made by `headstart deploy init` for Flower's deployment runtime: TLS, and a key for every node. The scripts run from any
directory and keep their state in `state/` beside them. They want the environment with `headstart[federation]` to be
active. What to change is at the top of each.

## One machine

Set `data` in every `node-*.sh`. Then, each in a terminal of its own:

```bash
./superlink.sh
./nodes.sh        # all of them; or node-{name}.sh and the others one by one
./run.sh
```

`run.sh` admits the nodes, which ask until they are, runs `recipe.toml`, and exits with 0 if the run succeeds. The
result is in `run/`. After an interruption, `run.sh` goes on from there; another recipe needs another `out`. Stop nodes
with Ctrl-C or SIGTERM, and before the SuperLink: a node that was killed is refused for up to a minute, and asks again.

## Several machines

These certificates and keys are for a test: whoever made them can pose as anybody.

| machine | files |
|---|---|
| server | `superlink.sh`, `run.sh`, `recipe.toml`, `app/`, `certificates/` without `ca.key`, `keys/*.pub` |
| node, here {name} | `node-{name}.sh`, `node-{name}.toml`, `recipe.toml`, `certificates/ca.pem`, `keys/{name}`, \
`signing/{name}`, `peers` |

- Private keys never travel. Make a node's on its own machine, in place of the one made here, and give only
  `keys/{name}.pub` to the server, before the first run:

  ```bash
  rm -f keys/{name} keys/{name}.pub
  ssh-keygen -q -t ecdsa -b 384 -N "" -f keys/{name}
  ```

- For secure aggregation nodes have a second key, which they sign with for each other: the server needs none of it. Make
  it on the node's own machine, too, and give its public half to all other nodes without the server, in `peers`: a line
  `NAME ssh-ed25519 AAAA…` for every node, the same file everywhere, in the order of `nodes` in `run.sh`. Whoever can
  change this file on a node can read what the node adds:

  ```bash
  rm -f signing/{name} signing/{name}.pub
  ssh-keygen -q -t ed25519 -N "" -f signing/{name}
  echo "{name} $(cut -d ' ' -f 1,2 signing/{name}.pub)"    # the line in peers
  ```

- In production let your own authority sign the certificate of the server: `ca.pem` is then the authority's,
  `server.pem` and `server.key` are the server's. Those made here are valid for {DAYS} days, for the host that was
  given to `deploy init`, and for localhost.
- `certificates/ca.key` signs certificates. No script reads it: it stays where it was made, off the network.
- Nodes call the server. Only the SuperLink's port has to be reachable. From other machines it takes requests that are
  signed with an admitted key, and answers all others with 403: `run.sh` works on the server only. There it asks nobody
  for a password: every account of that machine, and whoever comes through a proxy or a tunnel that ends on it, can
  start an app on the server and admit keys.
- A node executes only the app whose SHA-256 is `app` in its script, and takes part only in the recipe that its own
  `recipe.toml` holds, within the limits of its `node-{name}.toml`. `headstart node ledger state/{name}` lists all that
  ever left it. Let it run as a user who can read its data and nothing else.
- All machines have the same version of headstart, and Flower {", ".join(FLOWER)}; the scripts refuse others.
- Weights that the recipe names by a path are under this path on all machines; a relative path starts in this folder.
"""
