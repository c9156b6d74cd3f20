"""``python -m benchmarks [NAME …]``: all of them, or those named, one after the other."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "extraction",
    "fedcof_server",
    "clients",
    "closed_form",
    "regularisation",
    "heads",
    "training",
    "finetuning",
    "compression",
    "stragglers",
    "mezo",
    "modules",
    "language",
    "personal",
    "privacy",
    "secure",
    "federation",
)

for name in sys.argv[1:] or NAMES:
    importlib.import_module(f"benchmarks.{name}").main()
