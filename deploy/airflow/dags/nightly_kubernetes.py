"""Synthetic tickets every night in a pod of Kubernetes, which computes the job itself: no provider of gristmill, no queue.

The image has gristmill and a shell. `exec` puts gristmill in the shell's place, so that gristmill gets the pod's SIGTERM, writes finished rows
and ends within 30 seconds. A retry goes on where the job was.

- XCom: stdout holds the result alone, and becomes `/airflow/xcom/return.json`.
- Messages: Kubernetes takes the end of the log as the pod's termination message, which Airflow adds to the task's error.
- Exit codes: 4, the budget or the deadline was reached, skips the task. Any other code but 0 fails it.
"""

import os

import pendulum
from kubernetes.client import models as k8s

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import DAG

IMAGE = os.environ.get("GRISTMILL_IMAGE", "registry.example/gristmill:latest")

with DAG(
    "nightly_kubernetes",
    schedule="15 1 * * *",
    start_date=pendulum.datetime(2026, 11, 1, tz="UTC"),
    catchup=False,
    tags=["gristmill"],
):
    KubernetesPodOperator(
        task_id="write_tickets",
        name="write-tickets",
        image=IMAGE,
        cmds=["/bin/sh", "-c"],
        arguments=['exec gristmill run /jobs/nightly.yaml --set "date=$DATE" --json --quiet > /airflow/xcom/return.json'],
        env_vars={"DATE": "{{ ds }}", "GRISTMILL_CACHE": "/cache"},
        # Keys of the store, where the ServiceAccount grants no access to it.
        env_from=[k8s.V1EnvFromSource(secret_ref=k8s.V1SecretEnvSource(name="gristmill-worker", optional=True))],
        do_xcom_push=True,
        skip_on_exit_code=[4],
        termination_message_policy="FallbackToLogsOnError",
        # Finished rows are written within 30 s.
        termination_grace_period=60,
        deferrable=True,
        poll_interval=10,
        retries=3,
        service_account_name="gristmill-worker",
        automount_service_account_token=False,
        security_context=k8s.V1PodSecurityContext(
            run_as_non_root=True,
            run_as_user=65532,
            run_as_group=65532,
            fs_group=65532,
            seccomp_profile=k8s.V1SeccompProfile(type="RuntimeDefault"),
        ),
        container_security_context=k8s.V1SecurityContext(
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            capabilities=k8s.V1Capabilities(drop=["ALL"]),
        ),
        container_resources=k8s.V1ResourceRequirements(requests={"cpu": "8", "memory": "32Gi"}, limits={"memory": "32Gi"}),
        # As in deploy/kubernetes: checkpoints in a claim, job files in a ConfigMap.
        volumes=[
            k8s.V1Volume(
                name="models",
                persistent_volume_claim=k8s.V1PersistentVolumeClaimVolumeSource(claim_name="gristmill-models", read_only=True),
            ),
            k8s.V1Volume(name="jobs", config_map=k8s.V1ConfigMapVolumeSource(name="gristmill-job")),
            k8s.V1Volume(name="cache", empty_dir=k8s.V1EmptyDirVolumeSource()),
        ],
        volume_mounts=[
            k8s.V1VolumeMount(name="models", mount_path="/models", read_only=True),
            k8s.V1VolumeMount(name="jobs", mount_path="/jobs", read_only=True),
            k8s.V1VolumeMount(name="cache", mount_path="/cache"),
        ],
    )
