"""Labels tickets through `gristmill serve` with `LLMBatchOperator` of Airflow's common.ai provider.

The connection `gristmill_llm` is of type `pydanticai`. Its host is the service's address with `/v1`, and its password is an API key of the
service. The openai package would send requests of a connection without a host to OpenAI, so the task checks the host first.

The operator keeps the batch's id beside the results. A retry, and a task that is cleared, wait for the same batch. The prompts travel by XCom,
so this way is for thousands of prompts; `openai_batch.py` uploads a file of any size.
"""

import collections
import json
import os

import pendulum

from airflow.providers.common.ai.operators.llm_batch import LLMBatchOperator
from airflow.sdk import DAG, Connection, ObjectStoragePath, task
from airflow.sdk.exceptions import AirflowFailException

CONNECTION = "gristmill_llm"
TICKETS = os.environ.get("GRISTMILL_TICKETS", "s3://shop/tickets.jsonl")
ANSWERS = os.environ.get("GRISTMILL_ANSWERS", "s3://shop/answers")

CATEGORIES = [
    "account_access", "account_closure", "billing", "refund", "shipping_delay", "shipping_damage", "defect", "technical",
    "feature_request", "other",
]  # fmt: skip


def check_host(context):
    host = Connection.get(CONNECTION).host or ""
    if not host.startswith(("http://", "https://")) or not host.endswith("/v1"):
        raise AirflowFailException(f"the host of connection `{CONNECTION}` is {host!r}: write the service's address, as in http://gristmill:8000/v1")


with DAG(
    "llm_batch",
    schedule="15 1 * * *",
    start_date=pendulum.datetime(2026, 11, 1, tz="UTC"),
    catchup=False,
    tags=["gristmill"],
):

    @task
    def prompts():
        lines = ObjectStoragePath(TICKETS).read_text().splitlines()
        return [f"{ticket['subject']}\n\n{ticket['body']}" for ticket in map(json.loads, lines)]

    label = LLMBatchOperator(
        task_id="label",
        requests=prompts(),
        result_path=ANSWERS + "/llm_batch/{{ run_id }}",
        llm_conn_id=CONNECTION,
        # `openai:` names the API; after it comes the model's name in the service.
        model_id="openai:demo",
        system_prompt="You sort support tickets of an online shop. Read the subject and the body of the ticket, ignore quoted mail and "
        "small talk, and answer with exactly one category. The categories are: " + ", ".join(CATEGORIES) + ".",
        max_tokens=8,
        request_params={"temperature": 0, "structured_outputs": {"choice": CATEGORIES}},
        deferrable=True,
        poll_interval=30,
        pre_execute=check_host,
        retries=3,
    )

    @task
    def count(manifest):
        """The results are a file of JSON lines; XCom has only the manifest."""
        rows = map(json.loads, ObjectStoragePath(manifest["result_uri"]).read_text().splitlines())
        return dict(collections.Counter(row["output"] if row["status"] == "success" else row["status"] for row in rows))

    count(label.output)
