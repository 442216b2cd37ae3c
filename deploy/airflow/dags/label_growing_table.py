"""Labels a table that grows by a folder a day: `TABLE/date=2026-11-24/*.parquet`.

Each hour lists the folders, and each folder is a job of its own, by dynamic task mapping. Folders that are labelled already end at once,
without a model being loaded. The job stands here as a dict in place of a job file; `${date}` in it is a parameter of gristmill, and
`{{ body }}` a column of the table: Airflow's own templates reach neither.
"""

import os

import pendulum

from airflow.sdk import DAG, ObjectStoragePath, task

from airflow_provider_gristmill.operators import GristmillRunOperator

TABLE = os.environ.get("GRISTMILL_TABLE", "s3://shop/tickets")
LABELS = os.environ.get("GRISTMILL_LABELS", "s3://shop/labels")
MODEL = os.environ.get("GRISTMILL_MODEL", "/models/demo")
QUEUE = os.environ.get("GRISTMILL_QUEUE", "kafka://broker:9092/labels")

CATEGORIES = [
    "account_access", "account_closure", "billing", "refund", "shipping_delay", "shipping_damage", "defect", "technical",
    "feature_request", "other",
]  # fmt: skip

JOB = {
    "name": "label-${date}",
    "model": MODEL,
    "input": {"uri": TABLE + "/date=${date}/"},
    "prompt": {
        "messages": [
            {
                "role": "system",
                "content": "You sort support tickets of an online shop. Read the subject and the body of the ticket, ignore quoted mail and "
                "small talk, and answer with exactly one category. The categories are: " + ", ".join(CATEGORIES) + ".",
            },
            {"role": "user", "content": "{{ subject }}\n\n{{ body }}"},
        ]
    },
    "generate": {"max_tokens": 8, "temperature": 0, "choice": CATEGORIES},
    "output": {"uri": LABELS + "/${date}", "carry": ["ticket_id", "date"]},
    # Stops a day that has become expensive; the task is then skipped, and `gristmill extend` goes on with it.
    "budget": {"usd": 5, "usd_per_hour": 3.5},
}

with DAG(
    "label_growing_table",
    schedule="@hourly",
    start_date=pendulum.datetime(2026, 11, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    tags=["gristmill"],
):

    @task
    def days():
        folders = (path.name for path in ObjectStoragePath(TABLE).iterdir() if path.is_dir())
        return [{"date": name.removeprefix("date=")} for name in sorted(folders) if name.startswith("date=")]

    GristmillRunOperator.partial(task_id="label", job=JOB, queue_url=QUEUE, poll_interval=10, retries=3).expand(parameters=days())
