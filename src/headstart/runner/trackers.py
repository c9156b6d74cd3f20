"""The evaluations of a run, logged to TensorBoard, MLflow or Weights & Biases while it goes on.

Every number of a line of `metrics.jsonl` is logged under its name, those of tasks as `tasks/NAME/accuracy`, against the
rounds of all stages, counted on. A resumed run goes on in the same log, with one point at each step.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from headstart.config.recipe import Recipe
from headstart.core.files import write_json
from headstart.errors import HeadstartError, first_line, nearest
from headstart.records import RunDirectory
from headstart.runner import OnMetrics

Name = Literal["tensorboard", "mlflow", "wandb"]

_PROJECT = "headstart"
_BATCH = 100  # parameters that MLflow takes at once


@contextmanager
def trackers(names: Sequence[Name], recipe: Recipe, out: Path) -> Iterator[OnMetrics]:
    """Several trackers at once, as one callback."""
    with ExitStack() as stack:
        loggers = [stack.enter_context(tracker(name, recipe, out)) for name in dict.fromkeys(names)]
        yield lambda line: [logger(line) for logger in loggers]


@contextmanager
def tracker(name: Name, recipe: Recipe, out: Path) -> Iterator[OnMetrics]:
    """A callback for the ``on_metrics`` of a run of ``recipe`` into ``out``, which is to hold the log as well.

    A missing package is an error at once. Whatever else fails does not spoil the run: it is reported once on standard
    error, and the run goes on without this log.
    """
    if name not in _TRACKERS:
        raise HeadstartError(f"--log: {name!r} is not known; {nearest(name, _TRACKERS)}")
    packages, opened = _TRACKERS[name]
    # A folder of logs in the working directory passes for a package, of no origin.
    missing = [package for package in packages if (spec := find_spec(package)) is None or spec.origin is None]
    if missing:
        raise HeadstartError(f"--log {name} needs {', '.join(missing)}; pip install 'headstart[{name}]'")
    follower = _Follower(name, recipe, out, opened)
    try:
        yield follower.tell
    except BaseException:
        follower.close(None)
        raise
    follower.close(RunDirectory(out).summary() or {})


def numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of an evaluation by name; what is nested is named by its path."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + key] = value
    return found


class Steps:
    """Steps of evaluations: rounds, counted on from stage to stage, and one for a look before a stage's first round."""

    def __init__(self) -> None:
        self._stage, self._before, self._last = -1, 0, 0

    def __call__(self, line: Mapping[str, Any]) -> int:
        """The step of the next line."""
        if line["stage"] != self._stage:
            self._stage, self._before = line["stage"], self._last + (line["round"] == 0)
        self._last = self._before + int(line["round"])
        return self._last


class _Log(Protocol):
    """An open log."""

    def tell(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers at a step."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The end; without a summary where the run was interrupted."""


class _Follower:
    """Hands the lines of a run on to a log, which the first line opens: a run wants its directory empty."""

    def __init__(self, name: str, recipe: Recipe, out: Path, opened: Callable[[Recipe, Path, int], _Log]) -> None:
        self.name, self.recipe, self.out, self.opened = name, recipe, out, opened
        self.steps: Steps | None = None
        self.log: _Log | None = None
        self.failed = False

    def tell(self, line: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        self._safely(lambda: self._tell(line))

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The run is finished, or was interrupted."""
        if (log := self.log) is not None:
            self._safely(lambda: log.close(summary))

    def _tell(self, line: Mapping[str, Any]) -> None:
        if self.steps is None:
            self.steps = Steps()
            for earlier in RunDirectory(self.out).metrics():
                if (earlier["stage"], earlier["round"]) < (line["stage"], line["round"]):
                    self.steps(earlier)
        step = self.steps(line)
        if self.log is None:
            self.log = self.opened(self.recipe, self.out, step)
        self.log.tell(numbers(line), step)

    def _safely(self, action: Callable[[], object]) -> None:
        if self.failed:
            return
        try:
            action()
        except Exception as error:  # a full disk, a server that is gone: libraries raise what they like
            self.failed = True
            logging.getLogger("headstart").warning(
                f"--log {self.name} failed: {first_line(error)}; the run continues without it"
            )


# ------------------------------------------------------------------------------------------------------- the three logs


class _TensorBoard:
    """Event files in OUT/tensorboard."""

    def __init__(self, recipe: Recipe, out: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, self.step = out / "tensorboard", step
        resumed = folder.exists()
        self.writer: Any = SummaryWriter(str(folder), purge_step=step if resumed else None)
        if not resumed:
            self.writer.add_text("recipe", _block(recipe.to_toml()), 0)

    def tell(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()
        self.step = step

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary:
            self.writer.add_text("summary", _block(json.dumps(summary, indent=2)), self.step)
        self.writer.close()


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class _MLflow:
    """A run of MLflow: in the database OUT/mlflow/mlflow.db, or where MLFLOW_TRACKING_URI says."""

    def __init__(self, recipe: Recipe, out: Path, step: int) -> None:
        folder = (out / "mlflow").resolve()
        folder.mkdir(exist_ok=True)
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        from mlflow.tracking import MlflowClient

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.client: Any = MlflowClient(uri)
        kept, self.logged = folder / "run.json", set[int]()
        if kept.is_file():
            self.run = json.loads(kept.read_text(encoding="utf-8"))["run"]
            self.client.update_run(self.run, status="RUNNING")
            # What came after the checkpoint is computed again, to the same numbers.
            self.logged = {point.step for point in self.client.get_metric_history(self.run, "round")}
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name, artifact_location=artifacts)
        self.run = self.client.create_run(experiment, run_name=recipe.name).info.run_id
        write_json(kept, {"run": self.run})
        from mlflow.entities import Param

        settings = [Param(key, str(value)) for key, value in recipe.settings().items()]
        for start in range(0, len(settings), _BATCH):
            self.client.log_batch(self.run, params=settings[start : start + _BATCH])

    def tell(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        if step not in self.logged:
            now = int(time.time() * 1000)
            plain = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers.items()}
            self.client.log_batch(self.run, [Metric(name, value, now, step) for name, value in plain.items()])

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary:
            self.client.log_dict(self.run, dict(summary), "summary.json")
        self.client.set_terminated(self.run, "FINISHED" if summary is not None else "FAILED")


class _Wandb:
    """A run of Weights & Biases, with its files in OUT/wandb; WANDB_MODE and its like are heeded."""

    def __init__(self, recipe: Recipe, out: Path, step: int) -> None:
        offline = os.environ.get("WANDB_MODE") in ("offline", "disabled")
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        (out / "wandb").mkdir(exist_ok=True)
        self.kept = out / "wandb" / "run.json"
        self.state: dict[str, Any] = {"run": uuid.uuid4().hex[:8], "step": 0}
        if self.kept.is_file():
            self.state = json.loads(self.kept.read_text(encoding="utf-8"))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=recipe.name,
            id=self.state["run"],
            resume=None if offline else "allow",
            dir=out,
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),  # what a run prints stays where it is
        )

    def tell(self, numbers: Mapping[str, float], step: int) -> None:
        if step > self.state["step"]:  # it takes no step back: what came after the checkpoint is there already
            self.run.log(dict(numbers), step=step, commit=True)
            self.state["step"] = step
            write_json(self.kept, self.state)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary:
            self.run.summary["run"] = dict(summary)
        self.run.finish(exit_code=0 if summary is not None else 1)


_TRACKERS: Mapping[str, tuple[tuple[str, ...], Callable[[Recipe, Path, int], _Log]]] = {
    "tensorboard": (("tensorboard",), _TensorBoard),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), _MLflow),
    "wandb": (("wandb",), _Wandb),
}
