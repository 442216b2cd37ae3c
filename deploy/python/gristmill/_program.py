"""The gristmill program as a child process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NoReturn

from gristmill._errors import ProgramMissing

#: The program that this package carries.
PACKAGED = pathlib.Path(__file__).parent / "bin" / "gristmill"
# An interrupted program writes its finished rows within 30 s; then it is killed.
_SECONDS_TO_STOP = 40
_PR_SET_PDEATHSIG = 1
# Loaded here: a forked child must not load anything.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Line(str):
    """A line of the program's log, and its level and figures where it has them.

    A line of progress has `rows`, `rows_total`, `failed_rows`, `truncated_rows` and `tokens_per_second` in `fields`.
    """

    level: str
    fields: Mapping[str, Any]

    def __new__(cls, text: str, level: str = "INFO", fields: Mapping[str, Any] | None = None) -> Line:
        line = super().__new__(cls, text)
        line.level = level
        line.fields = fields or {}
        return line

    @classmethod
    def parse(cls, text: str) -> Line:
        """Reads a line of stderr: a JSON object, or text of what is not the program's."""
        text = text.rstrip("\n")
        try:
            entry = json.loads(text)
            message, level = entry.pop("message"), entry.pop("level")
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(text)
        return cls(message, level, entry)


#: What becomes of the program's lines: True and None print them on `sys.stderr`, False drops them, a function is called with each.
Progress = Callable[[Line], object] | bool | None


def main() -> NoReturn:
    """Becomes the packaged program: the command `gristmill`."""
    try:
        os.execv(PACKAGED, ["gristmill", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"gristmill: this package carries no program that runs here: {error}")


def find(program: str | os.PathLike[str] | None) -> str:
    """The path of the program: the given one, the packaged one, or the first on PATH."""
    if program is not None:
        return os.fspath(program)
    found = str(PACKAGED) if PACKAGED.exists() else shutil.which("gristmill")
    if found is None:
        raise ProgramMissing("this package carries no program, and there is no `gristmill` on PATH")
    return found


class Ended:
    """How a command ended: its exit code (negative: the signal that killed it), its result, and its message."""

    def __init__(self, code: int, stdout: str, lines: Sequence[Line]) -> None:
        self.code = code
        self.result = _last_object(stdout)
        self.message = _message(lines)


def _last_object(stdout: str) -> dict[str, Any] | None:
    """The JSON object on the last line of stdout."""
    lines = stdout.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        result = json.loads(lines[-1])
        return result if isinstance(result, dict) else None
    return None


def _message(lines: Sequence[Line]) -> str:
    """What went wrong: the last error, else the last line."""
    for line in reversed(lines):
        if line.level == "ERROR":
            return str(line)
    return next((str(line) for line in reversed(lines) if line.strip()), "")


def _print(line: Line) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    # A notebook's kernel that is killed takes the program with it, which would compute on unseen.
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def execute(
    arguments: Sequence[str],
    *,
    stdin: str | None = None,
    progress: Progress = None,
    program: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a command to its end.

    An exception in between, such as KeyboardInterrupt, has the program write its finished rows and end before the exception goes on.
    """
    show = progress if callable(progress) else _drop if progress is False else _print
    path = find(program)
    with contextlib.ExitStack() as open_files:
        text: IO[str] | int = subprocess.DEVNULL
        if stdin is not None:
            text = open_files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            text.write(stdin)
            text.seek(0)
        try:
            child = subprocess.Popen(
                [path, "--log-format", "json", *arguments],
                env={**os.environ, **(env or {})},
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C in a terminal reaches a whole process group. A second SIGINT would end the program at once.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise ProgramMissing(f"cannot start `{path}`: {error}") from error
    return _follow(child, show)


def _drop(_line: Line) -> None:
    pass


def _follow(child: subprocess.Popen[str], show: Callable[[Line], object]) -> Ended:
    assert child.stdout is not None and child.stderr is not None
    stdout: list[str] = []
    reader = threading.Thread(target=lambda out: stdout.append(out.read()), args=(child.stdout,), daemon=True)
    lines: list[Line] = []
    with child.stdout, child.stderr, _ends_before_exceptions(child):
        reader.start()
        # Lines are shown in the caller's thread, which is the one whose output a notebook puts below the cell.
        for text in child.stderr:
            line = Line.parse(text)
            # The message of an exception needs the end alone, and a night's log is long.
            lines = [*lines[-99:], line]
            show(line)
        child.wait()
        reader.join()
    return Ended(child.returncode, "".join(stdout), lines)


@contextlib.contextmanager
def _ends_before_exceptions(child: subprocess.Popen[str]) -> Iterator[None]:
    """Interrupts the program on an exception and waits for its end. Another exception while it waits kills the program."""
    try:
        yield
    except BaseException:
        assert child.stderr is not None
        overdue = threading.Timer(_SECONDS_TO_STOP, child.kill)
        overdue.daemon = True
        overdue.start()
        try:
            child.send_signal(signal.SIGINT)
            # A full pipe would keep the program from ending.
            for _ in child.stderr:
                pass
            child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        finally:
            overdue.cancel()
        raise
