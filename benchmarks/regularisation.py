"""What `ridge = "auto"` and `shrinkage = "auto"` choose, against fixed values, on real features (Dirichlet 0.1)."""

from __future__ import annotations

import os

import numpy as np

from benchmarks.common import SHARED, show
from headstart.config.recipe import Recipe
from headstart.data import Federation
from headstart.engine.model_store import ModelStore
from headstart.heads.estimators import Fed3R, FedCOF

SQUEEZENET = {
    "backbone": "squeezenet1_1",
    "weights": str(SHARED / "weights" / "squeezenet1_1-caffe.safetensors"),
    "preprocess": "caffe",
}
LITE0 = {"backbone": "efficientnet-lite0"}
SETTINGS = (
    ("CIFAR-10 / SqueezeNet", "cifar10", SQUEEZENET, 100),
    ("Flowers-102 128 px / SqueezeNet", "flowers102", SQUEEZENET, 100),
    ("Flowers-102 128 px / Lite0", "flowers102", LITE0, 100),
    ("MNIST 4,000 / Lite0", "mnist-mini", LITE0, 50),
)
RIDGES = (0.01, 1.0, 10.0, 100.0, 1_000.0, 10_000.0)
SHARES = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)


def main() -> None:
    os.environ.setdefault("HEADSTART_DATA", str(SHARED / "data"))
    ridge_rows, shrinkage_rows = [], []
    for title, dataset, model, clients in SETTINGS:
        if dataset != "mnist-mini" and not SHARED.is_dir():
            continue
        partition = {"kind": "dirichlet", "clients": clients, "alpha": 0.1, "leftovers": "assign"}
        stages = [{"method": "fed3r"}]
        recipe = Recipe.parse({"data": {"dataset": dataset, "partition": partition}, "model": model, "stages": stages})
        federation = Federation.of(recipe)
        store = ModelStore(recipe.model, federation.dataset)
        held = federation.owners >= 0
        x, y, who = store.features("train")[held], federation.dataset.train.labels[held], federation.owners[held]
        test, test_labels = np.asarray(store.features("test")), federation.dataset.test.labels

        def score(head: Fed3R | FedCOF, x=x, y=y, who=who, test=test, test_labels=test_labels) -> str:  # type: ignore[no-untyped-def]
            return f"{100 * head.fit(x, y, client=who).score(test, test_labels):.2f}"

        auto = Fed3R(bias=False)
        found = score(auto)
        fixed = [score(Fed3R(ridge, bias=False)) for ridge in RIDGES]
        ridge_rows.append((title, *fixed, f"{found} (λ = {auto.head_.notes['ridge']:.3g})", score(Fed3R())))
        cof = FedCOF()
        found = score(cof)
        variance = 2 * cof.head_.notes["shrinkage"]
        shared = [score(FedCOF(share * variance)) for share in SHARES]
        shrinkage_rows.append((f"{title} (v = {variance:.3g})", *shared, found, score(FedCOF(1.0))))
    show(
        "Fed3R: fixed λ against generalised cross-validation on the server",
        ("data / body", *(f"λ = {ridge:g}" for ridge in RIDGES), "auto, no bias", "auto, bias"),
        ridge_rows,
    )
    show(
        "FedCOF: γ = ρ v, v the mean within-class variance estimated from the means",
        ("data / body", *(f"ρ = {share:g}" for share in SHARES), "auto (ρ = 0.5)", "the papers' γ = 1"),
        shrinkage_rows,
    )
