"""Runs whole datasets through a language model at the lowest cost per token, by the gristmill program.

    import gristmill

    result = gristmill.run("jobs/label-tickets.yaml", limit=100)
    print(result.report["rows"], result.dataset().head(5))
"""

from importlib import metadata

from gristmill._errors import (
    BadJob,
    Cancelled,
    DeviceLost,
    Failed,
    GristmillError,
    Interrupted,
    Killed,
    ProgramMissing,
    Stopped,
)
from gristmill._job import Job, Result, run, status, submit
from gristmill._program import Line, Progress
from gristmill._types import Report, RowCounts, Status, Submitted, TokenCounts

try:
    __version__ = metadata.version("gristmill")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"

__all__ = [
    "BadJob",
    "Cancelled",
    "DeviceLost",
    "Failed",
    "GristmillError",
    "Interrupted",
    "Job",
    "Killed",
    "Line",
    "ProgramMissing",
    "Progress",
    "Report",
    "Result",
    "RowCounts",
    "Status",
    "Stopped",
    "Submitted",
    "TokenCounts",
    "run",
    "status",
    "submit",
]
