"""Waits for a job that something else runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseSensorOperator, PokeReturnValue, conf

from airflow_provider_gristmill.hooks import GristmillHook
from airflow_provider_gristmill.program import FailedRows, Program, Stopped, task_result
from airflow_provider_gristmill.triggers import GristmillJobTrigger

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context


class GristmillJobSensor(BaseSensorOperator):
    """Waits until the job of an output has ended, whoever submitted it, and returns its result.

    :param output_url: the job's output, a folder or address (templated).
    :param failed_rows: as for `GristmillRunOperator`.
    :param stopped: as for `GristmillRunOperator`.
    :param deferrable: whether the wait is in the triggerer, where it holds no slot.
    """

    template_fields: Sequence[str] = ("output_url",)
    ui_color = "#e8dcc4"

    def __init__(
        self,
        *,
        output_url: str,
        failed_rows: FailedRows = "fail",
        stopped: Stopped = "skip",
        gristmill_conn_id: str | None = None,
        program: str = "gristmill",
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.output_url = output_url
        self.failed_rows = failed_rows
        self.stopped = stopped
        self.gristmill_conn_id = gristmill_conn_id
        self.program = program
        self.deferrable = deferrable

    def poke(self, context: Context) -> PokeReturnValue:
        status = self._command("status")
        if status.code == 2:
            raise AirflowFailException(status.last_line)
        if status.code != 0 or status.result is None or status.result["state"] == "running":
            return PokeReturnValue(is_done=False)
        return PokeReturnValue(is_done=True, xcom_value=self._result())

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return super().execute(context)
        self.defer(
            trigger=GristmillJobTrigger(
                output_url=self.output_url,
                program=self.program,
                gristmill_conn_id=self.gristmill_conn_id,
                poll_interval=self.poke_interval,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        if event["state"] == "refused":
            raise AirflowFailException(event["error"])
        return self._result()

    def _result(self) -> dict[str, Any]:
        # `watch` of a job that has ended returns at once, with the exit code that `run` would have had.
        return task_result(self._command("watch"), failed_rows=self.failed_rows, stopped=self.stopped)

    def _command(self, command: str) -> Any:
        return Program(self.program, GristmillHook(self.gristmill_conn_id).get_env(), self.log).run([command, self.output_url, "--json"])
