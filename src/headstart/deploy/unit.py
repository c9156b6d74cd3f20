"""Units for systemd: the commands of a server and of a node, started with the machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def unit(description: str, arguments: Sequence[str | Path], restart: str) -> str:
    """The text of a service that runs a headstart command.

    restart: `on-failure` for what ends by itself, `always` for what does not.
    """
    command = " ".join(map(_quoted, (sys.executable, "-P", "-m", "headstart.cli", *map(str, arguments))))
    return f"""\
[Unit]
Description={description.replace("%", "%%")}
Wants=network-online.target
After=network-online.target

[Service]
# Name a user here who can read what it needs, and nothing else.
# User=headstart
ExecStart={command}
Restart={restart}
RestartSec=30
# A user's mistake, and a stop.
RestartPreventExitStatus=2 130
SuccessExitStatus=130
KillMode=mixed
TimeoutStopSec=60
NoNewPrivileges=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """A word of a command line as systemd reads it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
