"""Every method in its variants, as the tables of recipes: what the shared tests go through."""

from typing import Any

from headstart.config.recipe import Recipe

VARIANTS: dict[str, dict[str, Any]] = {
    "fedncm": {"method": "fedncm"},
    "fedncm-euclidean": {"method": "fedncm", "distance": "euclidean"},
    "fedncm-centres": {"method": "fedncm", "centres": 3, "iterations": 2},
    "fed3r": {"method": "fed3r"},
    "fed3r-paper": {"method": "fed3r", "ridge": 0.01, "bias": False},
    "fed3r-random-features": {"method": "fed3r", "random_features": 30},
    "fedcof": {"method": "fedcof"},
    "fedcof-paper": {"method": "fedcof", "shrinkage": 1.0, "within": "estimated"},
    "fedcof-trace": {"method": "fedcof", "within": "trace"},
    "fedcof-told-diagonal": {"method": "fedcof", "within": "diagonal"},
    "fedcof-rank": {"method": "fedcof", "rank": 2, "means_per_client": 2},
    "fedcof-means": {"method": "fedcof", "means_per_client": 3},
    "fedcof-full": {"method": "fedcof", "covariance": "full"},
    "fedcof-diagonal": {"method": "fedcof", "covariance": "diagonal"},
    "fedcof-spherical": {"method": "fedcof", "covariance": "spherical"},
    "fedcof-lda": {"method": "fedcof", "head": "lda"},
    "fed3r-lda": {"method": "fed3r", "head": "lda", "prior": "uniform"},
    "fedncm-temperature": {"method": "fedncm", "temperature": "auto"},
    "fed3r-temperature": {"method": "fed3r", "temperature": "auto"},
    "fedcof-temperature": {"method": "fedcof", "temperature": "auto"},
}
LOCAL = {"train": "head", "rounds": 4, "lr": 0.002, "batch_size": 20, "local_epochs": 2}
TRAINING: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedavg-everything": {
        "method": "fedavg", "momentum": 0.5, "weight_decay": 0.01, "clip": 5.0, "temperature": 0.5,
        "schedule": "cosine", "warmup_rounds": 1, "weighting": "uniform", "server_lr": 0.5, "head_init": "zeros",
    },
    "fedprox": {"method": "fedprox", "mu": 0.1},
    "fedavgm": {"method": "fedavgm"},
    "fedadam": {"method": "fedadam"},
    "fedadam-torch": {"method": "fedadam", "beta2": 0.999, "tau": 1e-8, "bias_correction": True},
    "fedyogi": {"method": "fedyogi"},
    "fedadagrad": {"method": "fedadagrad"},
    "feddyn": {"method": "feddyn", "alpha_dyn": 0.1},
    "scaffold": {"method": "scaffold"},
    "fednova": {"method": "fednova", "momentum": 0.5, "mu": 0.01},
    "centralised": {"method": "centralised", "momentum": 0.9},
    "fedavg-mlp": {"method": "fedavg", "head": "mlp", "hidden": 12, "lr": 0.01},
    "scaffold-mlp": {"method": "scaffold", "head": "mlp", "hidden": 12, "lr": 0.01},
}  # fmt: skip
ZEROTH: dict[str, dict[str, Any]] = {
    "fedmezo": {"method": "fedmezo", "num_directions": 3},
    "fedmezo-batches": {"method": "fedmezo", "batch_size": 8, "weighting": "uniform", "weight_decay": 0.1},
    "fedmezo-adam": {"method": "fedmezo", "momentum": 0.5, "beta2": 0.9},
    "fedmezo-probe": {"method": "fedmezo", "probe_rounds": 2, "lr": 0.3, "num_directions": 2},
    "distmezo": {"method": "distmezo", "local_steps": 2, "num_directions": 2},
}
MLP = {"head": "mlp", "hidden": 12, "lr": 0.01, "momentum": 0.5}
PERSONAL: dict[str, dict[str, Any]] = {
    "fedbabu": MLP | {"method": "fedbabu", "mu": 0.1},
    "fedper": MLP | {"method": "fedper"},
    "fedrep": MLP | {"method": "fedrep", "head_epochs": 2},
    "lg-fedavg": MLP | {"method": "lg-fedavg"},
    "per-fedavg": {"method": "per-fedavg", "momentum": 0.5},
    "per-fedavg-mlp": MLP | {"method": "per-fedavg"},
    "ditto": {"method": "ditto", "momentum": 0.5},
    "ditto-mlp": MLP | {"method": "ditto", "lambda_ditto": 0.1},
    "local-only": {"method": "local-only", "momentum": 0.9},
    "local-only-plain": MLP | {"method": "local-only", "momentum": 0.0},
    "fedavg-share": {"method": "fedavg", "share": 0.3},
}
PERSONALISE: dict[str, dict[str, Any]] = {
    "personalise": {"method": "personalise", "update": "head", "epochs": 3, "lr": 0.002, "batch_size": 20},
    "personalise-computed": {"method": "personalise", "compute": "fedncm"},
}
PERSONAL_METHODS = ("fedper", "fedrep", "lg-fedavg", "ditto", "local-only", "personalise")
SILENT = ("local-only", "local-only-plain", *PERSONALISE)
CLOSED_FORM = list(VARIANTS)
VARIANTS |= {name: LOCAL | keys for name, keys in (TRAINING | PERSONAL).items()} | PERSONALISE
VARIANTS |= {name: {"train": "head", "rounds": 4, "lr": 1e-3} | keys for name, keys in ZEROTH.items()}
ON_MODULES = ("slora", "fedyolo", "fedex-lora", "flexlora", "fedsa-lora")
"""Methods that need a transformer to put modules on; their heads are FedAvg's."""
CLIENTS = 12


def recipe_of(variant: str, **keys: Any) -> Recipe:
    """With the keys that the variant has: the oracle has no clients to draw, and who personalises is everybody."""
    if variant in ("centralised", *PERSONALISE):
        keys = {name: value for name, value in keys.items() if name != "clients_per_round"}
    if "probe_rounds" in VARIANTS[variant] and "rounds" in keys:  # one at least steps
        keys["probe_rounds"] = min(VARIANTS[variant]["probe_rounds"], keys["rounds"] - 1)
    if variant in PERSONALISE and "rounds" in keys:
        keys["epochs"] = keys.pop("rounds")
    partition = {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.2}
    return Recipe.parse(
        {
            "data": {"dataset": "digits", "partition": partition},
            "model": {"backbone": "features"},
            "stages": [VARIANTS[variant] | keys],
        }
    )
