"""The OpenAPI document describes what the server does, and no request that it allows, or just misses, is a server error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.testing.server import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server in a thread with a loop of its own, for synchronous clients."""
    up, down, found = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with running("hello", tool_parser=HermesToolParser, grammar_checker=lambda _kind, _value: None) as server:
            found.extend((server, asyncio.get_running_loop()))
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(20)
    yield found[0]
    found[1].call_soon_threadsafe(down.set)
    thread.join(20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the test tool's dependencies
def test_schemathesis_finds_no_server_error(server: Running) -> None:
    """Generated requests, valid and not: no 5xx, documented statuses and content types only, error bodies of the documented shape."""
    import hypothesis
    import schemathesis
    from schemathesis import checks

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.sockets.port}/openapi.json")
    wanted = checks.CHECKS.get_all()
    chosen = [
        check
        for check in wanted
        if check.__name__
        in ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
    ]
    assert len(chosen) == 4
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.body:
            modes.append(schemathesis.GenerationMode.NEGATIVE)  # without a body there is nothing to get wrong
        for mode in modes:

            @hypothesis.settings(
                max_examples=60, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=chosen)

            check()


def test_the_document_names_every_route_and_field(server: Running) -> None:
    """Paths, request fields and the error body; every reference resolves."""
    import httpx

    document = httpx.get(f"http://127.0.0.1:{server.sockets.port}/openapi.json").json()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/generate",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
        "/version",
    } <= set(document["paths"])
    schemas = document["components"]["schemas"]
    assert {"messages", "tools", "max_completion_tokens", "stream_options", "min_p", "logit_bias"} <= set(
        schemas["ChatRequest"]["properties"]
    )
    assert {"prompt", "echo", "logprobs"} <= set(schemas["CompletionRequest"]["properties"])

    def check(node: object) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/components/schemas/") in schemas
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(document)
