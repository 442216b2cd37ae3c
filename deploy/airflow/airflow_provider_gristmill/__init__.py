"""Airflow provider for gristmill."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def get_provider_info() -> dict[str, Any]:
    """What Airflow shows of this provider: the form of its connections, most of all."""
    return {
        "package-name": "airflow-provider-gristmill",
        "name": "gristmill",
        "description": "Runs whole datasets through a language model.",
        "versions": [__version__],
        "integrations": [{"integration-name": "gristmill", "tags": ["software"]}],
        "operators": [{"integration-name": "gristmill", "python-modules": ["airflow_provider_gristmill.operators"]}],
        "sensors": [{"integration-name": "gristmill", "python-modules": ["airflow_provider_gristmill.sensors"]}],
        "triggers": [{"integration-name": "gristmill", "python-modules": ["airflow_provider_gristmill.triggers"]}],
        "hooks": [{"integration-name": "gristmill", "python-modules": ["airflow_provider_gristmill.hooks"]}],
        "connection-types": [
            {
                "hook-class-name": "airflow_provider_gristmill.hooks.GristmillHook",
                "hook-name": "gristmill",
                "connection-type": "gristmill",
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "schema"],
                    "relabeling": {"login": "User at the broker", "password": "Password at the broker"},
                    "placeholders": {"extra": '{"env": {"AWS_REGION": "eu-central-1"}}'},
                },
            }
        ],
    }
