"""Tool calls as an agent makes them: the openai client with its strict validation, a real server of SmolLM2 with the hermes format, streamed and not.

SmolLM2 was not trained on tools; what holds it to calls is the grammar. So every schema here bounds its texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from .conftest import MODEL, RunningServer, start_server

pytest.importorskip("tokenspeed_plugin_grammar_xgrammar", reason="needs the xgrammar plugin")

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
ALARM = {
    "type": "object",
    "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "quiet": {"type": "boolean"}},
    "required": ["hour", "quiet"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "set_alarm": ALARM}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name.replace("_", " "), "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]  # fmt: skip
NAMED: Any = {"type": "function", "function": {"name": "set_alarm"}}
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo for the next three days?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the hermes parser and the grammar backend that is installed."""
    started = start_server(tmp_path_factory.mktemp("tools") / "server.log", MODEL, "--tool-call-parser", "hermes")
    try:
        started.wait_ready()
        yield started
    finally:
        started.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """Raises for any field of an answer that does not fit its declared type."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300, _strict_response_validation=True
    ) as made:
        yield made


class Reply:
    """A whole or streamed answer in one form."""

    def __init__(self, client: openai.OpenAI, server: RunningServer, *, stream: bool, **fields: Any) -> None:
        fields = {"model": server.model, "temperature": 0, "max_tokens": 400, **fields}
        self.content, self.finish = "", ""
        calls: dict[int, dict[str, str]] = {}
        if not stream:
            choice = client.chat.completions.create(stream=False, **fields).choices[0]
            self.content, self.finish = choice.message.content or "", choice.finish_reason
            for at, call in enumerate(choice.message.tool_calls or []):
                assert call.type == "function"
                calls[at] = {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        else:
            for chunk in client.chat.completions.create(stream=True, **fields):
                for choice in chunk.choices:
                    self.content += choice.delta.content or ""
                    self.finish = choice.finish_reason or self.finish
                    for call in choice.delta.tool_calls or []:
                        found = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                        assert call.function is not None
                        found["id"] += call.id or ""
                        found["name"] += call.function.name or ""
                        found["arguments"] += call.function.arguments or ""
        assert list(calls) == list(range(len(calls)))
        self.calls = list(calls.values())
        for call in self.calls[: -1 if self.finish == "length" else None]:  # the last one may be unfinished
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])

    def message(self) -> dict[str, Any]:
        """What goes into the history."""
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.content or None, **({"tool_calls": calls} if calls else {})}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named_calls(client: openai.OpenAI, server: RunningServer, stream: bool) -> None:
    """Calls that fit their schemas, no text beside them, and OpenAI's finish reasons; parallel_tool_calls false gives exactly one."""
    many = Reply(client, server, stream=stream, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=120)
    assert many.calls
    assert (many.content, many.finish) in (("", "tool_calls"), ("", "length"))
    one = Reply(
        client, server, stream=stream, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert (len(one.calls), one.content, one.finish) == (1, "", "tool_calls")
    named = Reply(
        client, server, stream=stream, messages=ASK, tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False
    )
    assert ([call["name"] for call in named.calls], named.content, named.finish) == (["set_alarm"], "", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_with_results(client: openai.OpenAI, server: RunningServer, stream: bool) -> None:
    """Each turn: a call, its result, an answer in words; every form of a result's content, and ids that are found again."""
    history: list[Any] = []
    results: list[Any] = [
        "Rain, 4 degrees",
        [{"type": "text", "text": "Sun, "}, {"type": "text", "text": "9 degrees"}],
        "",
    ]
    for turn, result in enumerate(results):
        history.append({"role": "user", "content": f"Question {turn}: how will the weather be in Bergen?"})
        asked = Reply(
            client,
            server,
            stream=stream,
            messages=history,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        assert len(asked.calls) == 1
        history.append(asked.message())
        history.append({"role": "tool", "tool_call_id": asked.calls[0]["id"], "content": result})
        told = Reply(client, server, stream=stream, messages=history, tools=TOOLS, tool_choice="none", max_tokens=24)
        assert told.calls == []
        assert told.content
        history.append(told.message())
    ids = [call["id"] for message in history for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3


@pytest.mark.slow
def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI, server: RunningServer) -> None:
    """Greedy, so that names, arguments, content and reason are equal; with auto there may be words, and strict calls where the model makes any."""
    for choice in ("auto", "required", NAMED):
        fields = {
            "messages": ASK,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 80,
        }
        whole, streamed = (Reply(client, server, stream=stream, **fields) for stream in (False, True))
        assert (whole.content, whole.finish) == (streamed.content, streamed.finish)
        assert [(c["name"], c["arguments"]) for c in whole.calls] == [
            (c["name"], c["arguments"]) for c in streamed.calls
        ]


class Verdict(pydantic.BaseModel):
    """What the answer is parsed into."""

    likely: bool
    degrees: int = pydantic.Field(ge=-50, le=50)


@pytest.mark.slow
def test_answers_parse_into_models(client: openai.OpenAI, server: RunningServer) -> None:
    """The client's own parse helper: it sends a strict schema and validates what comes back."""
    answer = client.chat.completions.parse(
        model=server.model, messages=ASK, response_format=Verdict, temperature=0, max_tokens=200
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Verdict)


@pytest.mark.slow
def test_refusals_are_the_client_s_exceptions(client: openai.OpenAI, server: RunningServer) -> None:
    """gram-01: a strict tool whose schema asks for what is not enforced is a 400 with keyword, place and field."""
    odd = {"type": "object", "properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=ASK, tools=tools)
    assert caught.value.param == "tools[0].function.parameters"
    assert "$.properties.a.uniqueItems" in caught.value.message
