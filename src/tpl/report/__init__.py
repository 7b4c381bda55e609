"""Comparing runs: a self-contained page, and the same numbers as tables."""

from tpl.report.page import write_page
from tpl.report.tables import markdown, rich_table, summary_rows

__all__ = ["markdown", "rich_table", "summary_rows", "write_page"]
