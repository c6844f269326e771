"""Requests made of the OpenAPI document: none may hang, none may be a fault of the server's, and
every answer is as the document says."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.in_process import in_process
from support.pooled import tiny_pooled, with_byte_tokens
from support.scripted_engine import scripted_llm, text_script
from support.serving import served_in_thread

from pelton.engine.llm import LLM
from pelton.server.app import OPERATIONS
from pelton.server.local import POOLING

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
PATHS = sorted({operation.path for operation in OPERATIONS})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own: schemathesis is not asynchronous."""
    with served_in_thread(lambda: scripted_llm(text_script("Yes. 😊"))) as address:
        yield address


def examine(url: str, path: str, max_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for operation in schema.include(path=path).get_all_operations():

        @settings(
            max_examples=max_examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.ok().as_strategy())
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=20)

        check()
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_requests_of_the_document(url: str, path: str) -> None:
    examine(url, path, max_examples=20)


@pytest.fixture(scope="module")
def pooling_url() -> Iterator[str]:
    folder = with_byte_tokens(tiny_pooled("Qwen3"))
    llm = LLM(str(folder), num_gpu_blocks_override=64, enable_prompt_embeds=True)
    with served_in_thread(lambda: in_process(llm)) as address:
        yield address
    llm.close()


@pytest.mark.parametrize("path", POOLING)
def test_requests_to_a_server_that_pools(pooling_url: str, path: str) -> None:
    examine(pooling_url, path, max_examples=20)


@pytest.mark.long
@pytest.mark.parametrize("path", POOLING)
def test_many_requests_to_a_server_that_pools(pooling_url: str, path: str) -> None:
    examine(pooling_url, path, max_examples=1000)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_many_requests_of_the_document(url: str, path: str) -> None:
    examine(url, path, max_examples=1000)
