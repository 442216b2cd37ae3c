"""Connections of type `gristmill`: the broker's user and password, and further environment of the program."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, BaseHook


class GristmillHook(BaseHook):
    """The environment in which the program runs: the task's own, with what a connection adds.

    The connection's login and password become GRISTMILL_QUEUE_USER and GRISTMILL_QUEUE_PASSWORD, and the object `env` of its
    extra field becomes further variables, such as AWS_REGION or GRISTMILL_QUEUE_HOST. Without a connection the program sees the
    task's environment alone, where workload identity usually grants access to the store.
    """

    conn_name_attr = "gristmill_conn_id"
    default_conn_name = "gristmill_default"
    conn_type = "gristmill"
    hook_name = "gristmill"

    def __init__(self, gristmill_conn_id: str | None = None) -> None:
        super().__init__()
        self.gristmill_conn_id = gristmill_conn_id

    def get_env(self) -> dict[str, str]:
        env = dict(os.environ)
        if self.gristmill_conn_id is None:
            return env
        connection = self.get_connection(self.gristmill_conn_id)
        if connection.login:
            env["GRISTMILL_QUEUE_USER"] = connection.login
        if connection.password:
            env["GRISTMILL_QUEUE_PASSWORD"] = connection.password
        extra = dict(connection.extra_dejson)
        added = extra.pop("env", {})
        if extra or not isinstance(added, dict) or not all(isinstance(value, str) for value in added.values()):
            raise AirflowFailException(
                f"connection `{self.gristmill_conn_id}`: its extra field may hold `env` alone, an object of texts: "
                '{"env": {"AWS_REGION": "eu-central-1"}}'
            )
        return env | added

    def test_connection(self) -> tuple[bool, str]:
        """Whether the program is there; it connects to nothing."""
        try:
            done = subprocess.run(["gristmill", "--version"], capture_output=True, text=True, timeout=30, check=True, env=self.get_env())
        except (OSError, subprocess.SubprocessError) as error:
            return False, f"gristmill does not run on this machine: {error}"
        return True, done.stdout.strip()

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        return {
            "hidden_fields": ["host", "port", "schema"],
            "relabeling": {"login": "User at the broker", "password": "Password at the broker"},
            "placeholders": {"extra": '{"env": {"AWS_REGION": "eu-central-1"}}'},
        }
