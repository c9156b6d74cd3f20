"""Images per second through a frozen body: eager channels-last torch against what headstart runs, on one machine."""

from __future__ import annotations

import os
import tempfile
import time

import torch

from benchmarks.common import THREADS, alternate, show
from headstart.backbones import extract, load_backbone
from headstart.backbones.extract import choose_runner, torch_runner
from headstart.config.recipe import Data, Model
from headstart.data import Examples, load_dataset

BATCH, IMAGES = 32, 4000


def main() -> None:
    torch.set_num_threads(THREADS)
    examples = load_dataset(Data(dataset="mnist-mini", train_examples=IMAGES)).train
    models = (Model(backbone="squeezenet1_1", weights="random"), Model(backbone="efficientnet-lite0"))
    columns = (
        "body",
        "eager torch, images/s",
        "headstart's runner",
        "ratio",
        "from raw images to the cache",
    )
    title = f"Extraction, 224 px, {THREADS} threads, batches of {BATCH}, median of 7"
    show(title, columns, [measure(model, examples) for model in models])


def measure(model: Model, examples: Examples) -> tuple[str, ...]:
    backbone = load_backbone(model)
    prepared = [backbone.transform(value, "image") for value in examples.raw(0, BATCH)]
    batch = backbone.transform.collate(prepared)
    eager, ours = torch_runner(backbone, torch.device("cpu")), choose_runner(backbone, batch)
    seconds = alternate({"eager": lambda: eager(batch), "ours": lambda: ours(batch)}, 7)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HEADSTART_CACHE"] = folder
        start = time.perf_counter()
        extract(backbone, examples)
        whole = time.perf_counter() - start
        del os.environ["HEADSTART_CACHE"]
    rates = (BATCH / seconds["eager"], BATCH / seconds["ours"])
    return model.backbone, f"{rates[0]:.0f}", f"{rates[1]:.0f}", f"{rates[1] / rates[0]:.2f}", f"{IMAGES / whole:.0f}"
