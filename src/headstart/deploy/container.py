"""A Containerfile and a compose file for a server or a node: folder and data are volumes, the rest is read-only.

The container runs as the owner of the folder, who alone can read its keys, and never as root.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.core.files import write_text
from headstart.deploy.admit import Server
from headstart.engine.flower_messages import package_version
from headstart.errors import HeadstartError

Volume = tuple[Path, str, bool]
"""A path of this machine, where the container has it, and whether it may write there."""


def server_service(folder: Path, out: Path | None, wait: float | None, test: str) -> dict[str, Any]:
    """The service of `headstart server`."""
    server = Server.load(folder)
    if server.listen != "0.0.0.0":
        raise HeadstartError(
            f"nodes reach {server.host} on this machine only, and a container is another one: make the folder with "
            "`headstart deploy init --host`, and the name under which nodes reach this machine"
        )
    words, volumes = ["server", "/federation"], [(server.folder, "/federation", True)]
    if out is not None:
        if not out.absolute().is_relative_to(server.folder):
            raise HeadstartError(f"--out {out}: a container writes into {server.folder} only; name a folder in there")
        words += ["--out", f"/federation/{out.absolute().relative_to(server.folder)}"]
    if wait is not None:
        words += ["--wait", str(wait)]
    if test:
        words += ["--test", _data(test, volumes)]
    ports = {"ports": [f"{server.port}:{server.port}"]}
    # A finished run ends with 0, and is not started again.
    return _service(words, server.folder, volumes) | ports | {"restart": "on-failure:3"}


def node_service(kit: Path, data: str, task: str, folder: Path) -> dict[str, Any]:
    """The service of `headstart node run`."""
    volumes = [(folder.absolute(), "/node", True)]
    inside = kit.absolute().is_relative_to(folder.absolute())
    there = f"/node/{kit.absolute().relative_to(folder.absolute())}" if inside else f"/kit/{kit.name}"
    if not inside:
        volumes.append((kit.absolute(), there, False))
    words = ["node", "run", there, "--data", _data(data, volumes), "--folder", "/node"]
    words += ["--task", task] if task else []
    return _service(words, folder, volumes) | {"restart": "unless-stopped"}


def _data(path: str, volumes: list[Volume]) -> str:
    """Where the container finds data: a path of this machine is a volume, a name is looked up there as here."""
    if not Path(path).exists():
        return path
    volumes.append((Path(path).absolute(), f"/data/{Path(path).absolute().name}", False))
    return volumes[-1][1]


def _service(words: Sequence[str], folder: Path, volumes: Sequence[Volume]) -> dict[str, Any]:
    owner = folder.stat()
    if owner.st_uid == 0:
        raise HeadstartError(
            f"{folder} belongs to root, and the container runs as its owner: give it to a user of its own with "
            f"`chown -R USER {folder}`"
        )
    home = volumes[0][1]
    return {
        "build": {"context": ".", "dockerfile": "Containerfile"},
        "image": f"headstart:{package_version()}",
        "command": list(words),
        "user": f"{owner.st_uid}:{owner.st_gid}",
        "environment": {"HEADSTART_CACHE": f"{home}/state/cache", "HF_HOME": f"{home}/state/hub"},
        "volumes": [
            {"type": "bind", "source": str(here), "target": there, "read_only": not writes}
            for here, there, writes in volumes
        ],
        "read_only": True,
        "tmpfs": ["/tmp:mode=1777"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "stop_grace_period": "60s",
    }


def write_container(folder: Path, name: str, service: dict[str, Any]) -> None:
    """Write both files into a folder; those that are there stay."""
    files = {folder / "Containerfile": containerfile(), folder / "compose.yaml": compose(name, service)}
    if there := [path for path in files if path.exists()]:
        raise HeadstartError(f"{there[0]} exists: name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_text(path, text)


def containerfile() -> str:
    """An image with this version of headstart, on this version of Python."""
    version, python = package_version(), ".".join(map(str, sys.version_info[:2]))
    return f"""\
# headstart {version} and Flower, for a server or a node of a federation. A wheel beside this file is taken in the place
# of the package index's. The index may be another one: docker compose build --build-arg PIP_INDEX_URL=…
FROM python:{python}-slim
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY Containerfile *.whl /wheels/
RUN pip install --no-cache-dir --find-links /wheels "headstart[federation]=={version}"
# compose.yaml names the user who owns the volume, and only /tmp and the volume can be written.
ENV HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-P", "-m", "headstart.cli"]
"""


def compose(name: str, service: dict[str, Any]) -> str:
    """The text of a compose file with one service: YAML whose words are all quoted as JSON's are."""
    lines = ["# docker compose up --build", "services:", f"  {name}:"]
    return "\n".join(lines + _yaml(service, "    ")) + "\n"


def _yaml(value: Any, indent: str) -> list[str]:
    """A mapping, or a list of mappings, as lines."""
    if isinstance(value, list):
        items = [_yaml(item, f"{indent}  ") for item in value]
        return [line for first, *rest in items for line in (f"{indent}- {first.lstrip()}", *rest)]
    lines = []
    for key, each in value.items():
        if isinstance(each, dict) or (isinstance(each, list) and each and isinstance(each[0], dict)):
            lines += [f"{indent}{key}:", *_yaml(each, f"{indent}  ")]
        else:  # a dollar sign would be the start of a variable
            lines.append(f"{indent}{key}: {json.dumps(each, ensure_ascii=False).replace('$', '$$')}")
    return lines
