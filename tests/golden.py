"""Hashes of what every method leaves, for comparing two versions of the code on one machine.

    python tests/golden.py > before.json      (in one checkout)
    python tests/golden.py before.json        (in the other: names every file that differs, exit status 1)

Bits of floating-point numbers depend on the processor and on the libraries, so that hashes of one machine say nothing
on another: they are recorded, compared and thrown away.
"""

# ruff: noqa: E402 (the tests have to be found first)
import hashlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers

from headstart.config.recipe import Recipe
from headstart.core.ledger import Ledger
from headstart.runner import run_recipe as runner
from tests.disk import contents
from tests.methods.test_faults import CASES, DIGITS, recipe_of

HEAD = {"train": "head", "rounds": 2}
MORE: dict[str, list[dict[str, Any]]] = {
    "secure-fedncm": [{"method": "fedncm", "secure": True}],
    "secure-fed3r": [{"method": "fed3r", "secure": True}],
    "secure-fedcof": [{"method": "fedcof", "secure": True, "secure_group": 3}],
    "secure-fedavg": [HEAD | {"method": "fedavg", "secure": True}],
    "secure-scaffold": [HEAD | {"method": "scaffold", "secure": True}],
    "secure-fednova": [HEAD | {"method": "fednova", "secure": True}],
    "secure-fedmezo": [HEAD | {"method": "fedmezo", "secure": True}],
    "private-fedncm": [{"method": "fedncm", "privacy": {"epsilon": 5.0}}],
    "private-fed3r": [{"method": "fed3r", "privacy": {"epsilon": 5.0, "noise": "client"}}],
    "private-fedcof": [{"method": "fedcof", "privacy": {"epsilon": 50.0}}],
    "private-fedavg": [HEAD | {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 5.0}}],
    "private-clients": [
        HEAD | {"method": "fedavg", "weighting": "uniform", "privacy": {"epsilon": 5.0, "noise": "client"}}
    ],
    "median": [HEAD | {"method": "fedavg", "combine": "median"}],
    "trimmed": [HEAD | {"method": "fedadam", "combine": "trimmed-mean", "trim": 0.3}],
    "max-norm": [HEAD | {"method": "fedavg", "max_norm": 0.1}],
}
LEFT = ("model/", "metrics.jsonl", "clients.csv", "rounds.csv", "confusion.csv", "holdings.csv", "summary.json")


def prepared(folder: Path) -> tuple[dict[str, Any], str]:
    """A tiny vision transformer, and features with a validation split."""
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    torch.manual_seed(3)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder / "vit")
    rng, y = np.random.default_rng(0), np.arange(90) % 3
    split = np.arange(90) // 3 % 3
    np.savez(folder / "data.npz", X=np.eye(3)[y] + rng.normal(0, 0.8, (90, 3)), y=y, split=split)
    return {"backbone": str(folder / "vit"), "image_size": 8}, str(folder / "data.npz")


def hashes(recipe: Recipe, out: Path) -> dict[str, str]:
    """Of every file that does not tell the time."""
    torch.manual_seed(0)
    runner.run(recipe, out)
    found = {name: data for name, data in contents(out).items() if name.startswith(LEFT)}
    summary = json.loads(found["summary.json"])
    for name in ("versions", "started", "ended", "total_seconds"):
        del summary[name]
    found["summary.json"] = json.dumps(summary, sort_keys=True).encode()
    return {name: hashlib.sha256(data).hexdigest()[:16] for name, data in found.items()}


def main() -> int:
    """Record, or compare with what was recorded."""
    torch.set_num_threads(1)
    Ledger.tick = lambda self: None  # type: ignore[method-assign]
    runner.peak_memory = lambda: 0
    runner.write_report = lambda *arguments: None  # type: ignore[assignment]
    made = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["HEADSTART_CACHE"] = str(folder / "cache")
        vit, features = prepared(folder)
        for case in [*CASES, *MORE]:
            if case in MORE:
                data = DIGITS | {"partition": {"kind": "dirichlet", "clients": 6, "alpha": 1.0}}
                recipe = Recipe.parse({"data": data, "model": {"backbone": "features"}, "stages": MORE[case]})
            else:
                recipe = recipe_of(case, vit, features)
            made |= {f"{case}/{name}": value for name, value in hashes(recipe, folder / case).items()}
    if len(sys.argv) < 2:
        print(json.dumps(made, indent=1))
        return 0
    before = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    differ = sorted(name for name in before.keys() | made.keys() if before.get(name) != made.get(name))
    print("\n".join(differ) or f"the same: {len(made)} files of {len(CASES) + len(MORE)} runs", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
