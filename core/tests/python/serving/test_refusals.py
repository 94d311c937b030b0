"""What is refused is refused with 400 and the field's name, before any header of a stream and before any allocation."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest

from tokenspeed.config import ServingConfig
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import Running, running

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def bodies() -> dict[str, dict[str, object]]:
    return {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "hi"}}


def refused(response: httpx.Response, param: str | None = None) -> dict[str, object]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert str(error["param"]).startswith(param), error
        assert param.split(".")[0].split("[")[0] in str(error["message"]), error
    return error


async def healthy(server: Running) -> None:
    assert (await server.complete("still here")).status_code == 200


OPTIONAL = [
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs", "tools", "tool_choice",
    "response_format", "stream_options", "logit_bias", "user", "stream", "model", "top_k", "min_p", "presence_penalty", "frequency_penalty", "best_of",
    "suffix", "echo", "parallel_tool_calls", "priority", "functions", "metadata", "service_tier", "reasoning_effort",
]  # fmt: skip


async def test_api_12_null_means_not_given() -> None:
    """api-12: for each optional field, on both routes."""
    async with running() as server:
        for path, body in bodies().items():
            for name in OPTIONAL:
                response = await server.http.post(path, json={**body, name: None})
                assert response.status_code == 200, (path, name, response.text)


EMPTY = [
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": [""]}),
    (TEXT, {"prompt": []}),
    (TEXT, {"prompt": [[]]}),
    (TEXT, {"prompt": [[1], []]}),
    (TEXT, {"prompt": ["a", ""]}),
    (CHAT, {"messages": []}),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_api_15_empty_prompts_are_refused(stream: bool) -> None:
    """api-15: in every form, also as one row of several; nothing reaches the engine and the next request works."""
    async with running() as server:
        for path, body in EMPTY:
            refused(
                await server.http.post(path, json={**body, "stream": stream}), "messages" if path == CHAT else "prompt"
            )
        assert server.engine.requests == []
        await healthy(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_api_16_too_long_is_refused_before_the_stream_begins(stream: bool) -> None:
    """api-16: a prompt that fills the context and a prompt whose max_tokens do not fit are both 400, alike with and without streaming."""
    async with running(max_model_len=32) as server:
        for prompt, wanted in (
            ("x" * 33, None),
            ("x" * 32, None),
            ("x" * 31, 50),
            ([5] * 33, None),
            ([[5], [5] * 40], None),
        ):
            response = await server.complete(
                prompt, stream=stream, **({} if wanted is None else {"max_tokens": wanted})
            )
            assert refused(response)["code"] == "context_length_exceeded"
            assert response.headers["content-type"].startswith("application/json")
        assert refused(await server.chat("x" * 40, stream=stream))["code"] == "context_length_exceeded"
        assert (await server.complete("x" * 31, stream=stream)).status_code == 200


WRONG_TYPES = [
    ("tools", 7),
    ("messages", "hi"),
    ("messages", [3]),
    ("messages", [{"role": "assistant", "tool_calls": 5}]),
    ("tool_choice", {"type": "function"}),
    ("response_format", "json"),
    ("stop", {"a": 1}),
    ("stream_options", True),
    ("logit_bias", [1]),
    ("messages", {"role": "user"}),
    ("messages", None),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": ["x"]}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("tools", [{"type": "function"}]),
    ("tools", [5]),
    ("tools", [{"type": "function", "function": {"name": ""}}]),
    ("tools", [{"type": "function", "function": {"name": "f", "strict": True}}]),
    ("n", "2"),
    ("n", 1.5),
    ("max_tokens", "many"),
    ("seed", 2**70),
    ("stop", [1]),
    ("stop_token_ids", ["a"]),
    ("chat_template_kwargs", 3),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "c", "type": "function"}]}]),
    (
        "messages",
        [{"role": "user", "content": "x", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}],
    ),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": 3}}]}]),
]


async def test_api_18_wrong_containers_are_named() -> None:
    """api-18: every wrong container or type is a 400 that names the field, never a 500."""
    async with running() as server:
        for name, value in WRONG_TYPES:
            body = {**bodies()[CHAT], "stream": True, name: value}
            refused(await server.http.post(CHAT, json=body), name)
        await healthy(server)


async def test_bodies_that_are_no_object_are_refused() -> None:
    async with running() as server:
        for content in (
            b"",
            b"{",
            b"[]",
            b'"x"',
            b"\xff\xfe",
            b'{"prompt": "\xff"}',
            b'{"prompt": "\\ud800"}',
            b"[" * 100_000,
            b'{"a":' * 50_000,
        ):
            for path in (CHAT, TEXT, "/generate", "/tokenize", "/detokenize"):
                refused(await server.http.post(path, content=content))
        await healthy(server)


UNSUPPORTED = [
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("best_of", 2),
    ("store", True),
    ("modalities", ["text", "audio"]),
    ("audio", {}),
    ("guided_json", {}),
    ("web_search_options", {}),
    ("prompt_logprobs", 1),
    ("reasoning_effort", "low"),
    ("include_reasoning", False),
    ("use_beam_search", True),
    ("chat_template", "{{ 1 }}"),
    ("documents", [{}]),
    ("metadata", {"a": "b"}),
    ("service_tier", "flex"),
    ("truncate_prompt_tokens", 5),
    ("bad_words", ["x"]),
]


async def test_known_but_unsupported_fields_are_refused_by_name() -> None:
    """Nothing is dropped silently; templates of a request are never rendered; a neutral value asks for nothing and passes."""
    async with running() as server:
        for name, value in UNSUPPORTED:
            refused(await server.http.post(CHAT, json={**bodies()[CHAT], name: value}), name)
        neutral = {
            "response_format": {"type": "text"},
            "best_of": 1,
            "store": False,
            "modalities": ["text"],
            "function_call": "none",
            "include_reasoning": True,
        }
        assert (await server.chat(**neutral)).status_code == 200


async def test_unknown_fields_are_refused_with_the_nearest_name() -> None:
    async with running() as server:
        for path, body in bodies().items():
            error = refused(await server.http.post(path, json={**body, "temprature": 1}), "temprature")
            assert "did you mean temperature?" in str(error["message"])
        message = [{"role": "user", "content": "x", "cotent": "y"}]
        refused(await server.http.post(CHAT, json={"messages": message}), "messages[0].cotent")


async def test_unknown_models_are_404() -> None:
    async with running() as server:
        response = await server.chat(model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_ops_09_media_is_refused_and_nothing_is_fetched() -> None:
    """ops-09: image_url with every kind of address is a 400; the listener of the test sees no connection."""
    hits = []
    listener = await asyncio.start_server(lambda *_: hits.append(1), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    urls = [
        f"http://127.0.0.1:{port}/x",
        f"http://localhost:{port}",
        f"http://[::1]:{port}",
        f"http://0x7f000001:{port}",
        "file:///etc/hostname",
        "data:image/png;base64,AAAA",
    ]
    async with running() as server:
        for url in urls:
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url}},
            ):
                messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
                refused(await server.http.post(CHAT, json={"messages": messages}), "messages[0].content[1]")
    listener.close()
    assert hits == []


LIMITS = [
    (CHAT, {"logprobs": True, "top_logprobs": 1_000_000_000}, "top_logprobs"),
    (CHAT, {"n": 5_000_000}, "n"),
    (CHAT, {"n": 0}, "n"),
    (TEXT, {"prompt": [999_999_999]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (CHAT, {"logit_bias": {"999999999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": 1e300}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1": -100, "01": 100}}, "logit_bias"),
    (TEXT, {"repetition_penalty": 1e-300}, "repetition_penalty"),
    (TEXT, {"repetition_penalty": 1e-38}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 0.0099}, "repetition_penalty"),
    (CHAT, {"stop": ["x"] * 100_000}, "stop"),
    (CHAT, {"stop": ["x" * 100_000]}, "stop"),
    (CHAT, {"stop": [""]}, "stop"),
    (TEXT, {"best_of": 10_000_000}, "best_of"),
    (CHAT, {"max_tokens": 10**12}, "max_tokens"),
    (TEXT, {"max_tokens": 10**12}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": -1}, "max_tokens"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"logprobs": 10**9}, "logprobs"),
    (CHAT, {"stop_token_ids": [10**9]}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": [1] * 5000}, "stop_token_ids"),
    (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (TEXT, {"prompt": ["x"] * 2000, "n": 100}, "prompt"),
    (TEXT, {"prompt": [1] * 100_000}, "prompt"),
    (CHAT, {"messages": MESSAGES * 100_000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}]}, "messages"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 5000}, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": name}} for name in "fgf"]}, "tools[2].function.name"),
    (CHAT, {"logit_bias": {str(i): 0 for i in range(5000)}}, "logit_bias"),
    (CHAT, {"priority": 2**40}, "priority"),
    (CHAT, {"cache_salt": "x" * 1000}, "cache_salt"),
    (TEXT, {"prompt": "x", "stop_token_ids": [257]}, "stop_token_ids"),
]


async def test_ops_12_limits_are_checked_before_anything_is_allocated() -> None:
    """ops-12: absurd counts, ids and lists are a 400 with the field; nothing reaches the engine."""
    async with running() as server:
        for path, fields, param in LIMITS:
            refused(await server.http.post(path, json={**bodies()[path], **fields}), param)
        assert server.engine.requests == []
        await healthy(server)


FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
#: Of the values below, those that are in range.
FINE = {
    "top_p": set(),
    "min_p": {"0"},
    "temperature": {"0"},
    "presence_penalty": {"-1", "0"},
    "frequency_penalty": {"-1", "0"},
    "repetition_penalty": set(),
}


async def test_ops_19_extreme_floats_are_refused_by_name() -> None:
    """ops-19: out of range, infinite, not a number, strings and booleans, in each float field."""
    async with running() as server:
        for name in FLOATS:
            for literal in (
                "-1",
                "0",
                "1e308",
                "999999",
                "NaN",
                "Infinity",
                "-Infinity",
                '"0.5"',
                "true",
                "-1e400",
                "[]",
            ):
                content = json.dumps(bodies()[TEXT])[:-1] + f', "{name}": {literal}}}'
                response = await server.http.post(TEXT, content=content)
                if literal in FINE[name]:
                    assert response.status_code == 200, (name, literal)
                else:
                    refused(response, name)
        await healthy(server)


@pytest.mark.parametrize("value", ['{"5": 1e999}', '{"5": -Infinity}', '{"5": NaN}'])
async def test_a_number_that_is_not_finite_is_refused_by_its_fields_name_wherever_it_stands(value: str) -> None:
    async with running() as server:
        content = json.dumps(bodies()[TEXT])[:-1] + f', "logit_bias": {value}}}'
        refused(await server.http.post(TEXT, content=content), "logit_bias")
        assert server.engine.requests == []


async def test_the_smallest_and_largest_repetition_penalty_are_served_and_a_refusal_tells_them() -> None:
    async with running() as server:
        for value in (0.01, 100):
            assert (await server.complete(repetition_penalty=value)).status_code == 200
        for value in (0.009, 101):
            response = await server.complete(repetition_penalty=value)
            assert f"must lie in 0.01..100, got {value}" in response.json()["error"]["message"]
        document = (await server.http.get("/openapi.json")).json()
    field = document["components"]["schemas"]["CompletionRequest"]["properties"]["repetition_penalty"]
    assert (field["minimum"], field["maximum"]) == (0.01, 100)


async def test_ops_13_large_bodies_are_413_declared_or_not() -> None:
    """ops-13: past the limit by Content-Length or by what a chunked body sends; /health answers meanwhile."""

    async def endless(total: int):
        for _ in range(total // 65536):
            yield b"x" * 65536

    async with running(config=ServingConfig(port=0, max_body_bytes=1 << 20)) as server:
        declared = await server.http.post(TEXT, content=b"x" * (2 << 20))
        chunked = asyncio.create_task(server.http.post(TEXT, content=endless(4 << 20)))
        assert (await server.http.get("/health")).status_code == 200
        for response in (declared, await chunked):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        await healthy(server)


async def test_ops_13_texts_that_cannot_fit_are_refused_by_their_length() -> None:
    """ops-13: a text longer than the context's longest tokens is not tokenised at all."""
    async with running(max_model_len=64) as server:
        server.llm.tokenizer.encode = None  # type: ignore[method-assign, assignment]  (would raise)
        error = refused(await server.complete("x" * 1_000_000), "prompt")
        assert error["code"] == "context_length_exceeded"


async def test_ops_13_heads_are_bounded_in_size_and_number() -> None:
    """ops-13: many headers, one endless header, and an endless request line are closed with 431 or 400."""
    many = b"".join(b"a%d: b\r\n" % i for i in range(5000))
    for head in (
        b"GET /health HTTP/1.1\r\n" + many,
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000,
        b"GET /" + b"z" * 200_000,
    ):
        async with running() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets.port)
            writer.write(head)
            with contextlib.suppress(ConnectionResetError):  # it may be closed while we are still sending
                answer = await asyncio.wait_for(reader.read(), 60)
                assert answer.split(b"\r\n")[0].split()[1] == b"431"
            writer.close()
            assert (await server.http.get("/health")).status_code == 200


async def test_ops_13_slow_heads_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ops-13: a head that does not arrive is given up; an idle connection is not kept for ever either."""
    monkeypatch.setattr("tokenspeed.serving.http_protocol._HEAD_TIMEOUT_S", 0.2)
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets.port)
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        assert b"408" in await asyncio.wait_for(reader.read(), 60)
        writer.close()


async def test_ops_13_slow_bodies_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """ops-13: a body that does not arrive is answered 408; its connection is closed."""
    monkeypatch.setattr("tokenspeed.serving.body._BODY_TIMEOUT_S", 0.2)
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert b'"code":"timeout"' in answer
        writer.close()


async def test_a_priority_beyond_what_the_scheduler_takes_is_refused_by_name() -> None:
    async with running() as server:
        for path, body in bodies().items():
            for priority in (-1_000_001, 1_000_001):
                refused(await server.http.post(path, json={**body, "priority": priority}), "priority")
            assert (await server.http.post(path, json={**body, "priority": -1_000_000})).status_code == 200


async def test_a_refusal_of_the_engine_does_not_count_as_its_error() -> None:
    """Alerts watch the errors; a client's mistake must not raise one."""
    async with running(lambda _: Reply(error="the prompt never fits", param="prompt")) as server:
        refused(await server.complete(), "prompt")
        counts = await server.metrics()
    assert 'tokenspeed:requests_finished_total{reason="error"} 0.0' in counts
    assert 'tokenspeed:requests_finished_total{reason="refused"} 1.0' in counts


async def test_a_compressed_body_is_refused() -> None:
    async with running() as server:
        response = await server.http.post(TEXT, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert response.status_code == 415
        assert "gzip" in response.json()["error"]["message"]
        await healthy(server)


async def test_too_many_prompts_are_not_too_long_a_prompt() -> None:
    async with running() as server:
        many = refused(await server.http.post(TEXT, json={"prompt": ["x"] * 10_000}), "prompt")
        long = refused(await server.http.post(TEXT, json={"prompt": [97] * 10_000}), "prompt")
    assert (many["code"], long["code"]) == (None, "context_length_exceeded")
