"""Backbone, pooling and head as one model of `transformers`, and the lines that load it and predict with it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import HeadstartError
from headstart.export.model import Model

PREDICTED = {
    "classes": "[classes[label] for label in {}.argmax(1)]",
    "regression": "[dict(zip(classes, row)) for row in {}.tolist()]",
    "multilabel": "[[name for name, score in zip(classes, row) if score > 0] for row in {}]",
}
"""What scores [n, C] mean, as Python."""
NAMED = {"classes": "classes", "regression": "targets", "multilabel": "labels"}
"""What the columns of the scores are."""
# What a pipeline gives of one text. By itself it gives the best class alone, and of labels a sigmoid of the score.
_PIPED = {
    "classes": "{}",
    "regression": "{{each['label']: each['score'] for each in {}}}",
    "multilabel": "[each['label'] for each in {} if each['score'] > 0]",
}
_ALL = {"classes": "", "regression": ", top_k=None", "multilabel": ', top_k=None, function_to_apply="none"'}
AUTO = {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}
# As `transformers` calls them: its pipelines then take no softmax of what is none.
_PROBLEMS = {"classes": None, "regression": "regression", "multilabel": "multi_label_classification"}
_CODE = "modeling_headstart"


@dataclass(frozen=True)
class Saved:
    """What was saved: its line of the README, Python that loads it and predicts, and where the encoder is in it."""

    line: str
    code: list[str]
    encoder: str
    """The attribute of the model that is the encoder."""
    body: list[str]
    """Python that finds the encoder as the run has it, in what `peft` loads."""


def save_whole(model: Model, folder: Path, is_lora: bool) -> Saved:
    """Write the whole model into the folder, or into ``base/`` where a LoRA goes on it; code only where needed."""
    place = folder / "base" if is_lora else folder
    whole = _built(model)
    is_native = whole.config.model_type != "headstart"
    whole.save_pretrained(place)
    if not is_native:
        from headstart.export import modeling_headstart

        shutil.copyfile(str(modeling_headstart.__file__), place / f"{_CODE}.py")
    backbone = model.store.backbone
    assert backbone is not None
    core: Any = backbone.core
    if model.kind == "text":
        tokenizer = copy.deepcopy(backbone.transform.tokenizer)  # type: ignore[union-attr]
        tokenizer.model_max_length = backbone.transform.max_tokens  # type: ignore[union-attr]
        tokenizer.save_pretrained(place)
    else:
        copy_settings(core.name_or_path, place, "preprocessor_config.json")
    names = "config.json, model.safetensors" + ("" if is_native else f", {_CODE}.py")
    before = " before the LoRA" if is_lora else ""
    line = f"`{'base/' if is_lora else names}`: backbone{before}, pooling and head as one model, with the names of the "
    line += NAMED[model.target]
    line += "" if is_native else "; its own code comes with it, and `trust_remote_code=True` lets it run"
    deeper = is_native and whole.config.to_dict().get("num_hidden_layers") != core.config.to_dict().get(
        "num_hidden_layers"
    )
    if deeper:
        line += "; for float32 and bfloat16, since its last layer, which pools by the mean, is too large for float16"
    body = [f"body = model.get_base_model().{whole.base_model_prefix}  # of the model above"]
    body += ["body.encoder.layer = body.encoder.layer[:-1]  # the last layer pools"] if deeper else []
    code = [*_load(model.kind, is_lora, is_native), *_use(model, is_lora)]
    code = ["from __future__ import annotations", *code] if model.kind == "image" else code
    return Saved(line, code, whole.base_model_prefix, body)


def _built(model: Model) -> Any:
    """The model as a class of `transformers`, or else as ours; it gives the run's logits, without a LoRA."""
    import torch

    from headstart.export.graph import Whole, example, torch_head
    from headstart.export.native import native
    from headstart.modules import plain_state

    backbone, head = model.store.backbone, torch_head(model.head)
    assert backbone is not None
    core: Any = backbone.core
    labels = {
        "problem_type": _PROBLEMS[model.target],
        "id2label": dict(enumerate(model.classes)),
        "label2id": {name: number for number, name in enumerate(model.classes)},
    }
    # It must give the run's logits for what the encoder of the run is given.
    seen: dict[str, Any] = {}
    hook = core.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True)
    with _without_lora(core), torch.inference_mode():
        expected = Whole(model)(*example(model, 3, 7))[0]
    hook.remove()
    state = plain_state(core)
    for build in (native, _ours):
        made = build(AUTO[model.kind], core, state, head, pooling_of(model), labels)
        with torch.inference_mode():
            if made is not None and _agree(made(**seen).logits, expected):
                return made
    raise HeadstartError(f"{backbone.name} reads its inputs in a way of its own, which cannot be exported")


def _agree(found: Any, expected: Any) -> bool:
    """Whether logits are the same but for rounding, whatever their scale; those of masked classes have none."""
    real = expected[expected > -1e29]
    return bool(((found - expected).abs() <= 1e-4 * real.abs().max() + 1e-6 * expected.abs()).all())


def _ours(auto: str, core: Any, state: Any, head: Any, pooling: str, labels: dict[str, Any]) -> Any:
    """A small class of our own, for any encoder and any head; see `native`."""
    from headstart.export import modeling_headstart as modeling

    config = modeling.HeadstartConfig(
        encoder={name: value for name, value in core.config.to_dict().items() if name != "_name_or_path"},
        pooling=pooling,
        width=(head.waves or (head.hidden[0] if head.hidden else head.last)).in_features,
        waves=head.widths[0] if head.waves else 0,
        hidden=head.widths[1:],
        longest=head.longest,
        centres=head.centres,
        auto_map={"AutoConfig": f"{_CODE}.HeadstartConfig", auto: f"{_CODE}.HeadstartForClassification"},
        **labels,
    )
    whole: Any = modeling.HeadstartForClassification(config)
    whole.head.load_state_dict(head.state_dict())
    whole.encoder.load_state_dict(state)
    return whole.eval()


@contextmanager
def _without_lora(core: Any) -> Iterator[None]:
    """For a while, the core is as it was before a LoRA was put on it; one that was merged stays."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in core.modules() if isinstance(layer, BaseTunerLayer) and not layer.merged]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _load(kind: str, is_lora: bool, is_native: bool) -> list[str]:
    """Lines that load the whole model as ``model``, or as a ``classify`` that reads texts."""
    trust = "" if is_native else ", trust_remote_code=True"
    if is_lora:
        return ["from peft import AutoPeftModel", f'model = AutoPeftModel.from_pretrained("."{trust}).eval()']
    if kind == "text":
        load = f'classify = pipeline("text-classification", model="."{trust}, truncation=True)'
        return ["from transformers import pipeline", load]
    return [f"from transformers import {AUTO[kind]}", f'model = {AUTO[kind]}.from_pretrained("."{trust}).eval()']


def _use(model: Model, is_lora: bool) -> list[str]:
    """Lines that predict with the whole model: of a text, or of a file with an image, read as the run reads it."""
    if model.kind == "text" and not is_lora:
        given = f'classify("a text of yours"{_ALL[model.target]})'
        return [f"print({_PIPED[model.target].format(given)})"]
    names = "classes = list(model.config.id2label.values())"
    last = f"print({PREDICTED[model.target].format('model(**batch).logits')})"
    if model.kind == "text":
        load = f'tokenizer = AutoTokenizer.from_pretrained("{"base" if is_lora else "."}")'
        read = 'batch = tokenizer("a text of yours", truncation=True, return_tensors="pt")'
        return ["from transformers import AutoTokenizer", load, read, names, last]
    from headstart.export.graph import image_source

    backbone = model.store.backbone
    assert backbone is not None
    body, transform = backbone.body, backbone.transform
    factor, shift = ([round(float(value), 6) for value in each.flatten()] for each in (body.factor, body.shift))  # type: ignore[operator]
    return [
        "import numpy as np",
        "import torch",
        "from PIL import Image, ImageOps",
        *image_source().splitlines(),
        "",
        "",
        *EXAMPLE_IMAGE,
        f'image = upright(Image.open("one.png"), {transform.pixel_range!r})',  # type: ignore[union-attr]
        f"image = pixels(image, {transform.size}, {transform.resize!r})  # red, green, blue from 0 to 255",  # type: ignore[union-attr]
        f"image = torch.tensor(image[None]) * torch.tensor({factor}) - torch.tensor({shift})",
        'batch = {"pixel_values": image.permute(0, 3, 1, 2)}',
        names,
        last,
    ]


EXAMPLE_IMAGE = ['Image.new("RGB", (64, 64)).save("one.png")  # an image of yours instead']
"""Python that makes the file which the rest of a README predicts."""


def pooling_of(model: Model) -> str:
    """How the body's last hidden states become one vector; empty where the body is none of `transformers`."""
    body: Any = model.store.backbone.body if model.store.backbone else None
    pooling = getattr(body, "pooling", "") or getattr(getattr(body, "network", None), "pooling", "")
    return pooling if isinstance(pooling, str) else ""


def copy_settings(place: str, folder: Path, name: str) -> None:
    """Copy a file that lies beside the weights of a body, where there is one."""
    from transformers.utils.hub import cached_file

    found = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    if found:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(found, folder / name)
