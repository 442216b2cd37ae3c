"""Sends a file of requests to `gristmill serve` with the operators of Airflow's OpenAI provider.

The connection `gristmill_openai` is of type `openai`. Its host is the service's address with `/v1`, and its password is an API key of the
service. The openai package would send requests of a connection without a host to OpenAI, so each task checks the host first.

The batch belongs to the uploaded file: the file's id is the idempotency key, so a retry of `answer` waits for the same batch. Clear `upload`
to begin anew.
"""

import os

import pendulum

from airflow.providers.openai.hooks.openai import OpenAIHook
from airflow.providers.openai.operators.openai import OpenAITriggerBatchOperator
from airflow.sdk import DAG, Connection, ObjectStoragePath, task
from airflow.sdk.exceptions import AirflowFailException

CONNECTION = "gristmill_openai"
REQUESTS = os.environ.get("GRISTMILL_REQUESTS", "s3://shop/requests.jsonl")
ANSWERS = os.environ.get("GRISTMILL_ANSWERS", "s3://shop/answers")


def check_host():
    host = Connection.get(CONNECTION).host or ""
    if not host.startswith(("http://", "https://")) or not host.endswith("/v1"):
        raise AirflowFailException(f"the host of connection `{CONNECTION}` is {host!r}: write the service's address, as in http://gristmill:8000/v1")


def prepare(context):
    check_host()
    operator = context["task"]
    operator.batch_kwargs = {"extra_headers": {"Idempotency-Key": operator.file_id}}


with DAG(
    "openai_batch",
    schedule="15 1 * * *",
    start_date=pendulum.datetime(2026, 11, 1, tz="UTC"),
    catchup=False,
    tags=["gristmill"],
):

    @task(retries=3)
    def upload():
        check_host()
        with ObjectStoragePath(REQUESTS).open("rb") as requests:
            return OpenAIHook(CONNECTION).conn.files.create(file=("requests.jsonl", requests), purpose="batch").id

    answer = OpenAITriggerBatchOperator(
        task_id="answer",
        file_id=upload(),
        endpoint="/v1/chat/completions",
        conn_id=CONNECTION,
        deferrable=True,
        poll_interval=10,
        pre_execute=prepare,
        retries=3,
    )

    @task(retries=3)
    def download(batch_id, run_id=None):
        """Requests that could not be answered are in a file of their own. Either file is missing if it would be empty."""
        check_host()
        client = OpenAIHook(CONNECTION).conn
        batch = client.batches.retrieve(batch_id)
        folder = ObjectStoragePath(ANSWERS) / "openai_batch" / run_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, file_id in (("answers.jsonl", batch.output_file_id), ("errors.jsonl", batch.error_file_id)):
            if file_id:
                with client.files.with_streaming_response.content(file_id) as content, (folder / name).open("wb") as out:
                    for part in content.iter_bytes():
                        out.write(part)
        counts = batch.request_counts
        return {"folder": str(folder), "answered": counts.completed, "failed": counts.failed}

    download(answer.output)
