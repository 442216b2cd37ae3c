"""The program's JSON objects and options.

A newer program may have more of both: further keys of an object are there at run time, and a further option is passed on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

StrPath = str | os.PathLike[str]


class RowCounts(TypedDict):
    """Rows by status."""

    total: int
    succeeded: int
    invalid_output: int
    errored: int
    expired: int
    cancelled: int
    #: Rows with an answer that was cut off. None: an older program, which did not count them, ran some of the rows.
    truncated: int | None


class TokenCounts(TypedDict):
    prompt: int
    #: Prompt tokens that were reused from another row instead of computed.
    cached: int
    completion: int


class Agreement(TypedDict):
    """How many answers equal the gold column."""

    equal: int
    rows: int


class Reason(TypedDict):
    message: str
    rows: int


class Failures(TypedDict):
    """The most frequent messages of failed rows."""

    looked_at: int
    most: list[Reason]


class Differing(TypedDict):
    row: int
    job: str
    recheck: str


class _Recheck(TypedDict):
    precision: str
    rows: int
    compared: int
    same: int
    share: float | None
    interval: tuple[float, float] | None
    unanswered: int
    failed: int
    seconds: float
    differing: list[Differing]


class Recheck(_Recheck, total=False):
    """How many answers of a sample are the same in a higher precision."""

    leading_tokens: float
    probability_difference: float
    logprob_difference: float


class _Report(TypedDict):
    job: str
    #: The output's address, such as `file:///data/out` or `s3://labels/2026-11`.
    output: str
    rows: RowCounts
    tokens: TokenCounts
    #: Device seconds, over all runs of the job.
    seconds: float
    tokens_per_second: float
    #: None if the job names no price.
    usd: float | None


class Report(_Report, total=False):
    """The result of a job: the object of `gristmill run --json`."""

    skipped_inputs: list[str]
    agreement: Agreement
    recheck: Recheck
    failures: Failures


class ShardCounts(TypedDict):
    total: int
    done: int
    open: int
    stuck: int


class OpenShard(TypedDict):
    shard: int
    rows_done: int
    rows: int
    attempts: int
    stuck: bool
    worker: str | None
    last_progress: str


class Budget(TypedDict):
    usd: float | None
    usd_per_hour: float | None
    deadline_seconds: int | None
    unfinished: str
    used_usd: float | None
    used_seconds: int


State = Literal["running", "finished", "budget_reached", "deadline_reached", "cancelled", "input_changed"]


class Status(Report):
    """How far a job is: the object of `gristmill status --json`."""

    id: str
    #: `running` says that rows are left and that nothing stops the job; a worker need not be there.
    state: State
    note: str | None
    generation: int
    created_at: str
    shards: ShardCounts
    open_shards: list[OpenShard]
    lost_parts: list[str]
    budget: Budget
    pinned_anew: list[str]


class Queue(TypedDict):
    url: str
    messages: int
    created: bool
    partitions: int | None


class Submitted(TypedDict):
    """A job whose ledger is written: the object of `gristmill submit --json`."""

    job: str
    id: str
    output: str
    rows: int
    inputs: int
    shards: int
    generation: int
    #: The job had been submitted before.
    resumed: bool
    #: Shards that are not done.
    uncommitted: int
    #: None if nothing was enqueued.
    queue: Queue | None


class RunOptions(TypedDict, total=False):
    """Options of `gristmill run`; its `--help` describes them."""

    device: str
    threads: int
    kv_memory: int
    instructions: str
    no_cublaslt: bool
    step_tokens: int
    sequences: int
    log_interval: float
    otlp_endpoint: str
    quiet: bool


class SubmitOptions(TypedDict, total=False):
    """Options of `gristmill submit`; its `--help` describes them."""

    queue: str
    kafka: Mapping[str, str | int | float] | Sequence[str]
    device: str
    no_enqueue: bool
    preflight: bool
