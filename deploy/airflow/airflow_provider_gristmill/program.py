"""The gristmill program as a child process: its log lines, its result, and what its exit codes mean for a task."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, AirflowSkipException

# A stopped program writes its finished rows within 30 s; then it is killed.
SECONDS_TO_STOP = 40
PR_SET_PDEATHSIG = 1
_LEVELS = {"TRACE": logging.DEBUG, "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}
# Loaded here: a forked child may not load anything.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

FailedRows = Literal["fail", "keep"]
Stopped = Literal["skip", "fail"]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How the program ended: its exit code (negative: the signal that killed it), its result, and its last log line."""

    code: int
    result: dict[str, Any] | None
    last_line: str


def log_line(line: str) -> tuple[int, str]:
    """Level and message of a log line, which is JSON unless it comes from the command line's parser."""
    try:
        entry = json.loads(line)
        return _LEVELS[entry["level"]], entry["message"]
    except (ValueError, KeyError, TypeError):
        return logging.INFO, line


def result_of(stdout: str) -> dict[str, Any] | None:
    """The result: the JSON object on the last line of stdout. None where there is none."""
    lines = stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def _end_with_parent() -> None:
    # A task that is killed takes the program with it, so that the task's retry does not compute beside it.
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Program:
    """Runs the program, one command at a time, and can be stopped from a signal handler."""

    def __init__(self, path: str, env: Mapping[str, str], log: Any) -> None:
        self.path = path
        self.env = {**env, "GRISTMILL_LOG_FORMAT": "json"}
        self.log = log
        self._child: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str]) -> Ended:
        """Runs a command to its end. Its log lines go to the task's log as they come."""
        try:
            self._child = subprocess.Popen(
                [self.path, *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise AirflowFailException(
                f"cannot start `{self.path}` ({error}): install gristmill where tasks run, or name its path in `program`"
            ) from error
        child = self._child
        last = [""]

        def forward() -> None:
            assert child.stderr is not None
            for line in child.stderr:
                level, last[0] = log_line(line.rstrip("\n"))
                self.log.log(level, "%s", last[0])

        reader = threading.Thread(target=forward, daemon=True)
        reader.start()
        assert child.stdout is not None
        stdout = child.stdout.read()
        code = child.wait()
        reader.join()
        self._child = None
        return Ended(code, result_of(stdout), last[0])

    def stop(self) -> None:
        """Has the running command write its finished rows and end."""
        child = self._child
        if child is None or child.poll() is not None:
            return
        child.terminate()
        try:
            child.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            child.kill()


def task_result(ended: Ended, *, failed_rows: FailedRows, stopped: Stopped) -> dict[str, Any]:
    """The result of a job for XCom, or the exception that says how the task ends.

    AirflowFailException where another try would end the same way, AirflowException where it would go on with the job.
    """
    said = ended.last_line or f"exit code {ended.code}"
    match ended.code:
        case 0 | 3 if ended.result is None:
            raise AirflowException("gristmill printed no result")
        case 0:
            return ended.result
        case 3:
            rows = ended.result.get("rows", {})
            failed = rows.get("total", 0) - rows.get("succeeded", 0)
            if failed_rows == "keep":
                return ended.result
            raise AirflowFailException(
                f"{failed:,} of {rows.get('total', 0):,} rows did not succeed; the column `error` of "
                f"{ended.result.get('output')} says why. `gristmill retry` computes them again; `failed_rows=\"keep\"` accepts them"
            )
        case 4 if stopped == "skip":
            raise AirflowSkipException(said)
        case 2 | 4 | 5:
            raise AirflowFailException(said)
        case code if code < 0:
            raise AirflowException(f"gristmill was killed by signal {-code}; another try goes on where it was")
        case _:
            raise AirflowException(said)
