"""`gristmill:MODEL` as `model_id` of `LLMBatchOperator` and `@task.llm_batch` in Airflow's common.ai provider.

The adapter is that of OpenAI's batch API, which `gristmill serve` answers, with the service's limits. It refuses a connection without
a host. The openai package would send the prompts and the key of such a connection to OpenAI.
"""

from __future__ import annotations

from typing import Any

from airflow.providers.common.ai.batch.openai import OpenAIBatchAdapter
from airflow.providers.common.compat.sdk import AirflowFailException


class GristmillBatchAdapter(OpenAIBatchAdapter):
    """Batches of `gristmill serve`; common.ai finds this class by its entry point.

    :param api_key: the connection's password. A service without `--keys` ignores it.
    :param base_url: the connection's host: the service's address with `/v1`.
    :param client: a client to use in place of a new one.
    """

    name = "gristmill"
    max_requests = 1_000_000
    max_payload_bytes = 8 << 30

    def __init__(self, *, api_key: str | None = None, base_url: str | None = None, client: Any | None = None) -> None:
        if client is None and not is_service(base_url):
            raise AirflowFailException(
                f"the connection's host is {base_url!r}: write the address of `gristmill serve`, as in http://gristmill:8000/v1"
            )
        # The openai package needs a key, and takes OpenAI's from the environment where it is given none.
        super().__init__(api_key=api_key or "none", base_url=base_url, client=client)


def is_service(base_url: str | None) -> bool:
    """Whether the address has a scheme, and the path `/v1` at its end."""
    return base_url is not None and base_url.startswith(("http://", "https://")) and base_url.endswith("/v1")
