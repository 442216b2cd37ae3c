"""Runs a job: in the task itself, or by the workers of a queue while the task waits in the triggerer.

Why no try has an id of its own: docs/decisions/090-airflow-knows-a-job-by-its-output.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, BaseOperator

from airflow_provider_gristmill.hooks import GristmillHook
from airflow_provider_gristmill.program import FailedRows, Program, Stopped, task_result
from airflow_provider_gristmill.triggers import GristmillJobTrigger

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context


class GristmillRunOperator(BaseOperator):
    """Runs a gristmill job to its end and returns its result.

    Without `queue_url`, the task computes the job itself, on the machine where it runs. With `queue_url`, it submits the job and waits in the
    triggerer, holding no slot, while `gristmill worker` processes anywhere do the work.

    **Tries.** A job is known by its output address. A further try, and a task that is cleared, therefore go on with the same job where it
    was: finished rows are not computed again. Give each data interval an output of its own, by a parameter in the address.

    **Ends.** Done: the task succeeds, with the result in XCom. Rows that failed: `failed_rows`. Budget or deadline reached: `stopped`.
    Refused or cancelled: the task fails without a further try. Any other failure: it fails, and its retries go on with the job.

    :param job_file: the job file (templated). Give it or `job`.
    :param job: the job itself, as a dict with the fields of a job file. It is not templated, since prompts have templates of their own:
        write `${name}` for a parameter. Paths in it must be absolute.
    :param parameters: values of the job's `${name}` parameters (templated), such as `{"date": "{{ ds }}"}`.
    :param queue_url: the workers' queue (templated), such as `kafka://broker:9092/labels`.
    :param limit: only so many of the first rows, as a trial beside the output.
    :param failed_rows: whether a job of which rows did not succeed fails the task (`"fail"`) or succeeds with them (`"keep"`).
    :param stopped: whether a job that has reached its budget or deadline skips the task (`"skip"`) or fails it (`"fail"`).
    :param cancel_on_kill: whether the job is cancelled, for good, when somebody marks or clears the task while it waits. Without it the
        workers go on, and a cleared task waits for the same job again.
    :param gristmill_conn_id: a connection of type `gristmill`, for the broker's password and further environment.
    :param program: path of the program, where it is not in PATH.
    :param poll_interval: seconds between two reads of the ledger while the task waits.
    :param reconcile_interval: seconds between two searches for shards that the queue has lost.
    """

    template_fields: Sequence[str] = ("job_file", "parameters", "queue_url")
    template_fields_renderers = {"parameters": "json"}
    ui_color = "#e8dcc4"

    def __init__(
        self,
        *,
        job_file: str | None = None,
        job: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
        queue_url: str | None = None,
        limit: int | None = None,
        failed_rows: FailedRows = "fail",
        stopped: Stopped = "skip",
        cancel_on_kill: bool = False,
        gristmill_conn_id: str | None = None,
        program: str = "gristmill",
        poll_interval: float = 30,
        reconcile_interval: float = 600,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (job_file is None) == (job is None):
            raise ValueError("give one of `job_file` and `job`")
        if failed_rows not in ("fail", "keep"):
            raise ValueError(f'`failed_rows` is "fail" or "keep", not {failed_rows!r}')
        if stopped not in ("skip", "fail"):
            raise ValueError(f'`stopped` is "skip" or "fail", not {stopped!r}')
        self.job_file = job_file
        self.job = job
        self.parameters = parameters
        self.queue_url = queue_url
        self.limit = limit
        self.failed_rows = failed_rows
        self.stopped = stopped
        self.cancel_on_kill = cancel_on_kill
        self.gristmill_conn_id = gristmill_conn_id
        self.program = program
        self.poll_interval = poll_interval
        self.reconcile_interval = reconcile_interval
        self._running: Program | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        if self.queue_url is None:
            return self._finish(context, self._on_job("run"))
        submitted = self._on_job("submit", "--queue", self.queue_url)
        # `submit` of a finished job with failed rows ends with 3: waiting for it returns at once.
        if submitted.code not in (0, 3):
            return self._finish(context, submitted)
        if submitted.result is None:
            raise AirflowException("gristmill printed no result of `submit`")
        output = submitted.result["output"]
        self.defer(
            trigger=GristmillJobTrigger(
                output_url=output,
                queue_url=self.queue_url,
                program=self.program,
                gristmill_conn_id=self.gristmill_conn_id,
                poll_interval=self.poll_interval,
                reconcile_interval=self.reconcile_interval,
                cancel_on_kill=self.cancel_on_kill,
            ),
            method_name="execute_complete",
            kwargs={"output": output},
            timeout=self.execution_timeout,
        )

    def execute_complete(self, context: Context, event: dict[str, Any], output: str) -> dict[str, Any]:
        if event["state"] == "refused":
            raise AirflowFailException(event["error"])
        # `watch` of a job that has ended returns at once, with the exit code that `run` would have had.
        return self._finish(context, self._command(["watch", output, "--json"]))

    def on_kill(self) -> None:
        # The job is not cancelled: a task is also ended because its machine goes away.
        if self._running is not None:
            self._running.stop()

    def _on_job(self, command: str, *options: str) -> Any:
        arguments = [f"--set={name}={value}" for name, value in (self.parameters or {}).items()]
        if self.limit is not None:
            arguments.append(f"--limit={self.limit}")
        if self.job_file is not None:
            return self._command([command, self.job_file, *options, *arguments, "--json"])
        with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
            file = os.path.join(folder, "job.yaml")
            with open(file, "w", encoding="utf-8") as out:
                # JSON is YAML, too.
                json.dump(self.job, out)
            return self._command([command, file, *options, *arguments, "--json"])

    def _command(self, arguments: Sequence[str]) -> Any:
        self._running = Program(self.program, GristmillHook(self.gristmill_conn_id).get_env(), self.log)
        return self._running.run(arguments)

    def _finish(self, context: Context, ended: Any) -> dict[str, Any]:
        result = task_result(ended, failed_rows=self.failed_rows, stopped=self.stopped)
        # Consumers of the asset read what its event is about.
        for asset in self.outlets:
            context["outlet_events"][asset].extra = {name: result[name] for name in ("output", "rows", "usd") if name in result}
        return result
