"""Running, submitting and watching jobs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from gristmill import _program
from gristmill._errors import GristmillError, error_of
from gristmill._program import Ended, Progress
from gristmill._types import Report, RunOptions, Status, StrPath, SubmitOptions, Submitted

if TYPE_CHECKING:
    import pyarrow.dataset
    import pyarrow.fs
    from typing_extensions import Unpack

#: A job file's path, or what stands in it. Relative paths of a dict are relative to the working directory.
Job = Mapping[str, Any] | StrPath

_DONE = 0
_FAILED_ROWS = 3
# Arguments of the functions stand for these options.
_OWN_OPTIONS = {"json": "the result is always an object", "set": "give `parameters`", "log_format": "lines come through `progress`"}


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished job."""

    #: The figures that `gristmill run --json` prints.
    report: Report

    @property
    def output(self) -> str:
        """The output's address, such as `file:///data/out` or `s3://labels/2026-11`."""
        return self.report["output"]

    @property
    def failed_rows(self) -> int:
        """Rows that did not succeed. The column `status` of the output names them, and `error` says why."""
        rows = self.report["rows"]
        return rows["total"] - rows["succeeded"]

    def dataset(self, filesystem: pyarrow.fs.FileSystem | None = None) -> pyarrow.dataset.Dataset:
        """The answers. Needs pyarrow, the package's extra of this name.

        `filesystem` replaces the one that pyarrow makes for the address, as for a store with an endpoint of its own.
        """
        import pyarrow.dataset
        import pyarrow.fs

        if filesystem is not None:
            address = urllib.parse.urlsplit(self.output)
            path = urllib.parse.unquote(address.netloc + address.path)
        else:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(self.output)
        selector = pyarrow.fs.FileSelector(path)
        parts = sorted(
            file.path for file in filesystem.get_file_info(selector) if file.base_name.startswith("part-")
        )
        if not parts:
            raise FileNotFoundError(f"{self.output} holds no part")
        kind = "json" if parts[0].endswith(".jsonl") else "parquet"
        return pyarrow.dataset.dataset(parts, filesystem=filesystem, format=kind)


def run(
    job: Job,
    *,
    parameters: Mapping[str, Any] | None = None,
    limit: int | None = None,
    progress: Progress = None,
    program: StrPath | None = None,
    env: Mapping[str, str] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Runs a whole job on this machine. After any interruption, the same call goes on where the job stopped.

    parameters: values of the job file's `${NAME}`. limit: only the first rows, as a trial beside the output.
    progress: a function that is called with each line of the log; False drops the lines, the default prints them on stderr.
    program: another gristmill than the packaged one. env: variables besides those of this process.
    options: those of `gristmill run`, such as `threads=4` for `--threads 4`.

    A job with failed rows is a Result as well. Everything else raises the exception of its exit code.
    """
    ended = _on_job("run", job, parameters, limit, progress, program, env, options)
    return Result(cast(Report, _result(ended)))


def submit(
    job: Job,
    *,
    parameters: Mapping[str, Any] | None = None,
    limit: int | None = None,
    progress: Progress = None,
    program: StrPath | None = None,
    env: Mapping[str, str] | None = None,
    **options: Unpack[SubmitOptions],
) -> Submitted:
    """Writes a job's ledger and enqueues its shards for workers. Submitting again enqueues the shards that are not done.

    The arguments are those of `run`; options are those of `gristmill submit`, such as `queue="kafka://broker:9092/labels"`.
    """
    ended = _on_job("submit", job, parameters, limit, progress, program, env, options)
    return cast(Submitted, _result(ended))


def status(
    output: StrPath,
    *,
    progress: Progress = None,
    program: StrPath | None = None,
    env: Mapping[str, str] | None = None,
) -> Status:
    """How far the job is whose output lies in this folder or at this address."""
    ended = _program.execute(
        ["status", os.fspath(output), "--json"], progress=progress, program=program, env=env
    )
    return cast(Status, _result(ended))


def _on_job(
    command: str,
    job: Job,
    parameters: Mapping[str, Any] | None,
    limit: int | None,
    progress: Progress,
    program: StrPath | None,
    env: Mapping[str, str] | None,
    options: Mapping[str, Any],
) -> Ended:
    stdin = None
    if isinstance(job, Mapping):
        # The program reads JSON from `-` with paths relative to the working directory.
        stdin = json.dumps(job, default=_plain, allow_nan=False)
        job = "-"
    arguments = [command, os.fspath(job), "--json"]
    for name, value in (parameters or {}).items():
        arguments += ["--set", f"{name}={value}"]
    if limit is not None:
        arguments += ["--limit", str(limit)]
    for name, value in options.items():
        arguments += _option(name, value)
    return _program.execute(arguments, stdin=stdin, progress=progress, program=program, env=env)


def _plain(value: object) -> str:
    """The text of a value that JSON does not have."""
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"a job cannot hold a value of type {type(value).__name__}: {value!r}")


def _option(name: str, value: object) -> list[str]:
    """An option of the command line. True stands for a flag, a list or a mapping for an option that is given several times."""
    if name in _OWN_OPTIONS:
        raise TypeError(f"`{name}` is no option of this function: {_OWN_OPTIONS[name]}")
    word = "--" + name.replace("_", "-")
    match value:
        case None | False:
            return []
        case True:
            return [word]
        case Mapping():
            return [argument for key, item in value.items() for argument in (word, f"{key}={item}")]
        case str() | os.PathLike():
            return [word, os.fspath(value)]
        case Sequence():
            return [argument for item in value for argument in (word, str(item))]
        case _:
            return [word, str(value)]


def _result(ended: Ended) -> dict[str, Any]:
    """The result of a command that is done; the exception of its exit code otherwise."""
    if ended.code not in (_DONE, _FAILED_ROWS):
        raise error_of(ended.code, ended.message, cast("Report | None", ended.result))
    if ended.result is None:
        raise GristmillError("gristmill printed no result", ended.code)
    return ended.result
