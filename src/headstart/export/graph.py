"""A run's whole model as one graph, for ONNX or OpenVINO: inputs as the body reads them in, probabilities out."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from headstart.backbones.backbone import Backbone
from headstart.backbones.transforms import ImageTransform, TextTransform
from headstart.data.examples import upright
from headstart.errors import HeadstartError
from headstart.export.model import Model
from headstart.export.modeling_headstart import Head
from headstart.heads.linear import HiddenLayers, LinearHead, RandomFeatures

Format = Literal["onnx", "openvino"]

_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}
_FILES = {"onnx": "model.onnx", "openvino": "model.xml"}
_OUTPUTS = ("logits", "probabilities")
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# The score of a class that nobody has. Infinity would do, but a runtime that subtracts two of them makes NaN.
_MASKED = -1e30
# A runtime adds in another order than torch; probabilities that differ by more are refused.
_TOLERANCE = 1e-3
_ONE_FILE = 1_900_000_000  # protobuf ends at 2 GiB; the weights of a larger model go to a file of their own


class Whole(nn.Module):
    """Body, module and head: what the body reads, or features → logits and probabilities [n, C]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body = model.body.backbone.body if model.body.backbone else nn.Identity()
        self.head = torch_head(model.head)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """As `LinearHead.scores` of the body's features, and their softmax."""
        logits: Tensor = self.head(self.body(*inputs))
        return logits, logits.softmax(dim=1)


def torch_head(head: LinearHead) -> Head:
    """The same head as a module of torch, its temperature within the weights of the last layer."""
    before, state = head.feature_map, {}
    if isinstance(before, RandomFeatures):
        state = {"waves.weight": before.projection, "waves.bias": before.phase}
    layers = before.layers if isinstance(before, HiddenLayers) else ()
    for number, (weight, bias) in enumerate(layers):
        state |= {f"hidden.{number}.weight": weight, f"hidden.{number}.bias": bias}
    temperature = np.float32(head.temperature)
    state["last.weight"] = head.weight / temperature
    state["last.bias"] = np.where(np.isneginf(head.bias), np.float32(_MASKED), head.bias / temperature)
    waves = len(before.phase) if isinstance(before, RandomFeatures) else 0
    width = next(iter(state.values())).shape[1]
    longest = head.longest if head.longest < math.inf else None
    made = Head(width, waves, [len(bias) for _, bias in layers], len(head.bias), longest)
    made.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
    return made.requires_grad_(False)


def check_installed(form: Format) -> None:
    """Refuse a format whose packages are missing, before any work is done."""
    missing = [name for name in _PACKAGES[form] if find_spec(name) is None]
    if missing:
        raise HeadstartError(
            f"--format {form} needs {', '.join(missing)}; install what it needs with: pip install 'headstart[{form}]'"
        )


def save_graph(model: Model, form: Format, folder: Path) -> str:
    """Write the graph, and the tokenizer of texts, to ``folder``; the README for it."""
    backbone = model.body.backbone
    norms = [each for each in (backbone.body.modules() if backbone else ()) if isinstance(each, _BatchNorm)]
    if any(norm.training or norm.running_mean is None for norm in norms):
        raise HeadstartError(
            f"--format {form}: batch norm of this body goes by each batch's own statistics, so that a prediction "
            "depends on the rest of its batch, and no graph can give the run's; leave --format out, or train with "
            "norm_statistics = 'aggregate' or 'freeze' on a backbone that keeps statistics"
        )
    whole = Whole(model).eval().requires_grad_(False)
    traced, other = (example(model, *shape) for shape in ((3, 7), (2, 5)))
    names = (
        ["features"] if backbone is None else ["images"] if backbone.kind == "image" else _TEXT_INPUTS[: len(traced)]
    )
    axes = ("batch", "length") if model.kind == "text" else ("batch",)
    with torch.inference_mode():
        expected = whole(*other)[1].numpy()
    try:
        with _quiet():
            free = tuple(dict.fromkeys(range(len(axes)), torch.export.Dim.DYNAMIC) for _ in traced)
            program = torch.export.export(whole, traced, dynamic_shapes=(free,), strict=False)
            run = (_save_onnx if form == "onnx" else _save_openvino)(program, names, axes, folder / _FILES[form])
            given = run(*(tensor.numpy() for tensor in other))
    except OSError:
        raise
    except Exception as error:  # the converters raise what they like
        name = backbone.name if backbone else "the head"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise HeadstartError(
            f"--format {form}: {name} cannot be written as a graph: {reason}; leave --format out"
        ) from None
    difference = float(np.abs(given - expected).max())
    if not difference <= _TOLERANCE:
        raise HeadstartError(
            f"--format {form}: the graph's probabilities differ from the model's by {difference:.1e}; "
            "leave --format out"
        )
    if backbone is not None and isinstance(backbone.transform, TextTransform):
        tokenizer = backbone.transform.tokenizer
        if tokenizer.pad_token is None:  # training pads with the first token then, behind the attention mask
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        tokenizer.save_pretrained(folder / "tokenizer")
    return _readme(model, form, list(names))


def example(model: Model, count: int, length: int) -> tuple[Tensor, ...]:
    """Inputs of the right kind: features [n, d], images [n, H, W, 3], or tokens, mask and segments [n, L]."""
    rng, backbone = torch.Generator().manual_seed(count), model.body.backbone
    if backbone is None:
        return (torch.randn(count, model.width, generator=rng),)
    if isinstance(backbone.transform, ImageTransform):
        size = backbone.transform.size
        return (255 * torch.rand(count, size, size, 3, generator=rng),)
    tokenizer, core = backbone.transform.tokenizer, backbone.core
    length = min(length, backbone.transform.max_tokens)
    ids = torch.randint(core.get_input_embeddings().num_embeddings, (count, length), generator=rng)  # type: ignore[operator]
    if model.cloze:
        ids[:, 1] = tokenizer.mask_token_id
    mask = (torch.arange(length) < length - torch.arange(count)[:, None]).long()
    segments = torch.zeros_like(ids)
    return (ids, mask, segments) if "token_type_ids" in tokenizer.model_input_names else (ids, mask)


def _save_onnx(program: Any, names: Sequence[str], axes: Sequence[str], path: Path) -> Any:
    """Write the program as ONNX; how to run it."""
    import onnxruntime

    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    shapes = tuple(dict(enumerate(axes)) for _ in names)
    graph = torch.onnx.export(
        program, dynamo=True, input_names=names, output_names=_OUTPUTS, dynamic_shapes=(shapes,), verbose=False
    )
    assert graph is not None
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    graph.save(path, external_data=size > _ONE_FILE)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda *values: session.run(["probabilities"], dict(zip(names, values, strict=True)))[0]


def _save_openvino(program: Any, names: Sequence[str], axes: Sequence[str], path: Path) -> Any:
    """Write the program as OpenVINO's model.xml and model.bin, in float32; how to run it."""
    import openvino

    graph = openvino.convert_model(program)
    example = program.example_inputs[0]
    shapes = [openvino.PartialShape([-1] * len(axes) + list(each.shape[len(axes) :])) for each in example]
    graph.reshape(dict(zip(graph.inputs, shapes, strict=True)))
    for port, name in zip([*graph.inputs, *graph.outputs], [*names, *_OUTPUTS], strict=True):
        port.get_tensor().set_names({name})
    openvino.save_model(graph, path, compress_to_fp16=False)
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda *values: compiled(dict(zip(names, values, strict=True)))["probabilities"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the converters say of themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


# ------------------------------------------------------------------------------------------------------ how to use it


def _readme(model: Model, form: Format, names: list[str]) -> str:
    """What is in the folder, what goes into the graph, and code that reads inputs and runs it."""
    backbone, files = model.body.backbone, [f"`{_FILES[form]}`: the whole model, in float32; any batch size"]
    if form == "openvino":
        files.append("`model.bin`: its weights")
    head = [
        "import json",
        *(["import re"] if model.cloze else []),
        "from pathlib import Path",
        "",
        "import numpy as np",
    ]
    if backbone is None:
        reads = [f"`features` [n, {model.width}], float32: as they are in the data."]
        code = ["", "", "def inputs(features):", '    return {"features": np.asarray(features, np.float32)}']
    elif isinstance(backbone.transform, ImageTransform):
        reads, code = _about_images(backbone, backbone.transform), _image_code(backbone.transform)
        head.append("from PIL import Image, ImageOps")
    else:
        files.append("`tokenizer/`: turns texts into ids, for transformers")
        reads, code = _about_texts(backbone.transform, names), _text_code(backbone.transform, names)
        head.append("from transformers import AutoTokenizer")
    if form == "onnx":
        load = ['session = onnxruntime.InferenceSession(folder / "model.onnx")']
        run = '    return session.run(["probabilities"], inputs(*given))[0]'
    else:
        # Some CPUs would use bfloat16 otherwise.
        load = ['settings = {"INFERENCE_PRECISION_HINT": "f32"}']
        load.append('graph = openvino.compile_model(folder / "model.xml", "CPU", settings)')
        run = '    return graph(inputs(*given))["probabilities"]'
    head.append("import onnxruntime" if form == "onnx" else "import openvino")
    load = ['folder = Path(".")  # where this file is', *load]
    load.append('classes = json.loads((folder / "classes.json").read_text(encoding="utf-8"))')
    lines = [
        f"# {model.recipe.name}",
        "",
        *(f"- {file}" for file in files),
        "- `classes.json`: the names of the classes, in the order of the columns of logits and probabilities",
        "",
        "What goes in:",
        "",
        *(f"- {line}" for line in reads),
        "",
        "What comes out: `logits` and `probabilities`, both [n, C]. A class that nobody had has the logit -1e30",
        "and the probability 0.",
        "",
        "```python",
        *head,
        "",
        *load,
        *code,
        "",
        "",
        "def probabilities(*given):",
        run,
        "```",
        "",
        f"{_EXAMPLES[model.kind]} is [n, C].",
    ]
    return "\n".join(lines) + "\n"


_EXAMPLES = {
    "features": "`probabilities(features)`",
    "image": '`probabilities(["one.jpg", "two.png"])`',
    "text": '`probabilities(["one text", "another"])`, or, of pairs of texts, `probabilities(firsts, seconds)`,',
}


def _about_images(backbone: Backbone, transform: ImageTransform) -> list[str]:
    size, body = transform.size, backbone.body
    how = "its sides brought to that size, whatever their ratio"
    if transform.resize != "squash":
        how = f"its shorter side brought to {max(transform.resize, size)} pixels, then the middle cut out"
    factor, shift = (getattr(body, name).flatten().tolist() for name in ("factor", "shift"))
    order = "blue, green, red" if body.bgr else "red, green, blue"
    return [
        f"`images` [n, {size}, {size}, 3], float32: pixels from 0 to 255 that are not rounded, rows from the top, the "
        "channels red, green, blue.",
        "An image is turned as its EXIF data say; grey of 16 bits is divided by 257, and grey is all three channels.",
        f"Each image is resized with bilinear interpolation (antialiased where it shrinks): {how}.",
        f"The graph itself then normalises: by channel ({order}), pixel · {_listed(factor)} − {_listed(shift)}.",
    ]


def _listed(values: list[float]) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"


def _image_code(transform: ImageTransform) -> list[str]:
    size, box, crop = transform.size, "SIZE, SIZE", []
    if transform.resize != "squash":
        box = "width, height"
        shorter = max(transform.resize, size)
        crop = [
            f"    sides = [max({shorter}, round(side * {shorter} / min(image.size))) for side in image.size]",
            "    (width, height), (left, top) = sides, [(side - SIZE) // 2 for side in sides]",
        ]
    pixels = f'[each.convert("F").resize(({box}), Image.Resampling.BILINEAR) for each in image.split()]'
    cut = "[top : top + SIZE, left : left + SIZE]" if crop else ""
    return [
        f"SIZE = {size}",
        "",
        "",
        *inspect.getsource(upright).splitlines(),
        "",
        "",
        "def pixels(path):",
        "    image = upright(Image.open(path))",
        *crop,
        f"    channels = {pixels}",
        f"    return np.stack([np.asarray(each) for each in channels * (3 // len(channels))], axis=2){cut}",
        "",
        "",
        "def inputs(paths):",
        '    return {"images": np.stack([pixels(path) for path in paths])}',
    ]


def _about_texts(transform: TextTransform, names: list[str]) -> list[str]:
    cut = f"cut to {transform.max_tokens} tokens"
    if transform.prompt is not None:
        cut = (
            f"inside the prompt {transform.prompt!r}, the longest text cut until all has {transform.max_tokens} tokens"
        )
    listed = ", ".join(f"`{name}`" for name in names)
    return [f"{listed}, each [n, L], int64, padded on the right: what the tokenizer makes of the texts, {cut}."]


def _text_code(transform: TextTransform, names: list[str]) -> list[str]:
    fill = []
    if transform.prompt is not None:
        fill = [
            f"PROMPT, MAX_TOKENS = {transform.prompt!r}, {transform.max_tokens}",
            "",
            "",
            "def filled(*texts):",
            '    texts = [text.replace(tokenizer.mask_token, "") for text in texts]',
            "    while True:",
            "        given = dict(text=texts[0], second=texts[-1], mask=tokenizer.mask_token)",
            r"        prompt = re.sub(r'\{(text|second|mask)\}', lambda found: given[found[1]], PROMPT)",
            '        over = len(tokenizer(prompt)["input_ids"]) - MAX_TOKENS',
            "        longest = max(range(len(texts)), key=lambda number: len(texts[number]))",
            "        text = texts[longest]",
            "        if over <= 0 or not text:",
            "            return prompt",
            "        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)['offset_mapping']",
            '        texts[longest] = text[: tokens[-over][0]].rstrip() if over < len(tokens) else ""',
            "",
            "",
        ]
    texts = "[filled(*each) for each in zip(*texts)]" if fill else "*texts"
    cut = "" if fill else f"truncation=True, max_length={transform.max_tokens}, "
    return [
        'tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")',
        *fill,
        *([] if fill else ["", ""]),
        "def inputs(*texts):",
        f'    batch = tokenizer({texts}, {cut}padding=True, padding_side="right", return_tensors="np")',
        f"    return {{name: batch[name].astype(np.int64) for name in {names!r}}}",
    ]
