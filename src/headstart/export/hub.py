"""A finished run's model on the Hugging Face hub, with a card: what was trained, by how many clients, what it spent."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError

from headstart.core.files import write_text
from headstart.errors import HeadstartError, first_line
from headstart.export.files import export
from headstart.export.model import Model
from headstart.report import human_bytes, markdown, metric_cell, metric_heading, metrics_of

_PIPELINES = {"text": "text-classification", "image": "image-classification"}
# The hub's names of metrics, and ours.
_MEASURED = {
    "accuracy": "accuracy", "f1": "macro_f1", "r_squared": "r2", "mae": "mae", "roc_auc": "roc_auc",
    "average_precision": "average_precision",
}  # fmt: skip


def push(
    run: Path,
    repo: str,
    task: str | None = None,
    client: str | None = None,
    merge: bool = False,
    private: bool = False,
    api: HfApi | None = None,
) -> str:
    """Export a run's model, put a card before its README, and upload all of it to a repository; its address.

    The repository is made where it is not there. Who may write to it is known from `hf auth login` or HF_TOKEN.
    """
    api = api or HfApi()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export(run, folder, task, client, merge)
        readme = folder / "README.md"
        write_text(readme, card(run, readme.read_text(encoding="utf-8"), task, client))
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model of headstart")
        except HFValidationError as error:
            raise HeadstartError(f"{repo!r} does not name a repository, as USER/NAME: {first_line(error)}") from None
        except Exception as error:  # the hub's client raises many kinds; all mean that it did not take the files
            raise HeadstartError(
                f"cannot upload to {repo}: {first_line(error)}; hf auth login says who you are"
            ) from None
    return f"{api.endpoint}/{repo}"


def card(run: Path, readme: str, task: str | None = None, client: str | None = None) -> str:
    """A model card: metadata, what was trained and on whom, what privacy it spent, how good it is; then the README."""
    model = Model.load(run, task, client)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    stages, recipe = summary["stages"], model.recipe
    # A hub id is public; of a path, the name is enough.
    dataset = model.data.dataset if model.data.dataset.count("/") == 1 else PurePath(model.data.dataset).name
    kind = _PIPELINES.get(model.kind) if model.target == "classes" else None
    kind = "text-generation" if model.store.generates else kind
    named = "classes" if model.target == "classes" else "targets"
    learned = "" if model.store.generates else f", {summary['classes']} {named}"
    measured = {metric: summary.get(name) for metric, name in _MEASURED.items()} if client is None else {}
    facts = ModelCardData(
        library_name="headstart",
        tags=["federated-learning", *dict.fromkeys(stage["method"] for stage in stages)],
        pipeline_tag=kind,
        base_model=recipe.model.backbone.removeprefix("hf/") if recipe.model.backbone.startswith("hf/") else None,
        model_name=recipe.name,
        eval_results=[
            EvalResult(kind or "other", dataset, dataset, metric, value)
            for metric, value in measured.items()
            if value is not None
        ],
    )
    metrics = metrics_of(stages)
    columns = ("stage", "rounds", *map(metric_heading, metrics), "test examples", "bytes sent by clients")
    rows = [
        (
            *(stage["method"], str(stage["rounds"])),
            *(metric_cell(name, [stage]) for name in metrics),
            *(str(stage.get("test_examples", "")), human_bytes(stage["bytes_up"])),
        )
        for stage in stages
    ]
    whose = f" This is the model of one of them, {client}." if client is not None else ""
    lines = [
        "---",
        facts.to_yaml(),
        "---",
        "",
        readme.split("\n", 1)[0],  # the title
        "",
        f"Trained by federated learning: {summary['clients']:,} clients held {summary['examples']:,} training examples "
        f"of {dataset}{learned}; the backbone is "
        f"{PurePath(recipe.model.backbone).name}.{whose}",
        "",
        markdown(columns, rows).rstrip(),
        "",
        _privacy(summary),
        "",
        "## Use",
        readme.split("\n", 1)[1],
    ]
    return "\n".join(lines)


def _privacy(summary: dict[str, Any]) -> str:
    """What privacy the run has spent, in a sentence."""
    spent: dict[str, Any] = dict(summary.get("privacy", {}))
    spent.pop("uncovered", None)
    if not spent:
        return "No differential privacy was asked for: the model may tell of single examples."
    units = [
        f"any one {unit}: ε = {e['epsilon']:.3g}, δ = {e['delta']:.1g}"
        + (f", but for what {', '.join(e['uncovered'])} tells" if e["uncovered"] else "")
        for unit, e in spent.items()
    ]
    return f"Differential privacy of {'; of '.join(units)}."
