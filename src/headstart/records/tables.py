"""The CSV tables of a run: who took part in which round, what each client costs and gains, what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.core.files import append_text, csv_text, write_text
from headstart.core.ledger import Ledger
from headstart.core.statistics import Ints
from headstart.core.target import Target
from headstart.records.readers import read_rows

_MORE: dict[Target, tuple[str, ...]] = {
    "classes": ("train_examples", "test_examples", "macro_f1", "balanced_accuracy", "roc_auc", "calibration_error"),
    "regression": ("train_examples", "test_examples", "mae"),
    "multilabel": ("train_examples", "test_examples", "macro_f1", "roc_auc", "average_precision"),
}
"""Columns of `clients.csv` behind the costs."""
_ROUNDS = ("stage", "round", "client", "bytes_up", "bytes_down", "left_out")


class RunTables:
    """The tables of a run in its directory; `rounds.csv` grows, the others appear whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_round(self, stage: int, round: int, names: Sequence[str], ledger: Ledger) -> None:
        """Append who was sampled in a round (from 1), what each moved, and why one was excluded or absent, to
        `rounds.csv`."""
        path = self.path / "rounds.csv"
        rows: list[Sequence[Any]] = [] if path.exists() else [_ROUNDS]
        gone = [entry for entry in ledger.dropped if entry["round"] == round]
        why = {name: str(entry["why"]) for entry in gone for name in str(entry["clients"]).split(", ")}
        for client, up, down in ledger.latest:
            rows.append([stage, round, names[client], up, down, why.get(names[client], "")])
        rows += [[stage, round, name, 0, 0, why] for name, why in ledger.absences.items()]
        append_text(path, csv_text(rows))

    def rounds_until(self, stage: int, round: int) -> str | None:
        """`rounds.csv` with the rows up to a round of a stage; None where there is no such table."""
        path = self.path / "rounds.csv"
        if not path.exists():
            return None
        rows = [row for row in read_rows(path)[1:] if len(row) == len(_ROUNDS)]
        return csv_text([_ROUNDS, *(row for row in rows if (int(row[0]), int(row[1])) <= (stage, round))])

    def write_clients(
        self,
        stage: int,
        names: tuple[str, ...],
        ledger: Ledger,
        found: npt.NDArray[np.float64] | None,
        what: str,
        more: Mapping[str, npt.NDArray[Any]],
        target: Target = "classes",
    ) -> None:
        """Costs of every client after a stage, and how good the model is there, as rows of `clients.csv`.

        what: the accuracy, R² or the perplexity; more: other figures [K] by name, NaN where a client has none.
        """
        # A pooled stage has one client, and accuracies of those that pooled their examples.
        shown = [""] * len(names) if found is None or len(found) != len(names) else found.round(6).tolist()
        costs = zip(ledger.bytes_up, ledger.bytes_down, ledger.forward_passes, strict=True)
        others = {
            name: more[name] if len(more.get(name, ())) == len(names) else [np.nan] * len(names)
            for name in _MORE[target]
        }
        figures = zip(*others.values(), strict=True)
        self._write_stage(
            "clients.csv",
            ["stage", "client", what, "bytes_up", "bytes_down", "forward_passes", *others],
            stage,
            [
                [stage, name, right, *cost, *map(_figure, each)]
                for name, right, cost, each in zip(names, shown, costs, figures, strict=True)
            ],
        )

    def write_holdings(self, names: Sequence[str], classes: Sequence[str], counts: Ints) -> None:
        """Who holds how many training examples of which class [K, C], as rows of `holdings.csv`."""
        rows = [[names[client], classes[label], counts[client, label]] for client, label in np.argwhere(counts)]
        write_text(self.path / "holdings.csv", csv_text([["client", "class", "examples"], *rows]))

    def write_confusion(self, stage: int, classes: Sequence[str], labels: Ints, answers: Ints) -> None:
        """How often a class [n] was predicted as another [n] after a stage, as rows of `confusion.csv`."""
        pairs, found = np.unique(labels * len(classes) + answers, return_counts=True)
        named = [(classes[pair // len(classes)], classes[pair % len(classes)]) for pair in pairs]
        rows = [[stage, label, answer, count] for (label, answer), count in zip(named, found, strict=True)]
        self._write_stage("confusion.csv", ["stage", "class", "predicted as", "examples"], stage, rows)

    def write_samples(self, stage: int, round: int, rows: Sequence[Sequence[str]], task: str | None = None) -> None:
        """Prompts with the completions in the data and the model's after a round, as rows of `samples.csv`; task: whose
        they are, where there are several."""
        path = self.path / "samples.csv"
        there = read_rows(path, 2)[1:] if path.exists() else []
        about = [] if task is None else [task]

        def stays(row: Sequence[str]) -> bool:
            where = int(row[0]), int(row[1])
            return where < (stage, round) or (where == (stage, round) and bool(about) and row[2] != task)

        columns = ["stage", "round", *(["task"] if about else []), "prompt", "reference", "completion"]
        written = [[stage, round, *about, *row] for row in rows]
        write_text(path, csv_text([columns, *filter(stays, there), *written]))

    def _write_stage(self, name: str, columns: list[str], stage: int, rows: list[list[Any]]) -> None:
        """Put the rows of a stage after those of earlier stages; those that an interrupted run left behind go."""
        path = self.path / name
        there = read_rows(path, 1)[1:] if path.exists() else []
        before = [row for row in there if int(row[0]) < stage]
        write_text(path, csv_text([columns, *before, *rows]))


def _figure(value: float) -> str:
    """A figure of a client; nothing where it has none."""
    return "" if not np.isfinite(value) else str(int(value)) if value == int(value) else f"{value:.6g}"
