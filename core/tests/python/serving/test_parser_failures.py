"""A parser plugin that raises, whatever it raises, costs the one request and is counted as an error."""

from __future__ import annotations

from typing import Any

import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.testing.server import Running, events, running

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]


class QuittingTools(HermesToolParser):
    def feed(self, text: str):  # type: ignore[no-untyped-def]
        raise SystemExit(3)


class QuittingReasoning(TagReasoningParser):
    def feed(self, *_):  # type: ignore[no-untyped-def]
        raise SystemExit(3)


class QuittingAtTheEnd(HermesToolParser):
    def finish(self):  # type: ignore[no-untyped-def]
        raise SystemExit(3)


class FailingTools(HermesToolParser):
    def feed(self, text: str):  # type: ignore[no-untyped-def]
        raise ValueError("no such markup")


async def error_counted(server: Running) -> None:
    metrics = await server.metrics()
    assert 'tokenspeed:requests_finished_total{reason="error"} 1.0' in metrics
    for other in ("stop", "length", "abort"):
        assert f'tokenspeed:requests_finished_total{{reason="{other}"}} 0.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "parsers",
    [
        {"tool_parser": QuittingTools},
        {"tool_parser": QuittingAtTheEnd},
        {"tool_parser": FailingTools},
        {"reasoning_parser": QuittingReasoning},
    ],
    ids=["tools quit", "tools quit at the end", "tools fail", "reasoning quits"],
)
async def test_a_parser_that_raises_fails_its_request_alone(parsers: dict[str, Any], stream: bool) -> None:
    async with running("hello", **parsers) as server:
        fields: dict[str, Any] = {"tools": TOOLS} if "tool_parser" in parsers else {}
        response = await server.chat(stream=stream, **fields)
        if response.status_code == 200:
            assert stream
            assert "error" in events(response.text)[-1]
        else:
            assert response.status_code == 500
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        await error_counted(server)
        assert (await server.complete("still here")).status_code == 200
