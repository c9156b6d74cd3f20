"""A run's whole model as one graph, for ONNX or OpenVINO: inputs as the body reads them in;
probabilities, numbers or the shares of labels out."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from headstart.backbones.transforms import ImageTransform, TextTransform, filled, pixels, resized
from headstart.core.target import Target
from headstart.data.examples import upright
from headstart.errors import HeadstartError, first_line
from headstart.export.model import Model, width_of
from headstart.export.modeling_headstart import Head
from headstart.export.whole import EXAMPLE_IMAGE, PREDICTED
from headstart.heads import LinearHead

Format = Literal["onnx", "openvino"]

_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}
_FILES = {"onnx": "model.onnx", "openvino": "model.xml"}
# How the README imports a runtime, loads the graph and runs it.
_RUNTIMES = {
    "onnx": (
        "onnxruntime",
        'session = onnxruntime.InferenceSession(folder / "model.onnx")',
        'session.run(["{output}"], inputs(*given))[0]',
    ),
    "openvino": (
        "openvino",
        'settings = {"INFERENCE_PRECISION_HINT": "f32"}  # some CPUs would use bfloat16 otherwise\n'
        'graph = openvino.compile_model(folder / "model.xml", "CPU", settings)',
        'graph(inputs(*given))["{output}"]',
    ),
}
_OUTPUTS: dict[Target, tuple[str, ...]] = {
    "classes": ("logits", "probabilities"),
    "regression": ("values",),
    "multilabel": ("scores", "shares"),
}
"""The last is what `headstart predict` shows."""
_COLUMNS: dict[Target, str] = {
    "classes": "the names of the classes, in the order of the columns of logits and probabilities",
    "regression": "the names of the targets, in the order of the columns of values",
    "multilabel": "the names of the labels, in the order of the columns of scores and shares",
}
_ABOUT_OUTPUTS: dict[Target, str] = {
    "classes": "`logits` and `probabilities`, both [n, C]. A class that nobody had has the logit -1e30\nand the "
    "probability 0.",
    "regression": "`values` [n, q]: the predicted numbers themselves.",
    "multilabel": "`scores` and `shares`, both [n, q]: the share of examples like it that have each label, between\n0 "
    "and 1. An example has the labels whose share is above 0.5 (score above 0).",
}
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# The score of a class that nobody has. Infinity would do, but a runtime that subtracts two of them makes NaN.
_MASKED = -1e30
# A runtime adds in another order than torch; outputs that differ by more, or by more of the largest, are refused.
_TOLERANCE = 1e-3
_ONE_FILE = 1_900_000_000  # protobuf ends at 2 GiB; the weights of a larger model go to a file of their own


class Whole(nn.Module):
    """Backbone, module and head: what the backbone reads, or features → the outputs of its target, each [n, C]."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.body = model.store.backbone.body if model.store.backbone else nn.Identity()
        self.head, self.target = torch_head(model.head), model.target

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """As `LinearHead.scores` of the body's features, and what `Model.predict` makes of them."""
        scores: Tensor = self.head(self.body(*inputs))
        if self.target == "regression":
            return (scores,)
        return scores, scores.softmax(dim=1) if self.target == "classes" else ((scores + 1) / 2).clamp(0, 1)


def torch_head(head: LinearHead) -> Head:
    """The same head as a module of torch, its temperature within the weights of the last layer."""
    temperature, arrays = np.float32(head.temperature), head.parameters()
    masked = np.where(np.isneginf(head.bias), np.float32(_MASKED), head.bias / temperature)
    arrays |= {"weight": head.weight / temperature, "bias": masked}
    hidden = [len(array) for name, array in arrays.items() if name.startswith("hidden.") and name.endswith(".bias")]
    longest = head.longest if head.longest < math.inf else None
    made = Head(
        width_of(arrays), len(arrays.get("phase", ())), hidden, len(head.bias) // head.centres, longest, head.centres
    )
    names = {"weight": "last.weight", "bias": "last.bias", "projection": "waves.weight", "phase": "waves.bias"}
    made.load_state_dict({names.get(name, name): torch.tensor(array) for name, array in arrays.items()})
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
    backbone, outputs = model.store.backbone, _OUTPUTS[model.target]
    if backbone and backbone.by_batch:
        raise HeadstartError(
            f"--format {form}: batch norm of this backbone goes by each batch's own statistics, so that a prediction "
            "depends on the rest of its batch, and no graph can give the run's; leave --format out, or train with "
            "norm_statistics = 'aggregate' or 'freeze' on a backbone that keeps statistics"
        )
    if model.speaks and not model.cloze:
        raise HeadstartError(f"--format {form}: a model that speaks is written for transformers; leave --format out")
    whole = Whole(model).eval().requires_grad_(False)
    traced, other = (example(model, *shape) for shape in ((3, 7), (2, 5)))
    names = (
        ["features"] if backbone is None else ["images"] if backbone.kind == "image" else _TEXT_INPUTS[: len(traced)]
    )
    axes = ("batch", "length") if model.kind == "text" else ("batch",)
    with torch.inference_mode():
        expected = whole(*other)[-1].numpy()
    try:
        with _quiet():
            free = tuple(dict.fromkeys(range(len(axes)), torch.export.Dim.DYNAMIC) for _ in traced)
            program = torch.export.export(whole, traced, dynamic_shapes=(free,), strict=False)
            save = _save_onnx if form == "onnx" else _save_openvino
            run = save(program, names, outputs, axes, folder / _FILES[form])
            given = run(*(tensor.numpy() for tensor in other))
    except OSError:
        raise
    except Exception as error:  # the converters raise what they like
        name = backbone.name if backbone else "the head"
        raise HeadstartError(
            f"--format {form}: {name} cannot be written as a graph: {first_line(error)}; leave --format out"
        ) from None
    difference = float(np.abs(given - expected).max())
    if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise HeadstartError(
            f"--format {form}: the graph's {outputs[-1]} differ from the model's by {difference:.1e}; "
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
    rng, backbone = torch.Generator().manual_seed(count), model.store.backbone
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


def _save_onnx(program: Any, names: Sequence[str], outputs: Sequence[str], axes: Sequence[str], path: Path) -> Any:
    """Write the program as ONNX; how to run it."""
    import onnxruntime

    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    shapes = tuple(dict(enumerate(axes)) for _ in names)
    graph = torch.onnx.export(
        program, dynamo=True, input_names=names, output_names=outputs, dynamic_shapes=(shapes,), verbose=False
    )
    assert graph is not None
    for node in graph.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    graph.save(path, external_data=size > _ONE_FILE)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda *values: session.run([outputs[-1]], dict(zip(names, values, strict=True)))[0]


def _save_openvino(program: Any, names: Sequence[str], outputs: Sequence[str], axes: Sequence[str], path: Path) -> Any:
    """Write the program as OpenVINO's model.xml and model.bin, in float32; how to run it."""
    import openvino

    graph = openvino.convert_model(program)
    example = program.example_inputs[0]
    shapes = [openvino.PartialShape([-1] * len(axes) + list(each.shape[len(axes) :])) for each in example]
    graph.reshape(dict(zip(graph.inputs, shapes, strict=True)))
    for port, name in zip([*graph.inputs, *graph.outputs], [*names, *outputs], strict=True):
        port.get_tensor().set_names({name})
    openvino.save_model(graph, path, compress_to_fp16=False)
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda *values: compiled(dict(zip(names, values, strict=True)))[outputs[-1]]


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
    backbone, (package, load, run) = model.store.backbone, _RUNTIMES[form]
    output = _OUTPUTS[model.target][-1]
    files = f"- `{_FILES[form]}`: the whole model, in float32; any batch size"
    files += "\n- `model.bin`: its weights" if form == "openvino" else ""
    standard = "import json\nimport re" if getattr(backbone and backbone.transform, "prompt", None) else "import json"
    if backbone is None:
        reads, imports = f"- `features` [n, {model.width}], float32: as they are in the data.", ""
        code = '\n\ndef inputs(features):\n    return {"features": np.asarray(features, np.float32)}'
        usage, given = f"`{output}(features)`", f"np.zeros((1, {model.width}))"
    elif isinstance(backbone.transform, ImageTransform):
        reads, imports = _about_images(backbone.body, backbone.transform), "from PIL import Image, ImageOps\n"
        code, usage = _image_code(backbone.transform), f'`{output}(["one.jpg", "two.png"])`'
        given = '["one.png"]'
    else:
        files += "\n- `tokenizer/`: turns texts into ids, for transformers"
        reads, imports = _about_texts(backbone.transform, names), "from transformers import AutoTokenizer\n"
        code = _text_code(backbone.transform, names)
        usage = f'`{output}(["one text", "another"])`, or, of pairs of texts, `{output}(firsts, seconds)`,'
        given = ", ".join(['["a text of yours"]'] * (2 if isinstance(model.data.input_column, tuple) else 1))
    last = f"print({PREDICTED[model.target].format(f'{output}({given})')})"
    last = last.replace("score > 0", "score > 0.5")  # shares
    last = "\n".join([*(EXAMPLE_IMAGE if "Image" in imports else ()), last])
    return f"""# {model.recipe.name}

{files}
- `classes.json`: {_COLUMNS[model.target]}

What goes in:

{reads}

What comes out: {_ABOUT_OUTPUTS[model.target]}

```python
from __future__ import annotations

{standard}
from pathlib import Path

import numpy as np
{imports}import {package}

folder = Path(".")  # where this file is
{load}
classes = json.loads((folder / "classes.json").read_text(encoding="utf-8"))
{code}


def {output}(*given):
    return {run.format(output=output)}


{last}
```

{usage} is [n, {"C" if model.target == "classes" else "q"}].
"""


def _about_images(body: Any, transform: ImageTransform) -> str:
    size = transform.size
    how = "its sides brought to that size, whatever their ratio"
    if transform.resize != "squash":
        how = f"its shorter side brought to {max(transform.resize, size)} pixels, then the middle cut out"
    factor, shift = (", ".join(f"{value:.6g}" for value in each.flatten()) for each in (body.factor, body.shift))
    order = "blue, green, red" if body.bgr else "red, green, blue"
    grey = "is divided by 257"
    if transform.pixel_range:
        grey = "or more goes from {:g}, black, to {:g}, white".format(*transform.pixel_range)
    return f"""\
- `images` [n, {size}, {size}, 3], float32: pixels from 0 to 255 that are not rounded, rows from the top, the channels \
red, green, blue.
- An image is turned as its EXIF data say; grey of 16 bits {grey}, and grey is all three channels.
- Each image is resized with bilinear interpolation (antialiased where it shrinks): {how}.
- The graph itself then normalises: by channel ({order}), pixel · ({factor}) − ({shift})."""


def _image_code(transform: ImageTransform) -> str:
    return f"""\


{image_source()}


def inputs(paths):
    images = [upright(Image.open(path), {transform.pixel_range!r}) for path in paths]
    return {{"images": np.stack([pixels(image, {transform.size}, {transform.resize!r}) for image in images])}}"""


def _about_texts(transform: TextTransform, names: list[str]) -> str:
    cut = f"cut to {transform.max_tokens} tokens"
    if transform.prompt is not None:
        cut = (
            f"inside the prompt {transform.prompt!r}, the longest text cut until all has {transform.max_tokens} tokens"
        )
    listed = ", ".join(f"`{name}`" for name in names)
    return f"- {listed}, each [n, L], int64, padded on the right: what the tokenizer makes of the texts, {cut}."


def _text_code(transform: TextTransform, names: list[str]) -> str:
    shown, given = "", f"*texts, truncation=True, max_length={transform.max_tokens}"
    if transform.prompt is not None:
        shown = f"\n\n\n{_source(filled)}"
        given = f"[filled({transform.prompt!r}, each, tokenizer, {transform.max_tokens})[0] for each in zip(*texts)]"
    return f"""\
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer"){shown}


def inputs(*texts):
    batch = tokenizer({given}, padding=True, padding_side="right", return_tensors="np")
    return {{name: batch[name].astype(np.int64) for name in {names!r}}}"""


def image_source() -> str:
    """The code that reads an image as a run does: turned upright, of any depth, resized."""
    return _source(upright, pixels, resized)


def _source(*functions: Callable[..., Any]) -> str:
    return "\n\n\n".join(inspect.getsource(each).rstrip() for each in functions)
