"""Logs of a run, progress, and the tables that compare runs."""

from tracefp4.report.events import StepLog
from tracefp4.report.logger import (
    RunFolderError,
    RunLogger,
    create_run_dir,
    ensure_dir,
    read_jsonl,
    write_json_atomic,
)
from tracefp4.report.progress import progress
from tracefp4.report.provenance import provenance
from tracefp4.report.summary import summarize
from tracefp4.report.table import markdown_table, rich_table

__all__ = [
    "RunFolderError",
    "RunLogger",
    "StepLog",
    "create_run_dir",
    "ensure_dir",
    "markdown_table",
    "progress",
    "provenance",
    "read_jsonl",
    "rich_table",
    "summarize",
    "write_json_atomic",
]
