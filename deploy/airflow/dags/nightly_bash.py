"""Synthetic tickets every night with what Airflow has on board: no provider, no queue; the task computes the job itself.

A retry goes on where the job was. If Airflow is killed and leaves the old process running beside the retry, both work on one job, and each
row is still written once. Exit code 4 says that the budget or the deadline was reached, and the task is skipped. Code 3, rows that did not
succeed, fails the task; the column `error` of the output says why.
"""

import json
import os

import pendulum

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

JOBS = os.environ.get("GRISTMILL_JOBS", "/opt/gristmill/jobs")

with DAG(
    "nightly_bash",
    schedule="15 1 * * *",
    start_date=pendulum.datetime(2026, 11, 1, tz="UTC"),
    catchup=False,
    tags=["gristmill"],
):
    BashOperator(
        task_id="write_tickets",
        # `exec`, so that the task's signals reach gristmill. The last line of stdout is the result.
        bash_command='exec gristmill run "$JOB" --set "date=$DATE" --json --quiet',
        env={"JOB": f"{JOBS}/nightly.yaml", "DATE": "{{ ds }}"},
        append_env=True,
        skip_on_exit_code=[4],
        output_processor=json.loads,
        retries=3,
    )
