"""A run's model as files that other libraries read: `peft`, `transformers`, safetensors, or a whole graph."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tomli_w
from safetensors import SafetensorError

from headstart.core.files import rename_folder, save_arrays, write_json, write_text
from headstart.engine.model_store import Module
from headstart.errors import HeadstartError
from headstart.export.model import Model
from headstart.export.whole import AUTO, EXAMPLE_IMAGE, NAMED, PREDICTED, copy_settings, pooling_of, save_whole

if TYPE_CHECKING:  # torch is not needed where the data are features
    from headstart.export.graph import Format


def export(
    run: Path,
    out: Path,
    task: str | None = None,
    client: str | None = None,
    merge: bool = False,
    format: Format | Literal["gguf"] | None = None,
) -> list[str]:
    """Write a run's model as files that other libraries read into a new folder; their names.

    format: the whole model as one graph, or as a GGUF file, instead of its parts; a LoRA is added to the weights then.
    """
    if format is not None and format != "gguf":
        from headstart.export.graph import check_installed

        check_installed(format)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HeadstartError(f"--out {out}: already used; give another directory")
    model = Model.load(run, task, client)
    module = model.store.module
    if merge and module is not None and module.kind != "lora":
        raise HeadstartError(f"--merge: only a lora can be added to the backbone's weights, and this is {module.kind}")
    if (merge or format is not None) and model.recipe.model.quantise:
        raise HeadstartError(
            f"{'--merge' if merge else f'--format {format}'}: a backbone of few bits cannot take a lora in, nor become "
            "a graph, without being rounded again; leave it out"
        )
    out = out.resolve()
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        if not model.store.generates:  # which has neither classes nor a head
            write_json(temporary / "classes.json", list(model.classes))
        if format is None:
            if not model.store.generates:
                model.head.save(temporary / "head.safetensors")
            readme = _save_body(model, merge, temporary)
        else:
            if model.store.backbone is not None:
                _merge(model.store.backbone.core)
            readme = _save_file(model, format, temporary)
        write_text(temporary / "README.md", readme)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes private folders
        rename_folder(temporary, out)
    except (OSError, SafetensorError) as error:  # the latter where transformers writes
        raise HeadstartError(f"--out {out}: cannot write there: {getattr(error, 'strerror', None) or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())


def _save_file(model: Model, format: Format | Literal["gguf"], folder: Path) -> str:
    if format == "gguf":
        from headstart.export.gguf_file import save_gguf

        return save_gguf(model, folder)
    from headstart.export.graph import save_graph

    return save_graph(model, format, folder)


def _save_body(model: Model, merge: bool, folder: Path) -> str:
    """Write body and module to ``folder``; the README that says how to load them from within it."""
    from transformers import PreTrainedModel

    backbone, module = model.store.backbone, model.store.module
    if backbone is None:
        return _readme(
            model, [], ["import numpy as np"], use=_use_features(model, f"np.zeros((1, {model.width}))  # yours")
        )
    core: Any = backbone.core
    if merge:
        _merge(core)
        module = None
    apart = None if module is None else _MODULES[module.kind]
    changed = model.recipe.model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    table = {"backbone": model.recipe.model.backbone, **changed}
    files, code, use, whole, encoder = [], [], [], list[str](), ""
    # What `transformers` alone would not do: round the weights, or put texts into a prompt.
    ours = not model.speaks and bool(model.recipe.model.quantise or model.recipe.model.prompt)
    is_lora = module is not None and module.kind == "lora" and not ours
    if isinstance(core, PreTrainedModel):
        auto = model.auto
        # What is on another machine too need not be brought along.
        if module is None or model.retrained or model.speaks or Path(table["backbone"]).expanduser().is_absolute():
            _save_hugging_face(model, folder / "body")
            table["backbone"] = "body"
            table.pop("weights", None)
            files.append("`body/`: the backbone, for transformers, and for a recipe")
            code = [] if ours else [f"from transformers import {auto}", f'body = {auto}.from_pretrained("body")']
        if not model.speaks and (module is None or is_lora) and not (backbone.by_batch or ours):
            saved = save_whole(model, folder, is_lora)
            files.append(saved.line)
            whole, encoder = saved.code, saved.encoder
            code = saved.body if is_lora else code
        if module is not None and is_lora:
            _save_adapter(module, auto if model.speaks else AUTO[model.kind], encoder, folder)
            files.append("`adapter_config.json, adapter_model.safetensors`: the LoRA, for peft")
            if model.speaks:
                code += ["from peft import PeftModel", 'body = PeftModel.from_pretrained(body, ".").eval()']
            module = None
    elif module is None or model.retrained:
        save_arrays(folder / "model.safetensors", model.store.arrays())
        table["weights"] = "model.safetensors"
        files.append("`model.safetensors`: the backbone, to be named as model.weights in a recipe")
    if not code:
        code = ["from headstart.backbones import load_backbone", "from headstart.config.recipe import Model"]
        code += [f"backbone = load_backbone(Model.model_validate({table!r}))", "body = backbone.body"]
        if module is None:
            given = '"a text of yours"' if model.kind == "text" else '{"path": "one.png", "bytes": None}'
            made = f"body(*backbone.transform.collate([backbone.transform({given}, 'one')])).numpy()"
            code += [] if model.kind == "text" else ["from PIL import Image", *EXAMPLE_IMAGE]
            use = _use_features(model, made)
    if module is not None:
        arrays = {**module.values[0], **{f"head.{name}": array for name, array in model.head.arrays().items()}}
        facts = {"module": json.dumps({"kind": module.kind, **module.settings})}
        save_arrays(folder / "module.safetensors", arrays, facts)
        parts = f"the {apart}" + ("" if model.store.generates else " and the head")
        files.append(f"`module.safetensors`: {parts}, for headstart predict RUN INPUTS --module")
    if model.store.generates:
        return _readme_of_completions(model, files, code, _as_recipe(model, table, apart), apart if module else None)
    return _readme(model, files, code, _as_recipe(model, table, apart), use, whole)


def _use_features(model: Model, features: str) -> list[str]:
    """Lines that predict from features [n, d]."""
    return [f"features = {features}", f"print({PREDICTED[model.target].format('head.scores(features)')})"]


def _readme(
    model: Model,
    files: list[str],
    code: list[str],
    recipe: Sequence[str] = (),
    use: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> str:
    """What is in the folder, code that loads it and predicts with it, and the model as a table of a recipe.

    recipe: that table, with its sentence; whole: code that needs no headstart, where the whole model is a file of other
    libraries.
    """
    backbone, width = model.store.backbone, model.width
    reads = f"features [{width}] as they are in the data"
    if backbone is not None:
        which = {"cls": "the first of", "mean": "the mean of", "last": "the last real token's of"}.get(
            pooling_of(model)
        )
        how = f"{which} the last hidden states" if which else "pooled features"
        how = "the state at the mask, before the vocabulary" if model.cloze else how
        chooses = model.speaks and not model.cloze
        how = "the log-likelihoods of the label words after the prompt" if chooses else how
        reads = f"{how} [{width}]"
        reads += ", batch norm by each batch's own statistics" if backbone.by_batch else ""
    lines = [
        f"# {model.recipe.name}",
        "",
        f"- `head.safetensors`: weight [C, d], bias [C]{_WEIGHTS if model.target == 'classes' else ''}",
        f"- `classes.json`: the names of the {NAMED[model.target]}, in the order of the head's rows",
        *(f"- {file}" for file in files),
        "",
        "From within this folder:",
        "",
        *(["```python", *whole, "```", "", "Its parts, with headstart:", ""] if whole else ()),
        "```python",
        *code,
        "import json",
        "from pathlib import Path",
        "from headstart.heads import LinearHead",
        'head = LinearHead.load(Path("head.safetensors"))',
        'classes = json.loads(Path("classes.json").read_text(encoding="utf-8"))',
        *use,
        "```",
        "",
        f"`head.scores(features)` is [n, C]; the features are {reads}.{_SCORES[model.target]}",
        *recipe,
    ]
    return "\n".join(lines) + "\n"


def _readme_of_completions(
    model: Model, files: list[str], code: list[str], recipe: Sequence[str], without: str | None
) -> str:
    """What is in the folder of a model that completes prompts, and code that loads it and completes one.

    without: the module that the code leaves out, as only headstart reads it.
    """
    lines = [
        f"# {model.recipe.name}",
        "",
        *(f"- {file}" for file in files),
        "",
        f"From within this folder{f', without the {without}' if without else ''}:",
        "",
        "```python",
        *code,
        "from transformers import AutoTokenizer",
        'tokenizer = AutoTokenizer.from_pretrained("body")',
        'made = body.generate(**tokenizer("What is 2 plus 2?", return_tensors="pt"), max_new_tokens=64)',
        "print(tokenizer.decode(made[0], skip_special_tokens=True))",
        "```",
        "",
        *recipe,
    ]
    return "\n".join(lines) + "\n"


def _as_recipe(model: Model, table: dict[str, Any], apart: str | None) -> list[str]:
    """The model as a table of a recipe; apart: the module that is not in it."""
    said = "As the model of a recipe:"
    if apart:
        both = " (export with --merge for both)" if apart == "LoRA" and not model.recipe.model.quantise else ""
        said = f"Its backbone without the {apart}{both}, as the model of a recipe:"
    return [said, "", "```toml", tomli_w.dumps({"model": table}).rstrip(), "```"]


_MODULES = {"lora": "LoRA", "adapter": "adapter", "vpt": "prompts", "prefix": "prefix"}

_WEIGHTS = ", and the temperature to divide scores by where it is not 1; a class whose bias is -inf is never predicted"
_SCORES = {
    "classes": "",
    "regression": " The scores are the numbers themselves, and C is how many there are.",
    "multilabel": " An example has the labels whose score is above 0, and C is how many there are.",
}


def _merge(core: Any) -> None:
    """Add a LoRA to the weights; what the body computes stays the same."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in core.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.merge()


def _save_hugging_face(model: Model, folder: Path) -> None:
    """The body in the layout of `transformers`, with its tokenizer or what its images go through."""
    import transformers

    from headstart.modules import plain_state

    backbone = model.store.backbone
    assert backbone is not None
    core: Any = backbone.core
    if model.recipe.model.quantise and model.store.model:
        model.store.model.detach()  # such a network writes all that is on it, whatever state it is given
    place, state = core.name_or_path, plain_state(core)
    if model.cloze:  # its vocabulary was cut off, and no stage has changed it
        core = transformers.AutoModelForMaskedLM.from_pretrained(place, use_safetensors=True)
        core.load_state_dict(state, strict=False)
        state = core.state_dict()
    core.save_pretrained(folder, state_dict=state)
    if backbone.kind == "text":
        backbone.transform.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
    for name in ("preprocessor_config.json", "1_Pooling/config.json"):
        copy_settings(place, folder, name)


def _save_adapter(module: Module, auto: str, encoder: str, folder: Path) -> None:
    """A LoRA in the layout of `peft`, on the whole model in `base/`, or on the language model in `body/`.

    auto: the class of `transformers` that loads the model below; encoder: the attribute of it that has the LoRA, empty
    where it is the model itself. `peft` looks for it from where it runs: from within the folder, wherever that is.
    """
    from peft import LoraConfig

    scale: Any = module.settings["alpha_lora"]
    config = LoraConfig(
        r=module.settings["rank"],
        lora_alpha=scale,
        use_rslora=bool(module.settings.get("rslora")),
        target_modules=sorted({name.partition(".lora_")[0] for name in module.values[0]}),
        # Not a bare name: from elsewhere that would be one of the hub's.
        base_model_name_or_path="./base" if encoder else "./body",
        auto_mapping={"base_model_class": auto, "parent_library": "transformers"},
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    prefix = "base_model.model." + (f"{encoder}." if encoder else "")
    arrays = {f"{prefix}{name}": np.ascontiguousarray(array) for name, array in module.values[0].items()}
    save_arrays(folder / "adapter_model.safetensors", arrays, {"format": "pt"})
