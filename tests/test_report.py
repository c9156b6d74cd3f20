import numpy as np
import pytest
from rich.console import Console

from headstart.report.tables import human_bytes, partition_table, summary_table

STAGE = {
    "method": "fedcof",
    "accuracy": 0.9431,
    "rounds": 1,
    "bytes_up": 329_900_000,
    "bytes_down": 2_800,
    "published_bytes": 328_600_000,
    "forward_passes": 1_234_567,
    "seconds": 12.345,
    "chosen": {"shrinkage": 0.01779},
}


def printed(table: object, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (974_464, "974.5 kB"), (5e9, "5.0 GB"), (7e12, "7.0 TB")],
)
def test_bytes_in_the_units_of_the_papers(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_the_summary_fits_a_terminal_of_eighty_columns() -> None:
    text = printed(summary_table({"name": "demo", "clients": 50, "examples": 4000, "stages": [STAGE]}), 80)
    assert "…" not in text
    for cell in ("fedcof γ 0.0178", "94.31 %", "329.9 MB", "2.8 kB", "328.6 MB", "1,234,567", "12.35"):
        assert cell in text, text


def test_the_partition_table_says_what_it_leaves_out() -> None:
    counts = np.ones((25, 30), np.int64)
    counts[0, 0] = 0
    text = printed(partition_table(tuple(f"c{k}" for k in range(25)), tuple(f"k{c}" for c in range(30)), counts), 300)
    assert "25 clients, 30 classes, 749 training examples" in text
    assert "… 5 more" in text
    assert "10 more" in text
    first = next(line for line in text.splitlines() if " c0 " in line)
    assert "·" in first
    assert first.split("│")[-3:-1] == ["      29 ", "       29 "]
