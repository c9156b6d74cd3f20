"""The papers' tables as data, and the recipes and formulas that give them again."""

from headstart.published.reproduce import COLUMNS, Found, listed, published, published_or_why, reproduce
from headstart.published.tables import Row, rows, select, why_not

__all__ = [
    "COLUMNS", "Found", "Row", "listed", "published", "published_or_why", "reproduce", "rows", "select", "why_not",
]  # fmt: skip
