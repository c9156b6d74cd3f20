"""Tables, pictures, and one self-contained page per run."""

from headstart.report.figures import partition_figure, save
from headstart.report.page import write_report
from headstart.report.tables import human_bytes, latex, markdown, partition_table, remarks, summary_table

__all__ = [
    "human_bytes",
    "latex",
    "markdown",
    "partition_figure",
    "partition_table",
    "remarks",
    "save",
    "summary_table",
    "write_report",
]
