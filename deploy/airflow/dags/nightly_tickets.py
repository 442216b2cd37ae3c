"""Synthetic support tickets every night, computed by the workers of a queue.

Each night is a job of its own, since the date stands in the address of its output. The task submits the job and waits in the triggerer;
`gristmill worker --queue …` on any number of machines does the work. A retry, or clearing the task, goes on with the same job.
"""

import os

import pendulum

from airflow.sdk import DAG, Asset, task

from airflow_provider_gristmill.operators import GristmillRunOperator

JOBS = os.environ.get("GRISTMILL_JOBS", "/opt/gristmill/jobs")
QUEUE = os.environ.get("GRISTMILL_QUEUE", "kafka://broker:9092/tickets")

tickets = Asset(name="nightly_tickets", uri="gristmill://jobs/nightly-tickets")

with DAG(
    "nightly_tickets",
    schedule="15 1 * * *",
    start_date=pendulum.datetime(2026, 11, 1, tz="UTC"),
    catchup=False,
    tags=["gristmill"],
):
    GristmillRunOperator(
        task_id="write_tickets",
        job_file=f"{JOBS}/nightly.yaml",
        parameters={"date": "{{ ds }}"},
        queue_url=QUEUE,
        # A ticket that is no valid JSON after all is left to the reader, who filters by `status`.
        failed_rows="keep",
        outlets=[tickets],
        poll_interval=10,
        retries=3,
    )

# Runs whenever a night's tickets are there.
with DAG("use_tickets", schedule=[tickets], start_date=pendulum.datetime(2026, 11, 1, tz="UTC"), catchup=False, tags=["gristmill"]):

    @task(inlets=[tickets])
    def use(inlet_events=None):
        night = inlet_events[tickets][-1].extra
        print(f"{night['rows']['succeeded']:,} new tickets below {night['output']}")
        return night

    use()
