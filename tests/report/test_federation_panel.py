"""The panel of a federation: what a real server and a real run left, in a browser; texts of nodes stay texts."""

import csv
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from typer.testing import CliRunner

import headstart
from headstart import cli
from headstart.deploy.admit import Server, add, init_server, revoke
from headstart.deploy.folder import init
from headstart.deploy.kit import init_node
from headstart.engine.flower_messages import reply_to
from headstart.records import FederationState, NodeState, Record
from headstart.report import human_bytes
from headstart.report.dashboard import Gallery
from headstart.report.dashboard.federation import Federation, panel
from tests.engine.test_node import LOCAL, Grid, _identity, recipe_of, serve, silos  # noqa: F401
from tests.report.test_dashboard import CHROMIUM, DRIVER, ask, browser, serving, until

ATTACK = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TRAINING = {**LOCAL, "method": "fedavg", "rounds": 5, "evaluate_every": 1, "deadline": 3}
PRIVATE = {"weighting": "uniform", "privacy": {"epsilon": 50.0, "delta": 1e-3, "clip": 0.1}}
TOOK, LATE, OUT, ABSENT = "participated", "late", "excluded", "absent"
CELLS = {  # one round of fedncm and five of fedavg, as the grid below plays them
    "a": [TOOK, TOOK, TOOK, TOOK, TOOK, ABSENT],
    "b": [TOOK, TOOK, OUT, TOOK, TOOK, TOOK],
    "c": [TOOK, TOOK, LATE, LATE, LATE, TOOK],
    "gone": ["not-sampled"] * 6,
}


class Troubled(Grid):
    """In the second round of training b answers with an attack, and c not at all; a leaves before the last one."""

    training = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = super().push_messages(messages)
        told = dict(zip([name for name, _, _ in self.said[-len(names) :]], names, strict=True))
        if self.said[-1][1] == "answer":
            self.training += 1
            if self.training == 3:  # after the one of fedncm
                self.replies[told["b"]] = reply_to(self.asking[told["b"]], {"error": ATTACK}, {})
                del self.replies[told["c"]]
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return super().pull_messages([name for name in names if name in self.replies])

    def node(self, number: int, message: Message) -> Message:
        self.asking[str(self.asked)] = message
        return super().node(number, message)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asking: dict[str, Message] = {}


@pytest.fixture
def server(silos: Path, tmp_path: Path) -> Server:  # noqa: F811
    """The folder of a server with four nodes, of which one was revoked, and the run of the other three."""
    recipe = recipe_of(silos, {"method": "fedncm"}, {**TRAINING, **PRIVATE})
    init_server(tmp_path / "homes" / "hospitals", recipe, "127.0.0.1", 9443)
    server = Server.load(tmp_path / "homes" / "hospitals")
    add(server, [init_node(tmp_path / name, name) for name in CELLS])
    revoke(server, "gone")
    grid = Troubled(recipe, silos, tmp_path / "state")

    def after(line: dict[str, Any]) -> None:
        if (line["stage"], line["round"]) == (1, 4):
            del grid.online[10]

    serve(grid, server.folder / "run", on_metrics=after)
    return server


def note(server: Server, now: datetime, **facts: str) -> None:
    """What `headstart server` notes while a was killed, b is there and c has never come."""
    keys = {member.keys.name: member.keys.pem for member in server.members}
    ago = {seconds: now - timedelta(seconds=seconds) for seconds in (300, 50, 20)}
    server.note([
        NodeInfo(name="a", public_key=keys["a"], status="offline", heartbeat_interval=30,
                 last_activated_at=ago[300].isoformat(), last_deactivated_at=ago[50].isoformat(),
                 online_until=ago[50].timestamp()),
        NodeInfo(name="b", public_key=keys["b"], status="online", heartbeat_interval=30,
                 last_activated_at=ago[300].isoformat(), online_until=ago[20].timestamp() + 60),
        NodeInfo(name="c", public_key=keys["c"], status="registered"),
    ], **facts)  # fmt: skip


def moved(server: Server) -> dict[str, tuple[int, int]]:
    """Bytes up and down of every client, by another reader of the file."""
    with (server.folder / "run" / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {row["client"] for row in rows}
    return {
        name: tuple(sum(int(row[way]) for row in rows if row["client"] == name) for way in ("bytes_up", "bytes_down"))
        for name in names
    }  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver; make browser installs them")
def test_in_a_browser_a_federation_is_above_its_run_and_texts_of_nodes_are_texts(
    server: Server, tmp_path: Path
) -> None:
    note(server, datetime.now(UTC), phase="running", run="run")
    with serving(server.folder.parent) as dashboard, browser(tmp_path / "profile") as page:

        def asked(script: str) -> Any:
            return page.execute_script(f"return {script}")  # type: ignore[no-untyped-call]

        def texts(selector: str) -> list[str]:
            return list(asked(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText)"))

        page.get(dashboard.url)
        until(lambda: texts("#view h1") and texts(".federation h1") == ["hospitals"])
        a, b, c, gone = (" ".join(text.split()) for text in texts(".members li"))
        assert re.match(r"a missing, since (5\d|6\d) s ago last seen (5\d|6\d) s ago participated in 5 rounds ↑", a)
        assert re.match(r"b present, since 5 min ago last seen [2-4]\d s ago participated in 5 rounds ↑", b)
        assert re.match(r"c has never connected participated in 3 rounds ↑", c)
        assert re.match(r"gone revoked \d+ s ago$", gone)
        for text, (up, down) in zip((a, b, c), (moved(server)[name] for name in "abc"), strict=True):
            assert f"↑ {human_bytes(up)} ↓ {human_bytes(down)}" in text

        tiles = " | ".join(" ".join(text.split()) for text in texts(".tiles div"))
        assert "nodes 1 of 3 present | stage 2 of 2 fedavg | round 5 of 5 | bytes ↑" in tiles
        epsilon = Gallery([server.folder])._record("run", server.folder / "run")[1].summary["privacy"]["client"]  # type: ignore[index]
        assert f"privacy spent, of any client ε = {epsilon['epsilon']:.3g} δ = 0.001; not of fedncm" in tiles
        assert re.search(r"running at 127.0.0.1:9443 · certificate: 36[45] days left", texts(".federation header")[0])

        for name, row in zip(CELLS, range(1, 5), strict=True):
            cells = f".timeline tbody tr:nth-child({row}) .cell"
            assert asked(f"[...document.querySelectorAll({cells!r})].map(e => e.classList[1])") == CELLS[name], name
        why = asked("[...document.querySelectorAll('.timeline td')].map(e => e.title)")
        assert f"b, round 2 of stage 2: {ATTACK}" in why
        listed = [text.split("\t")[:3] for text in texts(".federation details tbody tr")]
        assert listed == [["2", "5", "a"], ["2", "3–4", "c"], ["2", "2", "b"], ["2", "2", "c"]]
        assert any(ATTACK in text for text in texts(".federation details td"))
        assert asked("document.title") == "headstart"
        assert asked("document.querySelectorAll('#federations script, #federations img').length") == 0

        revoke(server, "c")  # the page follows
        until(lambda: "c\nrevoked" in " | ".join(texts(".members li")))
        for width, scheme in ((1400, "dark"), (390, "light")):
            page.set_window_size(width, 900)
            page.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            )
            assert asked("document.documentElement.scrollWidth <= window.innerWidth"), width
        assert page.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_a_panel_tells_of_a_server_that_waits_is_killed_and_fails(server: Server) -> None:
    now, folder = datetime.now(UTC), server.folder
    gallery = Gallery([folder])
    note(server, now, phase="waiting", run="other")
    panel = gallery.panels(["run"])
    assert "waiting for nodes" in panel
    assert "timeline" not in panel  # that run has not begun
    replace(FederationState.read(folder), written=(now - timedelta(minutes=2)).isoformat()).write(folder)
    killed = gallery.panels(["run"])
    assert "headstart server has not written since" in killed
    assert "was present at last" in killed
    note(server, now, phase="failed", run="run", reason=f"no node can participate: b: {ATTACK}")
    failed = gallery.panels([])
    assert "<p class='warning'>no node can participate: b: &lt;script&gt;document" in failed
    assert "<script" not in failed
    assert "<img" not in failed
    ends = {"ca": (now + timedelta(days=500)).isoformat(), "server": (now + timedelta(days=9, hours=1)).isoformat()}
    replace(FederationState.read(folder), certificates=ends).write(folder)
    assert "certificates/server.pem ends in 9 days: headstart deploy renew" in gallery.panels([])
    assert gallery.panels(["another"]) == ""
    (folder / "state" / "federation.json").write_text("{}")
    assert gallery.panels([]) == ""
    assert [status.id for status in gallery.statuses()] == ["run"]


def test_privacy_is_counted_while_the_run_goes_on(server: Server) -> None:
    run = server.folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "privacy" not in lines[0]
    spent = [line["privacy"]["epsilon"] for line in lines[1:]]
    assert spent == sorted(set(spent))
    assert spent[-1] == json.loads((run / "summary.json").read_text())["privacy"]["client"]["epsilon"]
    (run / "summary.json").unlink()  # as if it went on
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    assert f"<b>ε = {spent[1]:.3g}</b> <span class='soft'>δ = 0.001, after round 2; not of fedncm" in (
        Gallery([server.folder]).panels([])
    )


@pytest.mark.parametrize("target", ["classes", "regression"])
def test_the_tile_of_a_stage_has_more_than_accuracy(target: str, tmp_path: Path, no_report: None) -> None:
    x, y = load_digits(return_X_y=True)
    who, split = np.arange(len(y)) % 4, 2 * (np.arange(len(y)) % 5 == 0)
    np.savez(tmp_path / "a.npz", X=x, y=y + 0.5 if target == "regression" else y, client=who, split=split)
    table = {"data": {"dataset": str(tmp_path / "a.npz"), "partition": {"kind": "natural"}}}
    summary = headstart.run(
        {**table, "model": {"backbone": "features"}, "stages": [{"method": "fed3r"}]}, tmp_path / "run"
    ).summary
    shown = panel(Federation("f", FederationState("127.0.0.1", 9443), record=Record.read(tmp_path / "run")))
    text = (
        f"R² {summary['r2']:.4g}, mean absolute error {summary['mae']:.4g}"
        if target == "regression"
        else (
            f"accuracy {100 * summary['accuracy']:.2f} %, macro-F1 {100 * summary['macro_f1']:.2f} %, "
            f"balanced accuracy {100 * summary['balanced_accuracy']:.2f} %"
        )
    )
    assert f"<dt>stage 1 of 1</dt><dd><b>fed3r</b> <span class='soft'>{text}" in shown


def test_status_tells_the_same_in_a_terminal(server: Server) -> None:
    note(server, datetime.now(UTC), phase="running", run="run")
    said = CliRunner().invoke(cli.app, ["deploy", "status", str(server.folder)]).output
    a, b, c, gone = (re.sub(r"[ │]+", " ", line).strip() for line in said.splitlines() if line.startswith("│"))
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    up, down = map(human_bytes, moved(server)["a"])
    assert re.fullmatch(f"a missing since {when} {when} 5 {up} {down} {when}", a), a
    assert re.match(f"b present since {when} {when} 5 ", b), b
    assert re.match("c has never connected 3 ", c), c
    assert re.fullmatch(f"gone revoked 0 0 B 0 B {when} {when}", gone), gone
    assert "run: stage 2 of 2, fedavg: 5 of 5 rounds were played" in said
    assert re.search(rf"round 5 of stage 2 went on without a: absent since {when}: the node has left", said)


def test_a_name_that_is_a_script_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    state = FederationState("127.0.0.1", 9443, nodes=())
    replace(state, nodes=(NodeState(ATTACK),)).write(tmp_path / "f")
    with serving(tmp_path) as dashboard:
        status, page = ask(dashboard, "/federations")
        assert status == 200
        assert "&lt;script&gt;" in page
        assert "<script" not in page
        assert ask(dashboard, "/federations", Host="elsewhere.example")[0] == 403


def test_a_federation_of_scripts_shows_its_nodes(silos: Path, tmp_path: Path) -> None:  # noqa: F811
    init(tmp_path / "f", recipe_of(silos, {"method": "fedncm"}), ["a", "b"])
    panel = Gallery([tmp_path]).panels([])
    assert "<b>a</b>" in panel
    assert "the server has not been started" in panel
    assert Gallery([tmp_path / "f"]).statuses() == []  # its recipe is no run
