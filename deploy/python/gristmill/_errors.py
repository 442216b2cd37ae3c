"""Exceptions, one for each exit code of the program that means that there is no finished job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gristmill._types import Report


class GristmillError(Exception):
    """The program ended without a finished job. `str(error)` is its message.

    `report` has the figures up to this point, if the job had begun.
    """

    def __init__(self, message: str, exit_code: int | None = None, report: Report | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.report = report


class ProgramMissing(GristmillError):
    """There is no gristmill program to run."""


class Failed(GristmillError):
    """Code 1: device, store or broker failed, or a guarantee is violated."""


class BadJob(GristmillError):
    """Code 2: the job, an input or an argument is bad."""


class Stopped(GristmillError):
    """Code 4: budget or deadline reached. The job goes on once they are raised."""


class Cancelled(GristmillError):
    """Code 5: the job was cancelled."""


class Interrupted(GristmillError):
    """Code 6: ended by SIGINT or SIGTERM after finished rows were written. The same call goes on with the job."""


class DeviceLost(GristmillError):
    """Code 7: the GPU failed. Finished rows are written, and the same call goes on with the job."""


class Killed(GristmillError):
    """A signal killed the program, as the kernel does when memory is short. The same call goes on with the job.

    `exit_code` is the signal's number, negated.
    """


_BY_EXIT_CODE: dict[int, type[GristmillError]] = {
    1: Failed,
    2: BadJob,
    4: Stopped,
    5: Cancelled,
    6: Interrupted,
    7: DeviceLost,
}


def error_of(exit_code: int, message: str, report: Report | None = None) -> GristmillError:
    """The exception for an exit code."""
    if exit_code < 0:
        return Killed(f"gristmill was killed by signal {-exit_code}", exit_code, report)
    kind = _BY_EXIT_CODE.get(exit_code, GristmillError)
    return kind(message or f"gristmill ended with exit code {exit_code}", exit_code, report)
