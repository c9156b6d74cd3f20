"""Tables, pictures, and one self-contained page of one run or of several."""

from headstart.report.figures import partition_figure, save
from headstart.report.page import STYLE, html_page, html_table, report_body, write_figures, write_folder, write_report
from headstart.report.tables import COLUMNS as SUMMARY_COLUMNS
from headstart.report.tables import (
    human_bytes,
    latex,
    markdown,
    metric_cell,
    metric_heading,
    metrics_of,
    partition_table,
    percent,
    quality,
    remarks,
    score,
    stage_cells,
    summary_table,
    table_files,
    write_tables,
)

__all__ = [
    "STYLE",
    "SUMMARY_COLUMNS",
    "html_page",
    "html_table",
    "human_bytes",
    "latex",
    "markdown",
    "metric_cell",
    "metric_heading",
    "metrics_of",
    "partition_figure",
    "partition_table",
    "percent",
    "quality",
    "remarks",
    "report_body",
    "save",
    "score",
    "stage_cells",
    "summary_table",
    "table_files",
    "write_figures",
    "write_folder",
    "write_report",
    "write_tables",
]
