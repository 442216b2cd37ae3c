"""DAGs that only tests run: how tasks end, and what happens to them where something is killed."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from airflow.providers.common.ai.operators.llm_batch import LLMBatchOperator
from airflow.providers.openai.hooks.openai import OpenAIHook
from airflow.providers.openai.operators.openai import OpenAITriggerBatchOperator
from airflow.sdk import DAG, task

from airflow_provider_gristmill.operators import GristmillRunOperator
from airflow_provider_gristmill.sensors import GristmillJobSensor

FOLDER = Path(os.environ["GRISTMILL_TEST_FOLDER"])
OUTPUTS = os.environ["GRISTMILL_TEST_OUTPUTS"]
QUEUE = os.environ["GRISTMILL_QUEUE"]
JOB = json.loads((FOLDER / "label-tickets.json").read_text())


def job(name, **fields):
    return JOB | {"name": name, "output": {"uri": f"{OUTPUTS}/{name}", "carry": ["ticket_id"]}} | fields


def dag(name):
    return DAG(name, schedule=None, start_date=datetime(2026, 1, 1))


with dag("killed_in_task"):
    GristmillRunOperator(task_id="run", job=job("killed_in_task"), retries=3)

with dag("waits"):
    GristmillRunOperator(task_id="run", job=job("waits"), queue_url=QUEUE, poll_interval=1, reconcile_interval=5, retries=3)

with dag("sensed"):
    GristmillJobSensor(task_id="wait", output_url=f"{OUTPUTS}/waits", deferrable=True, poke_interval=1)
    GristmillJobSensor(task_id="poke", output_url=f"{OUTPUTS}/waits", deferrable=False, poke_interval=1)
    GristmillJobSensor(task_id="nothing_there", output_url=f"{OUTPUTS}/never", deferrable=True, poke_interval=1, retries=2)

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


TICKETS = [json.loads(line) for line in (FOLDER / "tickets.jsonl").open()]
SYSTEM = JOB["prompt"]["messages"][0]["content"]
CATEGORIES = JOB["generate"]["choice"]


def llm_batch(task_id, requests, **fields):
    fields = {"llm_conn_id": "gristmill_llm", "model_id": "openai:demo", "max_tokens": 8, "deferrable": True, "poll_interval": 30} | fields
    path = str(FOLDER / "answers" / task_id) + "/{{ run_id }}"
    LLMBatchOperator(task_id=task_id, requests=requests, result_path=path, system_prompt=SYSTEM, **fields)


class Label(BaseModel):
    """The category of a ticket."""

    category: Literal[*CATEGORIES]
    urgent: bool


with dag("structured"):
    requests = [{"prompt": f"{ticket['subject']}\n\n{ticket['body']}"} for ticket in TICKETS[:20]]
    llm_batch("label", requests, model_id="gristmill:demo", output_type=Label, max_tokens=100, request_params={"temperature": 0}, retries=2)

with dag("failed_batches"):

    @task
    def upload():
        file = FOLDER / "broken.jsonl"
        file.write_text((FOLDER / "requests.jsonl").read_text() + "{\n")
        return OpenAIHook("gristmill_openai").upload_file(str(file), purpose="batch").id

    OpenAITriggerBatchOperator(
        task_id="broken_line",
        file_id=upload(),
        endpoint="/v1/chat/completions",
        conn_id="gristmill_openai",
        deferrable=True,
        poll_interval=1,
    )
    llm_batch("unknown_model", ["a"], model_id="openai:other")
    # The service answers requests with a parameter that it does not know by an error of their own.
    mixed = [{"prompt": "Where is my parcel?"}, {"prompt": "Where is my parcel?", "params": {"frequency": 1}}]
    llm_batch("partial", mixed, fail_on_partial_error=True)
    llm_batch("kept", mixed)

with dag("marked_batch"):
    llm_batch("label", ["a"])
