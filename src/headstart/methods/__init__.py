"""One readable file per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headstart.methods.base import Cohort, Method, Reply, Setting, StatisticsMethod
from headstart.methods.fed3r import Fed3RMethod
from headstart.methods.fedcof import FedCOFMethod
from headstart.methods.fedncm import FedNCMMethod

METHODS: Mapping[str, Callable[[Any, Setting], Method[Any]]] = {
    "fedncm": FedNCMMethod,
    "fed3r": Fed3RMethod,
    "fedcof": FedCOFMethod,
}

__all__ = ["METHODS", "Cohort", "Method", "Reply", "Setting", "StatisticsMethod"]
