"""DAGs that only tests run: how tasks end, and what happens to them where something is killed."""

import json
import os
from datetime import datetime
from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_gristmill.operators import GristmillRunOperator
from airflow_provider_gristmill.sensors import GristmillJobSensor

FOLDER = Path(os.environ["GRISTMILL_TEST_FOLDER"])
QUEUE = os.environ["GRISTMILL_QUEUE"]
JOB = json.loads((FOLDER / "label-tickets.json").read_text())


def job(name, **fields):
    return JOB | {"name": name, "output": {"uri": str(FOLDER / "out" / name), "carry": ["ticket_id"]}} | fields


def dag(name):
    return DAG(name, schedule=None, start_date=datetime(2026, 1, 1))


with dag("killed_in_task"):
    GristmillRunOperator(task_id="run", job=job("killed_in_task"), retries=3)

with dag("waits"):
    GristmillRunOperator(task_id="run", job=job("waits"), queue_url=QUEUE, poll_interval=1, reconcile_interval=5, retries=3)

with dag("sensed"):
    GristmillJobSensor(task_id="wait", output_url=str(FOLDER / "out/waits"), deferrable=True, poke_interval=1)
    GristmillJobSensor(task_id="poke", output_url=str(FOLDER / "out/waits"), deferrable=False, poke_interval=1)
    GristmillJobSensor(task_id="nothing_there", output_url=str(FOLDER / "out/never"), deferrable=True, poke_interval=1, retries=2)

with dag("budget"):
    budget = {"usd": 0.000001, "usd_per_hour": 100}
    GristmillRunOperator(task_id="skipped", job=job("budget_skipped", budget=budget), retries=2)
    GristmillRunOperator(task_id="failed", job=job("budget_failed", budget=budget), stopped="fail", retries=2)

with dag("failed_rows"):
    # No prompt of more than 150 tokens fits, so that some rows end `errored`.
    short = {"context": 150}
    GristmillRunOperator(task_id="failed", job=job("rows_failed", **short), limit=200, retries=2)
    GristmillRunOperator(task_id="kept", job=job("rows_kept", **short), limit=200, failed_rows="keep", retries=2)

with dag("refused"):
    GristmillRunOperator(task_id="run", job=job("refused", precision="f33"), retries=2)

with dag("cancelled"):
    GristmillRunOperator(task_id="kept", job=job("kept"), queue_url=f"{QUEUE}-nobody", poll_interval=1)
    GristmillRunOperator(task_id="cancelled", job=job("cancelled"), queue_url=f"{QUEUE}-nobody", poll_interval=1, cancel_on_kill=True)
