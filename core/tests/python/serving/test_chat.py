"""``/v1/chat/completions``: shapes of answers and streams, tools, stop strings, several choices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.messages import GenerateRequest
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import MODEL, events, running, streamed_text, text_reply

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"k": "%s"}}\n</tool_call>'


async def test_a_whole_answer_has_the_shape_that_clients_expect() -> None:
    async with running("hello") as server:
        body = (await server.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    async with running("hello") as server:
        response = await server.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_limits_end_with_length(limit: str) -> None:
    async with running("hello") as server:
        body = (await server.chat(**{limit: 2})).json()
    assert body["choices"][0]["message"]["content"] == "he"
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_api_04_stop_strings_cross_tokens(stream: bool) -> None:
    """api-04: nothing of the stop string is sent, streamed equals whole, the engine is told to stop, and tokens up to the match are counted."""
    async with running(text_reply("abc STOPPED and more", finish=None)) as server:
        response = await server.chat(
            stop=["STOPPED"], stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        )
        assert server.engine.stops
    if stream:
        chunks = events(response.text)
        assert streamed_text(chunks) == "abc "
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-2]["choices"][0]["stop_reason"] == "STOPPED"
        usage = chunks[-1]["usage"]
    else:
        body = response.json()
        assert body["choices"][0]["message"]["content"] == "abc "
        assert body["choices"][0]["stop_reason"] == "STOPPED"
        usage = body["usage"]
    assert usage["completion_tokens"] == len("abc STOPPED")


async def test_api_04_a_beginning_that_never_matches_is_text() -> None:
    """api-04: the second run of the report."""
    async with running("abc STORM") as server:
        chunks = events((await server.chat(stop=["STOPPED"], stream=True)).text)
    assert streamed_text(chunks) == "abc STORM"


async def test_stop_strings_wait_for_min_tokens_and_may_stay_in_the_text() -> None:
    async with running("a. b. c.") as server:
        body = (await server.chat(stop=".", min_tokens=4, include_stop_str_in_output=True)).json()
    assert body["choices"][0]["message"]["content"] == "a. b."


def scripted_calls(text: str) -> Callable[[GenerateRequest], Reply]:
    return text_reply(text)


@pytest.mark.parametrize("stop", [None, ["ZZZZZZZZ"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_become_calls(stream: bool, stop: list[str] | None) -> None:
    """api-06: with a stop string set the text still goes through the parser to its last byte: no markup in content, one call."""
    async with running(text_reply("Sure. " + CALL % "a"), tool_parser=HermesToolParser) as server:
        response = await server.chat(tools=TOOLS, stream=stream, stop=stop)
    if stream:
        chunks = events(response.text)
        calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["lookup"]
        assert [bool(call.get("id")) for call in calls] == [True] + [False] * (len(calls) - 1)
        assert "".join(call["function"]["arguments"] for call in calls) == '{"k": "a"}'
        assert streamed_text(chunks).strip() == "Sure."
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    else:
        (choice,) = response.json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "lookup", "arguments": '{"k": "a"}'}
        assert call["id"].startswith("call_")
        assert call["type"] == "function"
        assert choice["message"]["content"].strip() == "Sure."
        assert choice["finish_reason"] == "tool_calls"


async def test_content_is_null_where_there_are_calls_only() -> None:
    async with running(text_reply(CALL % "a"), tool_parser=HermesToolParser) as server:
        message = (await server.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_api_21_parallel_tool_calls_false_gives_one_call(stream: bool) -> None:
    """api-21: later calls are dropped whole, the first one's arguments stay whole."""
    async with running(text_reply(CALL % "a" + "\n" + CALL % "b"), tool_parser=HermesToolParser) as server:
        response = await server.chat(tools=TOOLS, stream=stream, parallel_tool_calls=False)
        both = (await server.chat(tools=TOOLS)).json()
    assert len(both["choices"][0]["message"]["tool_calls"]) == 2
    if stream:
        calls = [call for chunk in events(response.text) for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert {call["index"] for call in calls} == {0}
        assert "".join(call["function"]["arguments"] for call in calls) == '{"k": "a"}'
    else:
        assert [call["function"]["arguments"] for call in response.json()["choices"][0]["message"]["tool_calls"]] == [
            '{"k": "a"}'
        ]


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {}])
async def test_without_tools_or_with_choice_none_text_stays_untouched(fields: dict[str, object]) -> None:
    text = CALL % "a"
    async with running(text_reply(text), tool_parser=HermesToolParser) as server:
        (choice,) = (await server.chat(**fields)).json()["choices"]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"


async def test_a_call_cut_by_the_limit_ends_with_length_and_unfinished_arguments() -> None:
    async with running(text_reply(CALL % "a"), tool_parser=HermesToolParser) as server:
        (choice,) = (await server.chat(tools=TOOLS, max_tokens=CALL.index("}}") + len("a") - len("%s") + 1)).json()[
            "choices"
        ]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"k": "a"'


async def test_tools_without_a_parser_are_refused() -> None:
    async with running() as server:
        response = await server.chat(tools=TOOLS)
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_are_n_requests_with_seeds_of_their_own(stream: bool) -> None:
    """n>1: choices differ, yet the same seed gives the same set; each keeps its index."""
    script = lambda request: Reply(tokens=[*f"seed {request.params.seed}".encode(), 256])  # noqa: E731
    async with running(script) as server:
        response = await server.chat(n=3, seed=7, stream=stream)
        assert [request.params.seed for request in server.engine.requests] == [7, 8, 9]
    if stream:
        chunks = events(response.text)
        texts = [streamed_text(chunks, index) for index in range(3)]
    else:
        body = response.json()
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
        assert body["usage"]["completion_tokens"] == 3 * len("seed 7" + "e")
    assert texts == ["seed 7", "seed 8", "seed 9"]


async def test_api_19_empty_content_is_empty_text() -> None:
    """api-19: content null, missing, or beside tool calls never prints None, and arguments reach the template as objects."""
    template = "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls or [] %}{{ c.function.arguments.k }}{% endfor %}{% endfor %}"
    call = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"k": "a"}'}}
    histories = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    async with running(tokenizer=ByteTokenizer(chat_template=template)) as server:
        for message in histories:
            messages = [
                {"role": "user", "content": "q"},
                message,
                {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
            ]
            assert (await server.http.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
        prompts = [bytes(request.tokens[::4]).decode() for request in server.engine.requests]
    assert prompts == ["[q][]a[ok]", "[q][]a[ok]", "[q][][ok]"]


async def test_content_parts_developer_role_and_template_arguments() -> None:
    template = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}{{ mood }}{{ add_generation_prompt }}"
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "q"},
    ]
    async with running(tokenizer=ByteTokenizer(chat_template=template)) as server:
        fields = {"messages": messages, "chat_template_kwargs": {"mood": "calm"}, "add_generation_prompt": False}
        await server.http.post("/v1/chat/completions", json=fields)
        assert bytes(server.engine.requests[0].tokens[::4]).decode() == "system=a\nb;user=q;calmFalse"


async def test_continue_final_message_ends_the_prompt_behind_it() -> None:
    async with running() as server:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Yes, "}]
        fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        assert (await server.http.post("/v1/chat/completions", json=fields)).status_code == 200
        assert bytes(server.engine.requests[0].tokens[::4]).decode() == "user: q\nassistant: Yes, "


async def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "repetition_penalty": 1.1,
        "seed": 5, "stop_token_ids": [65, 66], "ignore_eos": True, "min_tokens": 2, "logit_bias": {"7": -100, "8": 1.5}, "max_tokens": 9,
        "logprobs": True, "top_logprobs": 3, "priority": -1, "cache_salt": "tenant",
    }  # fmt: skip
    async with running() as server:
        assert (await server.chat(**fields)).status_code == 200
        (request,) = server.engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, -0.3, 1.1)
    assert (params.seed, params.stop_token_ids, params.ignore_eos, params.min_tokens) == (5, (65, 66), True, 2)
    assert (params.logit_bias, params.max_new_tokens, params.logprobs) == (((7, -100.0), (8, 1.5)), 9, 3)
    assert (request.priority, request.salt) == (-1, b"tenant")


async def test_what_the_engine_refuses_is_400_and_what_fails_is_told() -> None:
    """A request that can never fit is the client's to change, also when streamed; one that fails on the way ends with 500 or an error event."""
    async with running(lambda _: Reply(error="needs more pages than there are")) as server:
        for response in (await server.chat(), await server.chat(stream=True), await server.complete(stream=True)):
            assert response.status_code == 400
            assert "more pages" in response.json()["error"]["message"]
        assert (await server.http.get("/health")).status_code == 200
    async with running(lambda _: Reply(tokens=[97, 98], error="logits are not finite")) as server:
        whole, stream = await server.chat(), await server.chat(stream=True)
        metrics = await server.metrics()
    assert whole.status_code == 500
    assert "not finite" in whole.json()["error"]["message"]
    assert streamed_text(events(stream.text)[:-1]) == "ab"
    assert "not finite" in events(stream.text)[-1]["error"]["message"]
    assert 'tokenspeed:requests_finished_total{reason="error"} 2.0' in metrics


class ThinkParser(TagReasoningParser):
    """``<think>`` .. ``</think>``."""


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart_and_calls_behind_it_are_found(stream: bool) -> None:
    """api-06: reasoning parser first, then tool parser, to the last byte and with a stop string set; under both names that clients read."""
    text = "<think>x < y</think>" + CALL % "a"
    async with running(text_reply(text), tool_parser=HermesToolParser, reasoning_parser=ThinkParser) as server:
        response = await server.chat(tools=TOOLS, stream=stream, stop=["ZZZZZZZZ"])
        plain = (await server.chat()).json()["choices"][0]["message"]
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.text)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "x < y"
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "x < y"
        assert "".join(delta.get("content") or "" for delta in deltas) == ""
        arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(arguments) == '{"k": "a"}'
    else:
        message = response.json()["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "x < y"
        assert message["content"] is None
        assert message["tool_calls"][0]["function"]["arguments"] == '{"k": "a"}'
    assert plain["content"] == CALL % "a"
