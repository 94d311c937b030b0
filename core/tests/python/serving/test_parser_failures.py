"""A parser plugin that raises, whatever it raises, costs the one request and is counted as an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.interfaces.parser import ParserDelta, ToolCallDelta
from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.testing.server import Running, events, running, text_reply

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


class InterruptingTools(HermesToolParser):
    def feed(self, text: str):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt


class CancellingTools(HermesToolParser):
    def feed(self, text: str):  # type: ignore[no-untyped-def]
        raise asyncio.CancelledError


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
        {"tool_parser": InterruptingTools},
        {"tool_parser": CancellingTools},
        {"tool_parser": FailingTools},
        {"reasoning_parser": QuittingReasoning},
    ],
    ids=["tools quit", "tools quit at the end", "tools interrupt", "tools cancel", "tools fail", "reasoning quits"],
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


WRONG = [
    None,
    ParserDelta(content=None),  # type: ignore[arg-type]
    ParserDelta(calls=({"index": 0},)),  # type: ignore[arg-type]
    ParserDelta(calls=(ToolCallDelta(index=0, name="f", arguments={"a": 1}),)),  # type: ignore[arg-type]
    ParserDelta(calls=(ToolCallDelta(index=0, name="f", arguments=None),)),  # type: ignore[arg-type]
    ParserDelta(calls=(ToolCallDelta(index=0, name=5),)),  # type: ignore[arg-type]
    ParserDelta(calls=(ToolCallDelta(index=0, name="f", id=5),)),  # type: ignore[arg-type]
    ParserDelta(calls=(ToolCallDelta(index=True, name="f"),)),
    ParserDelta(calls=(ToolCallDelta(index=-1, name="f"),)),
    ParserDelta(calls=(ToolCallDelta(index=10**9, name="f"),)),
    ParserDelta(calls=(ToolCallDelta(index=0, arguments="{}"),)),
    ParserDelta(calls=(ToolCallDelta(index=0, name="f"), ToolCallDelta(index=0, name="f"))),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
async def test_a_parser_that_answers_wrong_fails_its_request_and_tells_the_client_none_of_it(
    wrong: Any, stream: bool
) -> None:
    class WrongTools(HermesToolParser):
        def feed(self, text: str):  # type: ignore[no-untyped-def]
            return wrong

    async with running("hello", tool_parser=WrongTools) as server:
        response = await server.chat(stream=stream, tools=TOOLS)
        assert response.status_code == 500 or "error" in events(response.text)[-1]
        assert "tool_calls" not in response.text
        await error_counted(server)
        assert (await server.complete("still here")).status_code == 200


@pytest.mark.parametrize("parallel", [False, True])
async def test_calls_in_turn_are_told(parallel: bool) -> None:
    """The check of turns counts the calls that a client without parallel calls is not told of as well."""
    calls = (
        ToolCallDelta(index=0, name="f", arguments="{"),
        ToolCallDelta(index=0, arguments="}"),
        ToolCallDelta(index=1, name="g", arguments="{}"),
    )

    class TwoCalls(HermesToolParser):
        def feed(self, text: str):  # type: ignore[no-untyped-def]
            return ParserDelta(calls=calls)

    async with running(text_reply("x"), tool_parser=TwoCalls) as server:
        response = await server.chat(tools=TOOLS, parallel_tool_calls=parallel)
        told = response.json()["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in told] == (["f", "g"] if parallel else ["f"])
