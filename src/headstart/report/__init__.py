"""Tables, pictures, and one self-contained page of one run or of several."""

from headstart.report.figures import partition_figure, save
from headstart.report.page import STYLE, html_page, html_table, report_body, write_folder, write_report
from headstart.report.tables import (
    accuracy_cell,
    human_bytes,
    partition_table,
    percent,
    remarks,
    summary_table,
    table_files,
    write_tables,
)

__all__ = [
    "STYLE",
    "accuracy_cell",
    "html_page",
    "html_table",
    "human_bytes",
    "partition_figure",
    "partition_table",
    "percent",
    "remarks",
    "report_body",
    "save",
    "summary_table",
    "table_files",
    "write_folder",
    "write_report",
    "write_tables",
]
