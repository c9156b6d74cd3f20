"""One readable file per method."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from headstart.methods.base import Cohort, Method, Reply, Setting, StatisticsMethod, TaskSetting
from headstart.methods.tasks import PerTask
from headstart.stages import ClosedForm, Rounds

METHODS: Mapping[str, str] = {
    "fedncm": "fedncm.FedNCMMethod",
    "fed3r": "fed3r.Fed3RMethod",
    "fedcof": "fedcof.FedCOFMethod",
    "fedavg": "fedavg.FedAvgMethod",
    "fedprox": "fedprox.FedProxMethod",
    "fedavgm": "fedopt.FedAvgMMethod",
    "fedadam": "fedopt.FedAdamMethod",
    "fedyogi": "fedopt.FedYogiMethod",
    "fedadagrad": "fedopt.FedAdagradMethod",
    "feddyn": "feddyn.FedDynMethod",
    "scaffold": "scaffold.ScaffoldMethod",
    "fednova": "fednova.FedNovaMethod",
    "centralised": "centralised.CentralisedMethod",
    "slora": "slora.SLoRAMethod",
    "fedmezo": "fedmezo.FedMeZOMethod",
    "distmezo": "distmezo.DistMeZOMethod",
    "fedyolo": "fedyolo.FedYoloMethod",
    "fedbabu": "fedbabu.FedBABUMethod",
    "fedper": "fedper.FedPerMethod",
    "fedrep": "fedrep.FedRepMethod",
    "lg-fedavg": "lg_fedavg.LGFedAvgMethod",
    "per-fedavg": "per_fedavg.PerFedAvgMethod",
    "ditto": "ditto.DittoMethod",
    "local-only": "local_only.LocalOnlyMethod",
    "personalise": "personalise.PersonaliseMethod",
}
"""Where each method lives; a method is imported when it is used, so that closed-form ones do not wait for torch."""


def build(stage: ClosedForm | Rounds, setting: Setting) -> Method[Any]:
    """The method of a stage."""
    module, name = METHODS[stage.method].split(".")
    kind = getattr(import_module(f"headstart.methods.{module}"), name)
    if setting.tasks and isinstance(stage, ClosedForm):
        return PerTask(partial(kind, stage), setting)
    method: Method[Any] = kind(stage, setting)
    return method


__all__ = ["METHODS", "Cohort", "Method", "Reply", "Setting", "StatisticsMethod", "TaskSetting", "build"]
