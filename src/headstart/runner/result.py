"""What a run found, in Python: figures, the head, tables for notebooks; from the run itself or from its directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.errors import HeadstartError
from headstart.heads import LinearHead
from headstart.records import Record
from headstart.report import SUMMARY_COLUMNS, html_table, human_bytes, quality, score, stage_cells

if TYPE_CHECKING:
    import pandas


@dataclass(eq=False, repr=False)
class Result:
    """What a run found: its recipe, the summary as it is saved, the final head, and every evaluation."""

    recipe: Recipe
    summary: dict[str, Any]
    head: LinearHead
    """Of the first task, where there are several."""
    metrics: list[dict[str, Any]]
    """The lines of `metrics.jsonl`."""
    out: Path | None
    """The run directory, where there is one."""
    _federation: Federation | None = field(default=None)

    @classmethod
    def load(cls, run: Path | str) -> Result:
        """The result of a finished run, from its directory."""
        record = Record.read(Path(run))
        if record.summary is None:
            raise HeadstartError(
                f"the run in {run} is not finished; continue it with headstart run --resume --out {run}"
            )
        heads = record.path / "model"
        first = heads / (
            f"head-{record.recipe.task_names[0]}.safetensors" if record.recipe.tasks else "head.safetensors"
        )
        try:
            head = LinearHead.load(first)
        except (OSError, SafetensorError, KeyError) as error:
            anew = f"remove {record.path / 'summary.json'} and resume the run, which writes it anew"
            what = "put it back from a copy" if "updates" in record.summary else anew
            raise HeadstartError(f"cannot read {first}: {error}; {what}") from None
        return cls(record.recipe, record.summary, head, record.metrics, record.path)

    @property
    def accuracy(self) -> float | None:
        """Of the last stage on its split, between 0 and 1; None where nobody has tested, or there are no classes."""
        found: float | None = self.summary["accuracy"]
        return found

    @property
    def federation(self) -> Federation:
        """The clients and their examples; of a loaded result, they are read again as the recipe says."""
        if self._federation is None:
            self._federation = Federation.of(self.recipe)
        return self._federation

    def to_frame(self) -> pandas.DataFrame:
        """A row for every evaluation, with the columns of `metrics.jsonl`; those of tasks are called `tasks.NAME.…`."""
        import pandas

        return pandas.json_normalize(self.metrics)

    def __repr__(self) -> str:
        summary, last = self.summary, self.summary["stages"][-1]
        where = f", in {self.out}" if self.out else ""
        return (
            f"<Result {summary['name']}: {last['method']} {score(summary)}, {summary['clients']:,} clients, "
            f"{human_bytes(summary['bytes_up'])} up{where}>"
        )

    def _repr_html_(self) -> str:
        """A table of the stages, and the metrics beside it, for notebooks."""
        stages = self.summary["stages"]
        lines = "".join(f"<p>{escape(line)}</p>" for stage in stages if (line := quality(stage)))
        return html_table(SUMMARY_COLUMNS, [stage_cells(stage) for stage in stages]) + lines
