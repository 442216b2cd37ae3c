"""Waits in the triggerer until a job has ended, without holding a worker slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from asgiref.sync import sync_to_async

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_gristmill.hooks import GristmillHook
from airflow_provider_gristmill.program import Ended, log_line, result_of

# A command that takes longer is killed and counts as one that could not read the ledger.
SECONDS_PER_COMMAND = 300
# Statuses of rows that are done, among the counts of `status --json`.
ENDED = ("succeeded", "invalid_output", "errored", "expired", "cancelled")


class GristmillJobTrigger(BaseTrigger):
    """Fires when the job of `output_url` is finished or stopped.

    The ledger beside the output says so, so it does not matter who works on the job, nor whether the triggerer restarts. With a
    `queue_url`, shards that the queue has lost are enqueued again every `reconcile_interval` seconds.
    """

    def __init__(
        self,
        output_url: str,
        queue_url: str | None = None,
        program: str = "gristmill",
        gristmill_conn_id: str | None = None,
        poll_interval: float = 30,
        reconcile_interval: float = 600,
        cancel_on_kill: bool = False,
    ) -> None:
        super().__init__()
        self.output_url = output_url
        self.queue_url = queue_url
        self.program = program
        self.gristmill_conn_id = gristmill_conn_id
        self.poll_interval = poll_interval
        self.reconcile_interval = reconcile_interval
        self.cancel_on_kill = cancel_on_kill

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("output_url", "queue_url", "program", "gristmill_conn_id", "poll_interval", "reconcile_interval", "cancel_on_kill")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        reconciled = time.monotonic()
        shown = None
        while True:
            status = await self._command("status", self.output_url, "--json")
            match status:
                case Ended(code=0, result=dict() as job):
                    if job["state"] != "running":
                        yield TriggerEvent({"state": job["state"]})
                        return
                    progress = (sum(job["rows"][name] for name in ENDED), job["rows"]["total"], job["shards"]["stuck"])
                    if progress != shown:
                        shown = progress
                        self.log.info("%s of %s rows are done; stuck shards: %s", *progress)
                case Ended(code=2):
                    # No job lies there, or its record is not to be read: waiting changes neither.
                    yield TriggerEvent({"state": "refused", "error": status.last_line})
                    return
                case _:
                    self.log.warning("the ledger cannot be read now, and is read again later: %s", status.last_line)
            if self.queue_url and time.monotonic() - reconciled >= self.reconcile_interval:
                reconciled = time.monotonic()
                done = await self._command("reconcile", self.output_url, "--queue", self.queue_url)
                self.log.info("reconcile: %s", done.last_line or f"exit code {done.code}")
            await asyncio.sleep(self.poll_interval)

    async def on_kill(self) -> None:
        """Runs when somebody marks the waiting task or clears it, and not when a triggerer restarts."""
        if self.cancel_on_kill:
            done = await self._command("cancel", self.output_url)
            self.log.info("cancel: %s", done.last_line or f"exit code {done.code}")

    async def _command(self, *arguments: str) -> Ended:
        env = await sync_to_async(GristmillHook(self.gristmill_conn_id).get_env)()
        child = await asyncio.create_subprocess_exec(
            self.program,
            *arguments,
            env={**env, "GRISTMILL_LOG_FORMAT": "json"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            stdout, stderr = await asyncio.wait_for(child.communicate(), SECONDS_PER_COMMAND)
        except (TimeoutError, asyncio.TimeoutError):
            return Ended(1, None, f"`{arguments[0]}` took more than {SECONDS_PER_COMMAND} s")
        finally:
            # Also where the trigger itself is cancelled.
            if child.returncode is None:
                child.kill()
                await child.wait()
        lines = stderr.decode(errors="replace").strip().splitlines()
        return Ended(child.returncode, result_of(stdout.decode(errors="replace")), log_line(lines[-1])[1] if lines else "")
