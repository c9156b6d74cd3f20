"""A run's model as files that other libraries read: `peft`, `transformers`, safetensors, or a whole graph."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tomli_w
from safetensors.numpy import save_file

from headstart.core.files import write_json, write_text
from headstart.engine.model_store import Module
from headstart.errors import HeadstartError
from headstart.export.model import Model

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
        write_json(temporary / "classes.json", list(model.classes))
        if format is None:
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
        temporary.replace(out)
    except OSError as error:
        raise HeadstartError(f"--out {out}: cannot write there: {error.strerror or error}") from None
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
        return _readme(model, [], ["import numpy as np"], use=_use_features(model, f"np.zeros((1, {model.width}))"))
    core: Any = backbone.core
    if merge:
        _merge(core)
        module = None
    table = model.recipe.model.model_dump(mode="json", exclude_none=True)
    files, code, use, whole = [], [], [], list[str]()
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
            files.append("`body/`: the body, for transformers, and for a recipe")
            code = [] if ours else [f"from transformers import {auto}", f'body = {auto}.from_pretrained("body")']
        if not model.speaks and (module is None or is_lora) and not (backbone.by_batch or ours):
            files.append(_save_whole(model, folder / "base" if is_lora else folder, "base/" if is_lora else ""))
            whole = [*_whole_code(model.kind, is_lora), *_use_whole(model, is_lora)]
            code = ["body = model.get_base_model().encoder  # of the model above"] if is_lora else code
        if module is not None and is_lora:
            _save_adapter(module, auto if model.speaks else None, model.kind, folder)
            files.append("`adapter_config.json, adapter_model.safetensors`: the LoRA, for peft")
            if model.speaks:
                code += ["from peft import PeftModel", 'body = PeftModel.from_pretrained(body, ".").eval()']
            module = None
    elif module is None or model.retrained:
        save_file(dict(model.store.arrays()), folder / "model.safetensors")
        table["weights"] = "model.safetensors"
        files.append("`model.safetensors`: the body, to be named as model.weights in a recipe")
    if not code:
        code = ["from headstart.backbones import load_backbone", "from headstart.config.recipe import Model"]
        code += [f"backbone = load_backbone(Model.model_validate({table!r}))", "body = backbone.body"]
        if module is None:
            given = '"a text of yours"' if model.kind == "text" else "np.zeros((64, 64, 3), np.uint8)"
            made = f"body(*backbone.transform.collate([backbone.transform({given}, 'an input')])).numpy()"
            code, use = [*code, "import numpy as np"], _use_features(model, made)
    if module is not None:
        arrays = {**module.values[0], **{f"head.{name}": array for name, array in model.head.arrays().items()}}
        facts = {"module": json.dumps({"kind": module.kind, **module.settings})}
        save_file(arrays, folder / "module.safetensors", metadata=facts)
        files.append(f"`module.safetensors`: the {module.kind} and the head, for headstart predict RUN INPUTS --module")
    return _readme(model, files, code, table, use, whole)


_SAID = {
    "classes": "[classes[label] for label in {}.argmax(1)]",
    "regression": "[dict(zip(classes, row)) for row in {}.tolist()]",
    "multilabel": "[[name for name, score in zip(classes, row) if score > 0] for row in {}]",
}
"""What scores [n, C] mean, as Python."""


def _use_features(model: Model, features: str) -> list[str]:
    """Lines that predict from features [n, d]."""
    return [f"features = {features}  # yours", f"print({_SAID[model.target].format('head.scores(features)')})"]


def _use_whole(model: Model, is_lora: bool) -> list[str]:
    """Lines that predict with the whole model: of a text, or of an image as the run has read it."""
    if model.kind == "text" and not is_lora:
        return ['print(classify("a text of yours"))']
    names = "classes = list(model.config.id2label.values())"
    last = f"print({_SAID[model.target].format('model(**batch).logits')})"
    if model.kind == "text":
        load = f'tokenizer = AutoTokenizer.from_pretrained("{"base" if is_lora else "."}")'
        read = 'batch = tokenizer("a text of yours", truncation=True, return_tensors="pt")'
        return ["from transformers import AutoTokenizer", load, read, names, last]
    body: Any = model.store.backbone.body if model.store.backbone else None
    size = model.store.backbone.transform.size if model.store.backbone else 0  # type: ignore[union-attr]
    factor, shift = ([round(float(value), 6) for value in each.flatten()] for each in (body.factor, body.shift))
    return [
        "import torch",
        f"pixels = torch.zeros(1, {size}, {size}, 3)  # yours: an RGB image of this size, from 0 to 255",
        f"pixels = (pixels * torch.tensor({factor}) - torch.tensor({shift})).permute(0, 3, 1, 2)",
        'batch = {"pixel_values": pixels}',
        names,
        last,
    ]


# As `transformers` calls them: its pipelines then take no softmax of what is none.
_PROBLEMS = {"classes": None, "regression": "regression", "multilabel": "multi_label_classification"}
_AUTO = {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}


def _save_whole(model: Model, folder: Path, shown: str) -> str:
    """Backbone, pooling and head as one model of `transformers`, with `modeling_headstart.py`; a line of the README."""
    import torch

    from headstart.export import modeling_headstart as modeling
    from headstart.export.graph import Whole, example, torch_head
    from headstart.modules import plain_state

    backbone, head = model.store.backbone, torch_head(model.head)
    assert backbone is not None
    core: Any = backbone.core
    nested = {name: value for name, value in core.config.to_dict().items() if name != "_name_or_path"}
    code = "modeling_headstart"
    config = modeling.HeadstartConfig(
        encoder=nested,
        pooling=_pooling(model),
        width=model.width,
        waves=head.widths[0] if head.waves else 0,
        hidden=head.widths[1:],
        longest=head.longest,
        problem_type=_PROBLEMS[model.target],
        centres=head.centres,
        id2label=dict(enumerate(model.classes)),
        label2id={name: number for number, name in enumerate(model.classes)},
        auto_map={"AutoConfig": f"{code}.HeadstartConfig", _AUTO[backbone.kind]: f"{code}.HeadstartForClassification"},
    )
    whole: Any = modeling.HeadstartForClassification(config)
    whole.head.load_state_dict(head.state_dict())
    whole.encoder.load_state_dict(plain_state(core))
    # It must give the run's logits for what the encoder of the run is given, with a LoRA too.
    seen: dict[str, Any] = {}
    hook = core.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True)
    encoder, whole.encoder = whole.encoder, core
    with torch.inference_mode():
        expected = Whole(model)(*example(model, 3, 7))[0]
        hook.remove()
        found = whole(**seen).logits
    whole.encoder = encoder
    if not torch.allclose(found, expected, atol=1e-3, rtol=1e-3):
        raise HeadstartError(f"{backbone.name} reads its inputs in a way of its own, which cannot be exported")
    whole.save_pretrained(folder)
    shutil.copyfile(str(modeling.__file__), folder / f"{code}.py")
    if backbone.kind == "text":
        tokenizer = copy.deepcopy(backbone.transform.tokenizer)  # type: ignore[union-attr]
        tokenizer.model_max_length = backbone.transform.max_tokens  # type: ignore[union-attr]
        tokenizer.save_pretrained(folder)
    else:
        _copy_settings(core.name_or_path, folder, "preprocessor_config.json")
    names = "config.json, model.safetensors, modeling_headstart.py"
    before = " before the LoRA" if shown else ""
    return f"`{shown or names}`: backbone{before}, pooling and head as one model, with the names of the classes"


def _whole_code(kind: str, is_lora: bool) -> list[str]:
    """Lines that load the whole model as ``model``, or as a ``classify`` that reads texts."""
    if is_lora:
        load = 'model = AutoPeftModel.from_pretrained(".", trust_remote_code=True).eval()'
        return ["from peft import AutoPeftModel", load]
    if kind == "text":
        load = 'classify = pipeline("text-classification", model=".", trust_remote_code=True, truncation=True)'
        return ["from transformers import pipeline", load]
    load = f'model = {_AUTO[kind]}.from_pretrained(".", trust_remote_code=True)'
    return [f"from transformers import {_AUTO[kind]}", load]


def _pooling(model: Model) -> str:
    """How the body's last hidden states become one vector; empty where the body is none of `transformers`."""
    body: Any = model.store.backbone.body if model.store.backbone else None
    pooling = getattr(body, "pooling", "") or getattr(getattr(body, "network", None), "pooling", "")
    return pooling if isinstance(pooling, str) else ""


def _readme(
    model: Model,
    files: list[str],
    code: list[str],
    table: dict[str, Any] | None = None,
    use: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> str:
    """What is in the folder, code that loads it and predicts with it, and the model as a table of a recipe.

    whole: code that needs no headstart, where the whole model is a file of other libraries.
    """
    backbone, width = model.store.backbone, model.width
    reads = f"features [{width}] as they are in the data"
    if backbone is not None:
        which = {"cls": "the first of", "mean": "the mean of", "last": "the last real token's of"}.get(_pooling(model))
        how = f"{which} the last hidden states" if which else "pooled features"
        how = "the state at the mask, before the vocabulary" if model.cloze else how
        chooses = model.speaks and not model.cloze
        how = "the log-likelihoods of the label words after the prompt" if chooses else how
        how = (
            "the loss of a completion and the number of its tokens, which no head reads"
            if model.store.generates
            else how
        )
        reads = f"{how} [{width}]"
        reads += ", batch norm by each batch's own statistics" if backbone.by_batch else ""
    lines = [
        f"# {model.recipe.name}",
        "",
        "- `head.safetensors`: weight [C, d], bias [C], and the temperature to divide scores by where it is not 1; a "
        "class whose bias is -inf is never predicted",
        "- `classes.json`: the names of the classes, in the order of the head's rows",
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
    ]
    if table is not None:
        lines += ["As the model of a recipe:", "", "```toml", tomli_w.dumps({"model": table}).rstrip(), "```"]
    return "\n".join(lines) + "\n"


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
        _copy_settings(place, folder, name)


def _copy_settings(place: str, folder: Path, name: str) -> None:
    """Copy a file that lies beside the weights of a body, where there is one."""
    from transformers.utils.hub import cached_file

    found = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    if found:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(found, folder / name)


def _save_adapter(module: Module, speaks: str | None, kind: str, folder: Path) -> None:
    """A LoRA in the layout of `peft`, on the whole model in `base/`, or on the language model in `body/`.

    `peft` looks for the model below from where it runs: from within the folder, wherever that is.
    """
    from peft import LoraConfig

    scale: Any = module.settings["alpha_lora"]
    config = LoraConfig(
        r=module.settings["rank"],
        lora_alpha=scale,
        use_rslora=bool(module.settings.get("rslora")),
        target_modules=sorted({name.partition(".lora_")[0] for name in module.values[0]}),
        # Not a bare name: from elsewhere that would be one of the hub's.
        base_model_name_or_path="./body" if speaks else "./base",
        auto_mapping={"base_model_class": speaks or _AUTO[kind], "parent_library": "transformers"},
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    prefix = "base_model.model." + ("" if speaks else "encoder.")
    arrays = {f"{prefix}{name}": np.ascontiguousarray(array) for name, array in module.values[0].items()}
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})
