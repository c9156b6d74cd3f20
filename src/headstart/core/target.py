"""What is learned of an example."""

from __future__ import annotations

from typing import Literal

Target = Literal["classes", "regression", "multilabel"]
"""Its class, numbers, or which of several labels it has."""
