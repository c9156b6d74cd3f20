"""A run's model as files that other libraries read: `peft`, `transformers`, safetensors, or a whole graph."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
from safetensors.numpy import save_file

from headstart.engine.body import Module
from headstart.errors import HeadstartError
from headstart.export.model import Model
from headstart.files import write_json, write_text

if TYPE_CHECKING:  # torch is not needed where the data are features
    from headstart.export.graph import Format


def export(
    run: Path,
    out: Path,
    task: str | None = None,
    client: str | None = None,
    merge: bool = False,
    format: Format | None = None,
) -> list[str]:
    """Write a run's model as files that other libraries read into a new folder; their names.

    format: the whole model as one graph, instead of its parts; a LoRA is added to the body's weights then.
    """
    if format is not None:
        from headstart.export.graph import check_installed

        check_installed(format)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadstartError(f"--out {out}: already used; give another directory")
    model = Model.of(run, task, client)
    module = model.body.module()
    if merge and module is not None and module.kind != "lora":
        raise HeadstartError(f"--merge: only a lora can be added to the body's weights, and this is {module.kind}")
    out = out.resolve()
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        write_json(temporary / "classes.json", list(model.classes))
        if format is None:
            model.head.save(temporary / "head.safetensors")
            readme = _save_body(model, merge, temporary, out)
        else:
            from headstart.export.graph import save_graph

            if model.body.backbone is not None:
                _merge(model.body.backbone.core)
            readme = save_graph(model, format, temporary, out)
        write_text(temporary / "README.md", readme)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes private folders
        temporary.replace(out)
    except OSError as error:
        raise HeadstartError(f"--out {out}: cannot write there: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())


def _save_body(model: Model, merge: bool, folder: Path, out: Path) -> str:
    """Write body and module to ``folder``, which is going to be ``out``; the README that says how to load them."""
    from transformers import PreTrainedModel

    backbone, module = model.body.backbone, model.body.module()
    if backbone is None:
        return _readme(model, [], [], out)
    core: Any = backbone.core
    if merge:
        _merge(core)
        module = None
    table = model.recipe.model.model_dump(mode="json", exclude_none=True)
    files = []
    if isinstance(core, PreTrainedModel):
        is_lora, auto = (
            module is not None and module.kind == "lora",
            "AutoModelForMaskedLM" if model.cloze else "AutoModel",
        )
        base = str(core.name_or_path)
        if module is None or model.retrained:
            inside = "body" if is_lora else "."  # with the body beside it, transformers would load the adapter too
            _save_hugging_face(model, folder / inside)
            base = table["backbone"] = str(out / inside)
            table.pop("weights", None)
            files.append(f"`{'body/' if is_lora else 'config.json, model.safetensors'}`: the body, for transformers")
        code = [f"from transformers import {auto}", f"body = {auto}.from_pretrained({base!r})"]
        if module is not None and is_lora:
            _save_adapter(module, base, folder)
            files.append("`adapter_config.json, adapter_model.safetensors`: the LoRA, for peft")
            code += ["from peft import PeftModel", f"body = PeftModel.from_pretrained(body, {str(out)!r}).eval()"]
            module = None
    else:
        if module is None or model.retrained:
            save_file(dict(model.body.arrays()), folder / "model.safetensors")
            table["weights"] = str(out / "model.safetensors")
            files.append("`model.safetensors`: the body, to be named as model.weights in a recipe")
        code = ["from headstart.backbones import load_backbone", "from headstart.recipe import Model"]
        code.append(f"body = load_backbone(Model.model_validate({table!r})).body")
    if module is not None:
        arrays = {**module.values[0], **{f"head.{name}": array for name, array in model.head.arrays().items()}}
        facts = {"module": json.dumps({"kind": module.kind, **module.settings})}
        save_file(arrays, folder / "module.safetensors", metadata=facts)
        files.append(f"`module.safetensors`: the {module.kind} and the head, for headstart predict RUN INPUTS --module")
    return _readme(model, files, code, out, table)


def _readme(model: Model, files: list[str], code: list[str], out: Path, table: dict[str, Any] | None = None) -> str:
    """What is in the folder, code that loads it, and the model as a table of a recipe."""
    backbone, width = model.body.backbone, model.width
    reads = f"features [{width}] as they are in the data"
    if backbone is not None:
        pooling = getattr(backbone.body, "pooling", "") or getattr(backbone.body, "network", None)
        pooling = pooling if isinstance(pooling, str) else getattr(pooling, "pooling", "")
        whole = {"cls": "the first of the last hidden states", "mean": "the mean of the last hidden states"}
        how = "the state at the mask, before the vocabulary" if model.cloze else whole.get(pooling, "pooled features")
        layers = list(backbone.body.modules())
        by_batch = any(each.training or getattr(each, "running_mean", each) is None for each in layers)
        reads = f"{how} [{width}]" + (", batch norm by each batch's own statistics" if by_batch else "")
    lines = [
        f"# {model.recipe.name}",
        "",
        "- `head.safetensors`: weight [C, d], bias [C], and the temperature to divide scores by where it is not 1; a "
        "class whose bias is -inf is never predicted",
        "- `classes.json`: the names of the classes, in the order of the head's rows",
        *(f"- {file}" for file in files),
        "",
        "```python",
        *code,
        "import json",
        "from pathlib import Path",
        "from headstart.heads import LinearHead",
        f"head = LinearHead.load(Path({str(out / 'head.safetensors')!r}))",
        f"classes = json.loads(Path({str(out / 'classes.json')!r}).read_text(encoding='utf-8'))",
        "```",
        "",
        f"`head.scores(features)` is [n, C]; the features are {reads}.",
    ]
    if table is not None:
        lines += ["As the model of a recipe:", "", "```toml", tomli_w.dumps({"model": table}).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _merge(core: Any) -> None:
    """Add a LoRA to the weights; what the body computes stays the same."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in core.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.merge()


def _save_hugging_face(model: Model, folder: Path) -> None:
    """The body in the layout of `transformers`, with its tokenizer or what its images go through."""
    import transformers
    from transformers.utils.hub import cached_file

    from headstart.modules import plain_state

    backbone = model.body.backbone
    assert backbone is not None
    core: Any = backbone.core
    place, state = core.name_or_path, plain_state(core)
    if model.cloze:  # its vocabulary was cut off, and no stage has changed it
        core = transformers.AutoModelForMaskedLM.from_pretrained(place, use_safetensors=True)
        core.load_state_dict(state, strict=False)
        state = core.state_dict()
    core.save_pretrained(folder, state_dict=state)
    if backbone.kind == "text":
        backbone.transform.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    for name in ("preprocessor_config.json", "1_Pooling/config.json"):
        found = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
        if found:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(found, folder / name)


def _save_adapter(module: Module, base: str, folder: Path) -> None:
    """A LoRA in the layout of `peft`."""
    from peft import LoraConfig

    scale: Any = module.settings["alpha_lora"]
    config = LoraConfig(
        r=module.settings["rank"],
        lora_alpha=scale,
        target_modules=sorted({name.partition(".lora_")[0] for name in module.values[0]}),
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    arrays = {f"base_model.model.{name}": np.ascontiguousarray(array) for name, array in module.values[0].items()}
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
