"""What headstart does beside the rounds of `benchmarks.peers`, each beside what it cannot do without, in one process.

FedMeZO's round beside two forward passes, a closed form from raw images beside the images through the same network,
rounds of LoRA beside the same steps in plain `peft` and PyTorch, a run from the command line beside its imports.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

TEXTS, IMAGES, SIDE, BATCH, CLIENTS, CLASSES = 128, 256, 128, 32, 4, 4
MODEL = {"backbone": "all-MiniLM-L6-v2", "max_tokens": 64}
TITLES = {
    "mezo": (
        f"a round of FedMeZO, all of MiniLM, {TEXTS} texts at {CLIENTS} clients",
        "two forward passes over the same texts",
    ),
    "raw": (
        f"FedNCM from {IMAGES} raw images, SqueezeNet 1.1 at {SIDE} px, with loading and compiling",
        "the prepared images through the same network",
    ),
    "lora": (
        f"a round of LoRA in all blocks of MiniLM, {TEXTS} texts at {CLIENTS} clients, batches of {BATCH}",
        "the same passes in plain `peft` and PyTorch",
    ),
    "cold": ("`headstart run`, FedNCM on 1,000 features, no bytecode yet", "NumPy, SciPy, pydantic, typer imported"),
    "warm": ("the same once more", "NumPy, SciPy, pydantic, typer imported"),
}
IMPORTS = "import numpy, scipy.sparse, scipy.linalg, pydantic, typer, rich, safetensors.numpy"


def table(X: Any) -> dict[str, Any]:
    """Examples dealt to the clients in turn, and a few to test."""
    count = len(X)
    return {
        "X": X, "y": np.arange(count) % CLASSES, "client": np.arange(count) // CLASSES % CLIENTS,
        "split": np.where(np.arange(count) < count - 2 * CLASSES, 0, 2),
    }  # fmt: skip


def texts(count: int) -> list[str]:
    """Texts of 8 to 24 words."""
    rng = np.random.default_rng(0)
    words = (
        "the",
        "of",
        "a",
        "federated",
        "model",
        "starts",
        "from",
        "good",
        "heads",
        "that",
        "few",
        "clients",
        "have",
    )
    return [" ".join(rng.choice(words, rng.integers(8, 25))) for _ in range(count)]


def rounds(stage: dict[str, Any]) -> float:
    """Seconds of a round after the first."""
    from headstart.runner import run

    found: list[dict[str, Any]] = []
    run({"model": MODEL, "stages": [stage | {"rounds": 4}]}, data=table(texts(TEXTS + 8)), on_metrics=found.append)
    return float(np.median(np.diff([line["seconds"] for line in found if line["round"]])))


def batches_of(size: int) -> tuple[Any, Iterator[tuple[Any, ...]]]:
    """A backbone, and its batches of the texts, shortest first."""
    from headstart.backbones import load_backbone
    from headstart.config.recipe import Model

    backbone = load_backbone(Model(**MODEL))  # type: ignore[arg-type]
    ready = sorted((backbone.transform(text, "a text") for text in texts(TEXTS)), key=len)
    return backbone, (backbone.transform.collate(ready[i : i + size]) for i in range(0, TEXTS, size))


def least(work: Callable[[], object]) -> float:
    """Seconds of the fastest of three calls."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(3))


def mezo() -> dict[str, float]:
    import torch

    taken = rounds({"method": "fedmezo", "train": "all", "lr": 1e-6})
    backbone, read = batches_of(TEXTS // CLIENTS)
    given, body = list(read), backbone.body.eval()
    with torch.inference_mode():
        bound = least(lambda: [body(*batch) for _ in range(2) for batch in given])
    return {"seconds": taken, "limit": bound}


def lora() -> dict[str, float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    taken = rounds({"method": "fedavg", "train": "lora", "lr": 0.01, "batch_size": BATCH, "momentum": 0.9})
    backbone, read = batches_of(BATCH)
    given, core = list(read), AutoModel.from_pretrained(backbone.core.name_or_path)
    plain = get_peft_model(core, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])).train()
    optimiser = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.01, momentum=0.9)

    def loop() -> None:
        for ids, mask, kinds in given:
            optimiser.zero_grad()
            states = plain(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state
            torch.autograd.backward(states.square().mean())
            optimiser.step()

    return {"seconds": taken, "limit": least(loop)}


def raw() -> dict[str, float]:
    from headstart.backbones import load_backbone
    from headstart.backbones.extract import choose_runner
    from headstart.config.recipe import Model
    from headstart.runner import run

    images = np.random.default_rng(0).integers(0, 255, (IMAGES + 8, 64, 64, 3), np.uint8)
    model = {"backbone": "squeezenet1_1", "weights": "random", "image_size": SIDE}
    with TemporaryDirectory() as folder:
        os.environ["HEADSTART_CACHE"] = folder
        start = time.perf_counter()
        run({"model": model, "stages": [{"method": "fedncm"}]}, data=table(images))
        taken = time.perf_counter() - start
    backbone = load_backbone(Model(**model))  # type: ignore[arg-type]
    ready = [backbone.transform(image, "an image") for image in images]
    given = [backbone.transform.collate(ready[i : i + BATCH]) for i in range(0, len(ready), BATCH)]
    runner = choose_runner(backbone, given[0])
    return {"seconds": taken, "limit": least(lambda: [runner(batch) for batch in given])}


def startup() -> dict[str, dict[str, float]]:
    """`headstart run` on features: wall and CPU seconds, before there is any bytecode and after."""
    rng, count = np.random.default_rng(0), 1000
    with TemporaryDirectory() as folder:
        y = np.arange(count) % 10
        X = rng.standard_normal((count, 64)).astype(np.float32)
        np.savez(f"{folder}/f.npz", X=X, y=y, split=np.where(np.arange(count) < 900, 0, 2), client=y)
        recipe = '[data]\ndataset = "f.npz"\npartition = {kind = "natural"}\n[model]\nbackbone = "features"\n'
        Path(folder, "r.toml").write_text(recipe + '[[stages]]\nmethod = "fedncm"\n', encoding="utf-8")
        environ = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}

        def of(*arguments: str) -> dict[str, float]:
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=folder, env=environ, check=True, capture_output=True)
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
            return {"seconds": wall, "cpu": sum(a - b for a, b in zip(after[:2], before[:2], strict=True))}

        def command() -> dict[str, float]:
            return of("-m", "headstart", "run", "r.toml", "--out", f"out{time.perf_counter_ns()}")

        cold = command()
        warm = min((command() for _ in range(3)), key=lambda each: each["seconds"])
        of("-c", IMPORTS)
        bound = min((of("-c", IMPORTS) for _ in range(3)), key=lambda each: each["seconds"])
    return {name: each | {"limit": bound["seconds"]} for name, each in (("cold", cold), ("warm", warm))}
