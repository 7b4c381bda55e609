"""Comparing runs: a self-contained page, and the same numbers as tables."""

from tpl.report.page import write_page
from tpl.report.tables import markdown, mean_rows, rich_table, summary_rows

__all__ = ["markdown", "mean_rows", "rich_table", "summary_rows", "write_page"]
