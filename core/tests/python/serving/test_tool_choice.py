"""Forced and strict tools: the calls' grammar, finish reasons, finished and unfinished calls, and ids of the history."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from tokenspeed_plugin_parsers_base.parsers import PassthroughToolParser
from tokenspeed_plugin_parsers_gpt_oss.parsers import HarmonyReasoningParser, HarmonyToolParser
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser
from tokenspeed_plugin_parsers_kimi.tools import KimiK2ToolParser
from tokenspeed_plugin_parsers_mistral.tools import MistralToolParser

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.messages import Grammar
from tokenspeed.serving import constraint
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.server import Running, events, running, streamed_text, text_reply, until

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"], "additionalProperties": False}
ODD = {"type": "object", "properties": {"k": {"type": "array", "uniqueItems": True}}}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"k": "a"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "lookup"}}


def check(kind: str, value: str) -> None:
    if "uniqueItems" in value:
        raise GrammarError("$.properties.k.uniqueItems is not enforced")


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: object) -> dict[str, Any]:
    function = {"name": name, **fields} if parameters is None else {"name": name, "parameters": parameters, **fields}
    return {"type": "function", "function": function}


TOOLS = [tool("lookup", SCHEMA), tool("other")]


def refused(response: httpx.Response, param: str) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    return str(error["message"])


def sent(server: Running) -> Grammar | None:
    return server.engine.requests[-1].grammar


def tags_of(server: Running) -> dict[str, Any]:
    grammar = sent(server)
    assert grammar is not None
    found: dict[str, Any] = json.loads(grammar.value)["format"]
    return found


def called(tags: dict[str, Any]) -> list[str]:
    return [json.loads(tag["begin"].removeprefix("<tool_call>\n") + "{}}")["name"] for tag in tags["tags"]]


def schemas(tags: dict[str, Any]) -> list[Any]:
    return [tag["content"]["json_schema"] for tag in tags["tags"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")])
async def test_api_03_finish_reasons_of_forced_tools(choice: object, reason: str, stream: bool) -> None:
    """api-03: one table for whole and streamed answers: required ends with tool_calls, a named function with stop, as OpenAI does."""
    async with running(text_reply(CALL), tool_parser=HermesToolParser, grammar_checker=check) as server:
        response = await server.chat(tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        assert events(response.text)[-1]["choices"][0]["finish_reason"] == reason
    else:
        (answer,) = response.json()["choices"]
        assert answer["finish_reason"] == reason
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "lookup", "arguments": '{"k": "a"}'}


async def test_forced_tools_are_the_whole_answer() -> None:
    """required: any tool, at least one; named: that one, once; allowed_tools: those; without parallel_tool_calls exactly one."""
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]},
    }
    async with running(CALL, tool_parser=HermesToolParser, grammar_checker=check) as server:
        for choice, names in (("required", ["lookup", "other"]), (NAMED, ["lookup"]), (allowed, ["other"])):
            for parallel in (True, False):
                response = await server.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
                assert response.status_code == 200, response.text
                tags = tags_of(server)
                assert called(tags) == names
                assert (tags["type"], tags["at_least_one"], tags["stop_after_first"]) == (
                    "tags_with_separator", True, choice is NAMED or not parallel,
                )  # fmt: skip
        assert schemas(tags_of(server)) == [{"type": "object", "properties": {}, "additionalProperties": False}]
        allowed["allowed_tools"]["mode"] = "auto"  # type: ignore[index]
        assert (await server.chat(tools=TOOLS, tool_choice=allowed)).status_code == 200
        assert (tags_of(server)["type"], called(tags_of(server))) == ("triggered_tags", ["other"])


async def test_strict_tools_constrain_calls_alone() -> None:
    """With auto there is text around calls; a strict tool's calls follow its schema, others are any object. Without strict nothing is constrained."""
    async with running("hello", tool_parser=HermesToolParser, grammar_checker=check) as server:
        await server.chat(tools=[tool("lookup", SCHEMA, strict=True), tool("other", ODD)])
        tags = tags_of(server)
        assert (tags["type"], tags["triggers"], tags["at_least_one"]) == ("triggered_tags", ["<tool_call>"], False)
        assert schemas(tags) == [SCHEMA, {"type": "object"}]
        strict = {"tools": [tool("lookup", SCHEMA, strict=True)]}
        assert (await server.chat(**strict, min_tokens=3, ignore_eos=True, max_tokens=5)).status_code == 200
        for fields in ({"tools": TOOLS}, {"tools": [tool("f", ODD, strict=True)], "tool_choice": "none"}):
            assert (await server.chat(**fields)).status_code == 200
            assert sent(server) is None


async def test_gram_01_strict_is_a_promise() -> None:
    """gram-01: a strict schema that is not enforced to the letter is refused with its place; a required call of a tool that is not strict is then held
    to an object."""
    async with running(CALL, tool_parser=HermesToolParser, grammar_checker=check) as server:
        for choice in ("auto", "required"):
            tools = [tool("fine", SCHEMA, strict=True), tool("odd", ODD, strict=True)]
            message = refused(await server.chat(tools=tools, tool_choice=choice), "tools[1].function.parameters")
            assert "$.properties.k.uniqueItems" in message
        assert server.engine.requests == []
        await server.chat(tools=[tool("odd", ODD), tool("lookup", SCHEMA)], tool_choice="required")
        assert schemas(tags_of(server)) == [{"type": "object"}, SCHEMA]


async def test_tools_that_would_take_long_to_check_are_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number and their size at once; by the time of the checks together, of strict tools and of others."""
    asked: list[str] = []

    def slow(kind: str, value: str) -> None:
        asked.append(kind)
        now[0] += 0.9

    now = [0.0]
    monkeypatch.setattr(constraint.time, "thread_time", lambda: now[0])
    async with running(CALL, tool_parser=HermesToolParser, grammar_checker=slow) as server:
        many = [tool(f"f{at}", SCHEMA) for at in range(300)]
        assert "256 are allowed" in refused(await server.chat(tools=many, tool_choice="required"), "tool_choice")
        large = [tool("f", {"type": "object", "description": "x" * 300_000})]
        assert "262144 are allowed" in refused(await server.chat(tools=large, tool_choice="required"), "tool_choice")
        assert asked == []
        assert (await server.chat(tools=many, max_tokens=3)).status_code == 200  # nothing is held
        assert "2 s" in refused(await server.chat(tools=many[:9], tool_choice="required"), "tool_choice")
        assert len(asked) == 3


async def test_a_grammar_is_checked_while_texts_are_tokenised() -> None:
    """A check stands until a text that is long enough for the tokenising thread was answered."""
    begun, go = threading.Event(), threading.Event()

    def check_late(kind: str, value: str) -> None:
        begun.set()
        assert go.wait(60)

    async with running("yes", grammar_checker=check_late, max_model_len=100_000) as server:
        form = {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"choice": ["yes", "no"]}}
        held = asyncio.ensure_future(server.http.post("/v1/chat/completions", json=form))
        await until(begun.is_set)
        long = await server.http.post("/tokenize", json={"prompt": "x" * 3000})
        assert long.status_code == 200
        go.set()
        assert (await held).status_code == 200


async def test_choices_that_cannot_be_are_refused() -> None:
    async with running(CALL, tool_parser=HermesToolParser, grammar_checker=check) as server:
        refused(await server.chat(tool_choice="required"), "tool_choice")
        refused(await server.chat(tools=TOOLS, tool_choice="any"), "tool_choice")
        other = {"type": "function", "function": {"name": "missing"}}
        assert "lookup" in refused(await server.chat(tools=TOOLS, tool_choice=other), "tool_choice")
        form = {"type": "json_object"}
        refused(await server.chat(tools=TOOLS, tool_choice="required", response_format=form), "response_format.type")
        refused(await server.chat(tools=[tool("a b")], tool_choice="required"), "tools[0].function.name")
        refused(await server.chat(tools=TOOLS, tool_choice=NAMED, min_tokens=5), "min_tokens")
        assert server.engine.requests == []
    async with running(tool_parser=PassthroughToolParser, grammar_checker=check) as server:
        assert "PassthroughToolParser" in refused(await server.chat(tools=TOOLS, tool_choice="required"), "tool_choice")


async def test_a_form_beside_tools_leaves_both_ways() -> None:
    """tool_choice auto: the reply is calls, or an answer of the form."""
    async with running(CALL, tool_parser=HermesToolParser, grammar_checker=check) as server:
        await server.chat(tools=TOOLS, response_format={"type": "json_object"})
        calls, answer = tags_of(server)["elements"]
        assert (calls["type"], calls["at_least_one"]) == ("tags_with_separator", True)
        assert answer == {"type": "json_schema", "json_schema": {"type": "object"}}
        await server.chat(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
        assert sent(server) == Grammar("json_object")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool_call>\n{"name": "lookup", "arguments": {"k": oops}}\n</tool_call>', "stop"),
        ('<tool_call>\n{"name": "lookup", "arguments": {"k": "a', "stop"),
        (CALL + '\n<tool_call>\n{"name": "lookup", "arguments": {"k": oops}}', "tool_calls"),
    ],
)
async def test_only_finished_calls_count(text: str, reason: str, stream: bool) -> None:
    """A call that broke or was cut is none that a client could make: finish_reason says so, and what broke is in the content."""
    async with running(text_reply(text), tool_parser=HermesToolParser) as server:
        response = await server.chat(tools=TOOLS, stream=stream)
    if stream:
        chunks = events(response.text)
        content, found = streamed_text(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        (answer,) = response.json()["choices"]
        content, found = answer["message"]["content"] or "", answer["finish_reason"]
    assert found == reason
    assert ("oops" in content) == ("oops" in text)


class ThinkParser(TagReasoningParser):
    """``<think>`` .. ``</think>``."""


class ThinkTokenizer(ByteTokenizer):
    """The tags are the tokens 257 and 258."""

    def __init__(self) -> None:
        super().__init__(259, chat_template="{{ messages[0].content }}<|assistant|><think>")
        self.special_tokens = {256: "<256>"}
        for token, text in ((257, b"<think>"), (258, b"</think>")):
            self._pieces[token] = text

    def token_id(self, text: str) -> int | None:
        return {"<think>": 257, "</think>": 258}.get(text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, [">>>"]])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
async def test_reason_03_only_the_token_ends_the_reasoning(stream: bool, stop: list[str] | None, chunk: int) -> None:
    """reason-03: a quoted </think> is text, however the tokens are cut into steps and also where a stop string holds text back."""
    reply = text_reply("")(None)  # type: ignore[arg-type]
    reply.tokens = [*b"look for `</think>` here", 258, *b"\n\ndone", 256]
    reply.chunk = chunk
    async with running(lambda _: reply, tokenizer=ThinkTokenizer(), reasoning_parser=ThinkParser) as server:
        response = await server.chat(stream=stream, stop=stop)
    if stream:
        deltas = [piece["choices"][0]["delta"] for piece in events(response.text)]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
    else:
        message = response.json()["choices"][0]["message"]
        reasoning, content = message["reasoning_content"], message["content"]
    assert (reasoning, content) == ("look for `</think>` here", "done")


async def test_a_constrained_call_inside_reasoning_is_none() -> None:
    """The grammar begins behind the reasoning, so that a call inside it kept no promise: it stays reasoning. Without strict it is rescued."""
    reply = text_reply("")(None)  # type: ignore[arg-type]
    reply.tokens = [*f"hm {CALL}".encode(), 256]
    async with running(
        lambda _: reply,
        tokenizer=ThinkTokenizer(),
        reasoning_parser=ThinkParser,
        tool_parser=HermesToolParser,
        grammar_checker=check,
    ) as server:
        strict = (await server.chat(tools=[tool("lookup", SCHEMA, strict=True)])).json()["choices"][0]
        assert sent(server).reasoning_end == (258,)  # type: ignore[union-attr]
        loose = (await server.chat(tools=TOOLS)).json()["choices"][0]
    assert ("tool_calls" in strict["message"], strict["finish_reason"]) == (False, "stop")
    assert strict["message"]["reasoning_content"] == f"hm {CALL}"
    assert loose["finish_reason"] == "tool_calls"


async def test_harmony_without_tools_is_read_by_its_reasoning_parser_alone() -> None:
    """No tools, or tool_choice none: there is nobody to call, so that no call may come back."""
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{}<|call|>"
    tokenizer = ByteTokenizer(chat_template="{{ messages[0].content }}<|start|>assistant")
    async with running(
        text, tokenizer=tokenizer, tool_parser=HarmonyToolParser, reasoning_parser=HarmonyReasoningParser
    ) as server:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = (await server.chat(**fields)).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm", "{}")
            assert "tool_calls" not in message
        message = (await server.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "lookup"


HISTORY = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "a", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "b", "arguments": "{}"}},
            {"type": "function", "function": {"name": "c", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "tool", "content": "3"},
]  # fmt: skip
IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}"
    "{% if m.role == 'tool' %}={{ m.tool_call_id }} {% endif %}{% endfor %}"
)


async def test_tool_19_ids_of_the_history_take_the_family_s_form() -> None:
    """tool-19: Kimi's ids count over the conversation, an id used again in a later turn is that turn's, a missing one is filled in, and results follow."""
    async with running(tokenizer=ByteTokenizer(chat_template=IDS), tool_parser=KimiK2ToolParser) as server:
        response = await server.http.post("/v1/chat/completions", json={"messages": HISTORY})
        assert response.status_code == 200, response.text
        prompt = bytes(server.engine.requests[0].tokens[::4]).decode()
    assert prompt == "functions.a:0 =functions.a:0 functions.b:1 functions.c:2 =functions.b:1 =functions.c:2 "


async def test_tool_13_ids_of_the_history_are_nine_characters_for_mistral() -> None:
    """tool-13: the template refuses any others; hermes leaves them as they are."""
    async with running(tokenizer=ByteTokenizer(chat_template=IDS), tool_parser=MistralToolParser) as server:
        await server.http.post("/v1/chat/completions", json={"messages": HISTORY[:3]})
        call, result = bytes(server.engine.requests[0].tokens[::4]).decode().split()
    assert (len(call), result) == (9, f"={call}")
    async with running(tokenizer=ByteTokenizer(chat_template=IDS), tool_parser=HermesToolParser) as server:
        await server.http.post("/v1/chat/completions", json={"messages": HISTORY[:3]})
        assert bytes(server.engine.requests[0].tokens[::4]).decode() == "call_1 =call_1 "


async def test_stop_tokens_stay_out_of_parsers_that_see_special_tokens() -> None:
    """Their text would be content: it is cut even where stops are asked to stay."""
    tokenizer = ByteTokenizer()
    tokenizer._pieces[256] = b"<|stop|>"
    async with running("plain", tokenizer=tokenizer, tool_parser=KimiK2ToolParser) as server:
        (answer,) = (await server.chat(tools=TOOLS, include_stop_str_in_output=True)).json()["choices"]
    assert answer["message"]["content"] == "plain"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [0, 2, 5, len("\n</tool_call>") - 1])
async def test_a_cut_closing_marker_of_a_forced_call_is_no_text(end: int, stream: bool) -> None:
    text = CALL[: len(CALL) - len("\n</tool_call>") + end]
    async with running(
        text_reply(text, finish="length"), tool_parser=HermesToolParser, grammar_checker=check
    ) as server:
        body = {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS, "tool_choice": NAMED, "stream": stream}
        answer = await server.http.post("/v1/chat/completions", json=body)
        if stream:
            assert streamed_text(events(answer.text)) == ""
        else:
            assert not answer.json()["choices"][0]["message"].get("content")
