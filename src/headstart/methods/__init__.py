"""One readable file per method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, get_args

from headstart.config.recipe import Recipe
from headstart.config.stage import FAMILIES, STAGES, ClosedForm, Rounds
from headstart.errors import HeadstartError
from headstart.methods.base import Method, Reply, Setting, StatisticsMethod, TaskSetting
from headstart.methods.tasks import PerTask

Maker = Callable[[Any, Setting], Any]
"""What makes the `Method` of a stage: usually the method's class."""


def _later(place: str) -> Maker:
    """A method that is imported when it is used, so that closed-form ones do not wait for torch."""

    def make(stage: Any, setting: Setting) -> Any:
        module, name = place.split(".")
        return getattr(import_module(f"headstart.methods.{module}"), name)(stage, setting)

    return make


METHODS: dict[str, Maker] = {
    "fedncm": _later("fedncm.FedNCMMethod"),
    "fed3r": _later("fed3r.Fed3RMethod"),
    "fedcof": _later("fedcof.FedCOFMethod"),
    "fedavg": _later("fedavg.FedAvgMethod"),
    "fedprox": _later("fedprox.FedProxMethod"),
    "fedavgm": _later("fedopt.FedAvgMMethod"),
    "fedadam": _later("fedopt.FedAdamMethod"),
    "fedyogi": _later("fedopt.FedYogiMethod"),
    "fedadagrad": _later("fedopt.FedAdagradMethod"),
    "feddyn": _later("feddyn.FedDynMethod"),
    "scaffold": _later("scaffold.ScaffoldMethod"),
    "fednova": _later("fednova.FedNovaMethod"),
    "centralised": _later("centralised.CentralisedMethod"),
    "slora": _later("slora.SLoRAMethod"),
    "fedmezo": _later("fedmezo.FedMeZOMethod"),
    "distmezo": _later("distmezo.DistMeZOMethod"),
    "fedyolo": _later("fedyolo.FedYoloMethod"),
    "fedbabu": _later("fedbabu.FedBABUMethod"),
    "fedper": _later("fedper.FedPerMethod"),
    "fedrep": _later("fedrep.FedRepMethod"),
    "lg-fedavg": _later("lg_fedavg.LGFedAvgMethod"),
    "per-fedavg": _later("per_fedavg.PerFedAvgMethod"),
    "ditto": _later("ditto.DittoMethod"),
    "local-only": _later("local_only.LocalOnlyMethod"),
    "personalise": _later("personalise.PersonaliseMethod"),
}
"""The method of every stage in `STAGES`, by the same name; `register` adds to both."""


def register(stage: type[ClosedForm | Rounds], method: Maker) -> None:
    """Add a method: recipes may name it from now on, and `headstart methods` lists it.

    stage: the table of a recipe, a subclass of one of the families in `headstart.config.stage`, with
    ``method: Literal["its-name"]``, its keys and their defaults; method: a class with the verbs of `Method`, called
    with a stage and a `Setting`. A class that is defined again, as in a notebook, takes the place of its former self.
    """
    if not (isinstance(stage, type) and issubclass(stage, FAMILIES)):
        families = ", ".join(family.__name__ for family in FAMILIES)
        raise HeadstartError(
            f"{stage!r} is no stage: make it a subclass of one of {families} in headstart.config.stage"
        )
    names = get_args(stage.model_fields["method"].annotation)
    if len(names) != 1 or not isinstance(names[0], str):
        raise HeadstartError(f'{stage.__name__} names no method: give it the key method: Literal["its-name"]')
    taken = STAGES.get(names[0], stage)
    if (taken.__module__, taken.__qualname__) != (stage.__module__, stage.__qualname__):
        raise HeadstartError(f"{names[0]!r} is the method of {taken.__name__} already; choose another name")
    STAGES[names[0]], METHODS[names[0]] = stage, method
    Recipe.model_rebuild(force=True)


def build(stage: ClosedForm | Rounds, setting: Setting) -> Method[Any]:
    """The method of a stage."""
    make = METHODS[stage.method]
    if setting.tasks and isinstance(stage, ClosedForm):
        return PerTask(partial(make, stage), setting)
    method: Method[Any] = make(stage, setting)
    return method


__all__ = [
    "METHODS",
    "Method",
    "Reply",
    "Setting",
    "StatisticsMethod",
    "TaskSetting",
    "build",
    "register",
]
