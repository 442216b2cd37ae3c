"""Prints the pod of a DAG's one KubernetesPodOperator as JSON, once it fits the schema of Kubernetes. It needs no cluster.

    .airflow/bin/python tests/airflow/pod.py DAG_FILE
"""

import json
import sys

import kubernetes_validate
from airflow.dag_processing.dagbag import DagBag
from kubernetes.client import ApiClient

KUBERNETES = "1.37"


def main():
    bag = DagBag(sys.argv[1])
    assert not bag.import_errors, bag.import_errors
    (dag,) = bag.dags.values()
    (operator,) = dag.tasks
    pod = ApiClient().sanitize_for_serialization(operator.build_pod_request_obj(dry_run=True))
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    print(json.dumps(pod))


if __name__ == "__main__":
    main()
