"""One pass over a frozen body: examples in, cached features out."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import Timeout
from torch import Tensor

from headstart.backbones.backbone import Backbone, moved, run_body
from headstart.backbones.cache import BLOCK, FeatureFile, Lenders
from headstart.backbones.inputs import Inputs
from headstart.core.progress import progress
from headstart.data import Examples
from headstart.data.examples import Ints, UnreadableError, all_unreadable
from headstart.errors import HeadstartError

log = logging.getLogger("headstart")

Runner = Callable[[tuple[Tensor, ...]], npt.NDArray[np.float32]]

_BATCH = 32
_WORKERS = 2
# Compiling a body takes a second or two, which a few images do not earn back.
_WORTH_COMPILING = 256
# OpenVINO and torch add in another order; features that differ by more than this share of the largest are refused.
_TOLERANCE = 1e-3


def extract(backbone: Backbone, examples: Examples, what: str = "features") -> npt.NDArray[np.float32]:
    """Features [n, d] of the examples, from the cache where they are there; memory-mapped."""
    if examples.kind != backbone.kind:
        raise HeadstartError(
            f"model.backbone: {backbone.name} reads {backbone.kind}s, and the data are "
            f"{examples.kind.removesuffix('s')}s"
        )
    weights = backbone.fingerprint()
    key = hashlib.blake2b(f"{weights} {examples.fingerprint()}".encode(), digest_size=16).hexdigest()
    file = FeatureFile(key, len(examples), backbone.dim)
    if not file.missing():
        return file.open()
    try:
        file.lock.acquire(timeout=0)
    except Timeout:
        log.warning(f"another process computes the same {what}; waiting for it")
        file.lock.acquire()
    except OSError as error:
        raise file.failure(error) from None
    try:
        if todo := file.missing():
            _compute(backbone, weights, examples, file, todo, what)
    finally:
        file.lock.release()
    return file.open()


def _compute(
    backbone: Backbone, weights: str, examples: Examples, file: FeatureFile, todo: list[int], what: str
) -> None:
    """Fill the blocks of a file that are to be done: from other files of the same weights, or through the body."""
    rows = np.concatenate([np.arange(file.span(number).start, file.span(number).stop) for number in todo])
    lenders, new = None, np.ones(len(rows), bool)
    if not backbone.by_batch:  # otherwise a feature is not the example's alone
        lenders = Lenders(weights, examples.digests[rows], backbone.dim)
        new = lenders.source < 0
        file.note_examples(weights, examples.digests)
    rest = examples.take(rows[new])
    spans = _spans(len(rest), file.block)
    with progress(f"{what} through {backbone.name}", len(examples), len(examples) - len(rest)) as advance:
        computed = _blocks(backbone, rest, spans, advance, what, numbers=rows[new])
        file.fill(zip(todo, _merged(file, todo, new, lenders, computed), strict=True))


def _spans(count: int, size: int) -> list[slice]:
    """So many rows in spans of this size."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _merged(
    file: FeatureFile,
    todo: list[int],
    new: npt.NDArray[np.bool_],
    lenders: Lenders | None,
    computed: Iterator[npt.NDArray[np.float32]],
) -> Iterator[npt.NDArray[np.float32]]:
    """Blocks of a file, one after the other: what is new [n] as it is computed, the rest from its lenders."""
    waiting, start = np.empty((0, file.dim), np.float32), 0
    for number in todo:
        span = file.span(number)
        places = np.arange(start, start + span.stop - span.start)
        block, mine = np.empty((len(places), file.dim), np.float32), new[places]
        while len(waiting) < mine.sum():
            waiting = np.concatenate([waiting, next(computed)])
        block[mine], waiting = waiting[: mine.sum()], waiting[mine.sum() :]
        if lenders is not None:
            lenders.fill(block, places)
        yield block
        start += len(places)


def embed(backbone: Backbone, examples: Examples, what: str) -> npt.NDArray[np.float32]:
    """Features [n, d] in memory, for a body that the next round of training changes again."""
    spans = _spans(len(examples), BLOCK)
    features = np.empty((len(examples), backbone.dim), np.float32)
    blocks = _blocks(backbone, examples, spans, lambda steps: None, what, len(examples) >= _WORTH_COMPILING)
    for span, block in zip(spans, blocks, strict=True):
        features[span] = block
    return features


def embed_rows(backbone: Backbone, inputs: Inputs, rows: Ints, what: str) -> npt.NDArray[np.float32]:
    """Features [n, d] in memory of some examples, read through inputs that remember them from the last time."""
    count = len(rows)
    order = np.arange(count)
    if backbone.kind == "text":  # images are all of one length, and to ask for it would decode them
        order = inputs.by_length(rows)
    batches = [order[start : start + _BATCH] for start in range(0, count, _BATCH)]
    runner = torch_runner(backbone, _device())
    features = np.empty((count, backbone.dim), np.float32)
    for members, batch in zip(batches, inputs.batches(rows[members] for members in batches), strict=True):
        features[members] = _finite(runner(batch), backbone, what)
    return features


def _blocks(
    backbone: Backbone,
    examples: Examples,
    spans: list[slice],
    advance: Callable[[int], None],
    what: str,
    compiling: bool = True,
    numbers: Ints | None = None,
) -> Iterator[npt.NDArray[np.float32]]:
    """Features of each span; the next span is decoded while this one is computed.

    numbers: [n] what the examples are called where one cannot be read.
    """
    runner: Runner | None = None
    with ThreadPoolExecutor(_WORKERS) as pool:

        def prepare(span: slice) -> list[Future[list[Any]]]:
            starts = range(span.start, span.stop, _BATCH)
            return [
                pool.submit(_prepared, backbone, examples, at, min(at + _BATCH, span.stop), what, numbers)
                for at in starts
            ]

        waiting = prepare(spans[0])
        for position in range(len(spans)):
            try:
                inputs = [value for future in waiting for value in future.result()]
            except HeadstartError as error:
                pool.shutdown(cancel_futures=True)
                if isinstance(error, UnreadableError):
                    raise all_unreadable(what, {"": examples}, backbone.pixel_range, error) from None
                raise
            if position + 1 < len(spans):
                waiting = prepare(spans[position + 1])
            # Texts of like length share a batch, so that little is padded; images are all of one length.
            order = sorted(range(len(inputs)), key=[len(value) for value in inputs].__getitem__)
            features = np.empty((len(inputs), backbone.dim), np.float32)
            for start in range(0, len(inputs), _BATCH):
                members = list(order[start : start + _BATCH])
                batch = backbone.transform.collate([inputs[i] for i in members])
                runner = runner or choose_runner(backbone, batch, compiling)
                features[members] = runner(batch)
                advance(len(members))
            yield _finite(features, backbone, what)


def _finite(features: npt.NDArray[np.float32], backbone: Backbone, what: str) -> npt.NDArray[np.float32]:
    if not np.isfinite(features).all():
        if backbone.finite == "forced":
            log.warning(f"{backbone.name} gives NaN or infinity on {what}: zeros stand for these features")
            return np.where(np.isfinite(features).all(axis=1, keepdims=True), features, np.float32(0))
        raise HeadstartError(f"{backbone.name} gives NaN or infinity on {what}; check its weights and preprocessing")
    return features


def choose_runner(backbone: Backbone, batch: tuple[Tensor, ...], compiling: bool = True) -> Runner:
    """A GPU where there is one; OpenVINO for convolutions on a CPU where it agrees with torch; torch otherwise."""
    device = _device()
    plain = torch_runner(backbone, device)
    evaluating = not any(module.training for module in backbone.body.modules())
    if device.type == "cpu" and backbone.convolutional and evaluating and compiling:
        compiled = openvino_runner(backbone, batch)
        if compiled is not None:
            expected, given = plain(batch), compiled(batch)
            error = float(np.abs(given - expected).max() / max(np.abs(expected).max(), 1e-30))
            if error <= _TOLERANCE:
                return compiled
            log.warning(f"OpenVINO differs from torch by {error:.1e} on {backbone.name}; torch is used")
    return plain


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torch_runner(backbone: Backbone, device: torch.device) -> Runner:
    """The body in eager torch, inference mode; images are channels-last."""
    body = backbone.body.to(device)

    def run(batch: tuple[Tensor, ...]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return run_body(body, moved(batch, device)).float().cpu().numpy()

    return run


def openvino_runner(backbone: Backbone, batch: tuple[Tensor, ...]) -> Runner | None:
    """The body compiled by OpenVINO in float32, or None where OpenVINO is not there or cannot read the body."""
    try:
        import openvino
    except ImportError:
        return None
    (images,) = batch
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            shape = openvino.PartialShape([-1, *images.shape[1:]])
            graph = openvino.convert_model(backbone.body, example_input=images[:2], input=[shape])
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",  # some CPUs would silently use bfloat16
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        compiled = openvino.Core().compile_model(graph, "CPU", settings)
    except Exception as error:  # its converter raises what it likes; torch does the work then
        log.warning(f"OpenVINO cannot run {backbone.name} ({type(error).__name__}); torch is used")
        return None
    return lambda batch: np.array(compiled(batch[0].numpy())[0])


def _prepared(
    backbone: Backbone, examples: Examples, start: int, stop: int, what: str, numbers: Ints | None
) -> list[Any]:
    called = range(start, stop) if numbers is None else numbers[start:stop]
    raw = zip(called, examples.raw(start, stop), strict=True)
    return [backbone.transform(value, f"{what}: example {number}") for number, value in raw]
