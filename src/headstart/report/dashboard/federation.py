"""The panel of a federation: who is there, how far it has come, who participated in which round, and what it has cost.

Times are filled in by the page, so that the panel changes only when the federation does. All text is escaped: names and
reasons come from nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from pathlib import Path

from headstart.core.metrics import SHOWN
from headstart.records import FederationState, NodeState, Record, RoundsLog
from headstart.records.federation import moment
from headstart.records.rounds import outcome
from headstart.report import html_table, human_bytes
from headstart.report.tables import metric_text

SOON = 30
"""Days before its end from which a certificate is spoken of."""
_LISTED = 12  # absences that are listed, each of one or several rounds in a row
_DOTS = {"waiting": "late", "running": "present", "finished": "present", "failed": "excluded", "stopped": "excluded"}
_PHASES = {"": "the server has not been started", "waiting": "waiting for nodes"}
_OUTCOMES = ("participated", "late", "excluded", "absent", "not sampled")


@dataclass(frozen=True)
class Federation:
    """All that a panel shows."""

    name: str
    state: FederationState
    id: str = ""
    """Of its run in the page."""
    record: Record | None = None
    running: bool = False
    """Whether a process runs in the run directory now."""
    log: RoundsLog = field(default_factory=lambda: RoundsLog(Path()))

    @property
    def phase(self) -> str:
        """What it does; a run may go on without `headstart server`."""
        return "running" if self.running else self.state.phase

    @property
    def names(self) -> list[str]:
        """Everybody that was admitted or has taken part, once, those that were revoked last."""
        nodes = sorted(self.state.nodes, key=lambda node: bool(node.revoked))
        clients = [client for row in self.log.rounds.values() for client in row]
        return list(dict.fromkeys([*(node.name for node in nodes), *clients]))

    def where(self) -> tuple[int, int, int]:
        """The stage under way (from 0), rounds of it that were played, and how many it has."""
        assert self.record is not None
        count = max(1, len(self.state.admitted))
        rounds = [stage.rounds_for(count) for stage in self.record.recipe.stages]
        stage, played = self.log.where(rounds, self.record.evaluated)
        return stage, played, rounds[stage]


def panel(federation: Federation) -> str:
    """The panel as HTML."""
    state, log = federation.state, federation.log
    parts = [_title(federation), *map(_warning, _warnings(state)), _tiles(federation)]
    names = federation.names
    if not names:
        parts.append("<p class='soft'>No node is admitted yet: headstart deploy add FOLDER NAME.request</p>")
    else:
        parts.append(_members(federation, names))
    if log.rounds:
        parts += [_timeline(federation, names), _absences(federation)]
    return f'<section class="federation">{"".join(parts)}</section>'


def _title(federation: Federation) -> str:
    state = federation.state
    dot = _DOTS.get(federation.phase, "unknown")
    phase, place = _PHASES.get(federation.phase, federation.phase), f"{state.host}:{state.port}"
    if (days := _days(state).get("server", -1)) >= 0:
        place += f" · certificate: {days} days left"
    text = f"<b>{escape(phase)}</b> <span class='soft'>at {escape(place)}</span>"
    return f"<header><h1>{_dot(dot)}{escape(federation.name)}</h1><p>{text}</p></header>"


def _dot(kind: str) -> str:
    return f'<i class="dot {kind}" aria-hidden="true"></i>'


def _warning(text: str) -> str:
    return f"<p class='warning'>{escape(text)}</p>"


def _warnings(state: FederationState) -> list[str]:
    found = [state.reason] if state.reason else []
    if state.phase in ("waiting", "running") and not state.live:
        found.append(f"headstart server has not written since {_when(state.written)}: who is there now is not known")
    for name, days in _days(state).items():
        if days < SOON:
            text = f"ends in {days} days" if days >= 0 else "has ended"
            how = "headstart deploy renew signs a new one" if name == "server" else "make a new folder and new kits"
            found.append(f"certificates/{name}.pem {text}: {how}")
    return found


def _days(state: FederationState) -> dict[str, int]:
    """Days until each certificate ends."""
    return {name: (moment(end) - datetime.now(UTC)).days for name, end in state.certificates.items()}


# -------------------------------------------------------------------------------------------------------------- tiles


def _tiles(federation: Federation) -> str:
    state, log = federation.state, federation.log
    nodes = state.admitted
    there = sum(bool(node.present) for node in nodes)
    tiles = [
        _tile("nodes", *((f"{there} of {len(nodes)}", "present") if state.live else (str(len(nodes)), "admitted")))
    ]
    if federation.record is not None:
        tiles += _progress_tiles(federation, federation.record)
    if log.rounds:
        up, down = sum(log.bytes_up.values()), sum(log.bytes_down.values())
        tiles.append(_tile("bytes", f"↑ {human_bytes(up)}", f"↓ {human_bytes(down)}"))
    if federation.record is not None:
        tiles += _privacy_tiles(federation.record)
    return f"<dl class='tiles'>{''.join(tiles)}</dl>"


def _tile(name: str, figure: str, about: str, more: str = "") -> str:
    text = f"<b>{escape(figure)}</b> <span class='soft'>{escape(about)}</span>{more}"
    return f"<div><dt>{escape(name)}</dt><dd>{text}</dd></div>"


def _progress_tiles(federation: Federation, record: Record) -> list[str]:
    stage, done, rounds = federation.where()
    stages = record.recipe.stages
    tested = [line for line in record.metrics if line["stage"] == stage][-1:]
    text = [metric_text(name, line) for line in tested for name in SHOWN if line.get(name) is not None]
    now = min(done + federation.running, rounds)
    bar = f'<progress max="{rounds}" value="{done}"></progress>'
    left = f'<span class="soft" data-left="{escape(federation.id)}"></span>' if federation.running else ""
    return [
        _tile(f"stage {stage + 1} of {len(stages)}", stages[stage].method, ", ".join(text)),
        _tile("round", str(now), f"of {rounds}", bar + left),
    ]


def _privacy_tiles(record: Record) -> list[str]:
    """What was spent, of every unit; after which round, where the run goes on from there."""
    spent, tiles = record.privacy, []
    last = f", after round {record.metrics[-1]['round']}" if record.summary is None and record.metrics else ""
    for unit in ("example", "client"):
        if unit in spent:
            others = spent[unit]["uncovered"]
            figure = f"ε = {spent[unit]['epsilon']:.3g}"
            about = f"δ = {spent[unit]['delta']:.1g}{last}" + (f"; not of {', '.join(others)}" if others else "")
            tiles.append(_tile(f"privacy spent, of any {unit}", figure, about))
    return tiles


# -------------------------------------------------------------------------------------------------------------- nodes


def _members(federation: Federation, names: Sequence[str]) -> str:
    log = federation.log
    most = max([*log.bytes_up.values(), *log.bytes_down.values(), 1])
    nodes = {node.name: node for node in sorted(federation.state.nodes, key=lambda node: not node.revoked)}
    rows = []
    for name in names:
        node = nodes.get(name, NodeState(name))
        kind, text = _presence(node, federation.state.live)
        seen = f"last seen {_ago(node.seen)}" if node.seen else ""
        moved = "".join(_bar(arrow, each[name], most) for arrow, each in (("↑", log.bytes_up), ("↓", log.bytes_down)))
        asked = name in log.bytes_up
        shares = f"participated in {log.taken[name]:,} rounds" if asked else ""
        rows.append(
            f"<li>{_dot(kind)}<div><b>{escape(name)}</b><span>{text}</span></div>"
            f"<div class='soft'><span>{seen}</span><span>{shares}</span></div>"
            f"<div class='moved'>{moved if asked else ''}</div></li>"
        )
    return f"<ul class='members'>{''.join(rows)}</ul>"


def _presence(node: NodeState, live: bool) -> tuple[str, str]:
    """How a node's dot looks, and its description; live: whether a server looks who is there."""
    if node.revoked:
        return "revoked", f"revoked {_ago(node.revoked)}"
    if node.present is None:
        return "unknown", f"admitted {_ago(node.admitted)}" if node.admitted else "not admitted"
    if not live:
        return "unknown", "was present at last" if node.present else "was missing at last"
    if node.present:
        return "present", f"present, since {_ago(node.since)}"
    return "excluded", f"missing, since {_ago(node.since)}" if node.since else "has never connected"


def _ago(time: str) -> str:
    """A time, which the page turns into how long ago that was."""
    when = moment(time)
    shown = _when(time)
    return f'<time data-ago="{when.timestamp():.0f}" title="{shown}">{shown}</time>'


def _bar(arrow: str, count: int, most: int) -> str:
    width = f"{100 * count / most:.1f}%"
    return f"<span>{arrow} {human_bytes(count)}</span><i><i style='width:{width}'></i></i>"


# ----------------------------------------------------------------------------------------------------------- timeline


def _timeline(federation: Federation, names: Sequence[str]) -> str:
    """Rounds by nodes: what became of each node in each round."""
    log, record = federation.log, federation.record
    rounds = list(log.rounds)
    heads = []
    for stage, group in groupby(rounds, key=lambda each: each[0]):
        numbers = [number for _, number in group]
        method = record.recipe.stages[stage].method if record is not None else f"stage {stage + 1}"
        span = _span(numbers[0], numbers[-1])
        heads.append(f'<th colspan="{len(numbers)}">{escape(method)}<small>{span}</small></th>')
    rows = []
    for name in names:
        cells = [_cell(name, *each, log.rounds[each].get(name)) for each in rounds]
        rows.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    legend = "".join(f"<span><i class='cell {kind.replace(' ', '-')}'></i>{kind}</span>" for kind in _OUTCOMES)
    return (
        f"<h2>Rounds</h2><div class='legend'>{legend}</div><div class='scroll timeline'><table><thead><tr><th></th>"
        f"{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(name: str, stage: int, number: int, why: str | None) -> str:
    kind = "not sampled" if why is None else outcome(why)
    text = f"{name}, round {number} of stage {stage + 1}: {why or kind}"
    return f'<td title="{escape(text)}"><i class="cell {kind.replace(" ", "-")}"></i></td>'


def _absences(federation: Federation) -> str:
    log = federation.log
    if not log.dropped:
        return ""
    spans: dict[tuple[int, str, str, int], int] = {}  # the last round of each, by how it began
    begun: dict[tuple[int, str, str], int] = {}
    for each in log.absences:
        key = each.stage, each.client, each.why
        first = begun.get(key, each.round)
        if spans.get((*key, first)) != each.round - 1:
            first = begun[key] = each.round
        spans[*key, first] = each.round
    shown = sorted(spans.items(), key=lambda span: (span[0][0], span[1]), reverse=True)[:_LISTED]
    rows = [[str(stage + 1), _span(first, last), client, why] for (stage, client, why, first), last in shown]
    times = "once" if log.dropped == 1 else f"{log.dropped:,} times"
    table = html_table(("stage", "round", "node", "why"), rows)
    return f"<details open><summary>Late, excluded or absent {times}</summary>{table}</details>"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


# ----------------------------------------------------------------------------------------------------------- terminal

STATUS = ("node", "state", "last seen", "rounds", "bytes up", "bytes down", "admitted", "revoked")
"""Columns of `status_rows`."""


def status_rows(federation: Federation) -> list[list[str]]:
    """The nodes of a federation, under `STATUS`."""
    log, rows = federation.log, []
    for node in federation.state.nodes:
        kind = "present" if node.present else "missing" if node.since else "has never connected"
        state = f"{kind} since {_when(node.since)}" if node.since else kind
        if node.revoked:
            state = "revoked"
        elif not federation.state.live:
            state = "not known"
        moved = [human_bytes(each[node.name]) for each in (log.bytes_up, log.bytes_down)]
        dates = [_when(node.seen), str(log.taken[node.name]), *moved, _when(node.admitted), _when(node.revoked)]
        rows.append([node.name, state, *dates])
    return rows


def status_lines(federation: Federation) -> list[str]:
    """What the server does, how far its run has come, and who did not count in the last round."""
    found = [_PHASES.get(federation.phase, f"the server: {federation.phase}"), *_warnings(federation.state)]
    if federation.record is not None:
        stage, played, rounds = federation.where()
        stages = federation.record.recipe.stages
        method = f"stage {stage + 1} of {len(stages)}, {stages[stage].method}"
        found.append(f"{federation.id}: {method}: {played} of {rounds} rounds were played")
    last = next(reversed(federation.log.rounds), None)
    for client, why in (federation.log.rounds[last] if last else {}).items():
        if why:
            found.append(f"round {last[1]} of stage {last[0] + 1} went on without {client}: {why}")  # type: ignore[index]
    return found


def _when(time: str) -> str:
    return f"{moment(time):%Y-%m-%d %H:%M:%S}" if time else ""
