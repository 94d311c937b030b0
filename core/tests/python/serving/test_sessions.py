"""Sessions over HTTP: what reaches the engine, what is refused, and what a client may say of a session between its turns."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.config import ServingConfig
from tokenspeed.serving.protocol.sessions import MAX_RETAIN_S, session_number
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import Running, running, until

pytestmark = pytest.mark.anyio

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"k": "v"}}\n</tool_call>'
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/generate": {"text": "hi"},
}


def test_a_number_belongs_to_the_id_and_the_tenant() -> None:
    """The same everywhere and for ever: two server processes in front of one engine must agree."""
    assert session_number("a", b"") == session_number("a", b"")
    numbers = [
        session_number(name, salt) for name, salt in (("a", b""), ("a", b"x"), ("b", b""), ("ab", b""), ("b", b"a"))
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert session_number("conversation-1", b"tenant") == 7527410064498179384


@pytest.mark.parametrize("path", ROUTES)
async def test_fields_and_headers_reach_the_engine(path: str) -> None:
    """Nothing is said of a session where none is named; a header may repeat what the body says."""
    async with running() as server:
        plain = {"session_id": "s", "cache_salt": "t"}
        for fields, headers in (
            ({}, {}),
            ({**plain, "retain_s": 1.5}, {}),
            (plain, {}),
            ({"cache_salt": "t"}, {"X-Session-Id": "s", "X-Retain-S": "1.5"}),
            ({**plain, "retain_s": 1.5}, {"X-Session-Id": "s", "X-Retain-S": "1.50"}),
        ):
            response = await server.http.post(path, json={**ROUTES[path], **fields}, headers=headers)
            assert response.status_code == 200, response.text
        told = [(request.session, request.retain_us) for request in server.engine.requests]
    number = session_number("s", b"t")
    assert told == [(-1, 0), (number, 1_500_000), (number, 0), (number, 1_500_000), (number, 1_500_000)]


REFUSED = [
    ({"retain_s": 5}, {}, "retain_s"),
    ({}, {"X-Retain-S": "5"}, "retain_s"),
    ({"session_id": ""}, {}, "session_id"),
    ({"session_id": "a/b"}, {}, "session_id"),
    ({"session_id": "-a"}, {}, "session_id"),
    ({"session_id": "a\n"}, {}, "session_id"),
    ({"session_id": "x" * 129}, {}, "session_id"),
    ({"session_id": 5}, {}, "session_id"),
    ({"session_id": "s", "retain_s": -1}, {}, "retain_s"),
    ({"session_id": "s", "retain_s": MAX_RETAIN_S + 1}, {}, "retain_s"),
    ({"session_id": "s", "retain_s": "5"}, {}, "retain_s"),
    ({"session_id": "s"}, {"X-Session-Id": "t"}, "session_id"),
    ({"session_id": "s", "retain_s": 5}, {"X-Retain-S": "6"}, "retain_s"),
    ({"session_id": "s"}, {"X-Retain-S": "-1"}, "X-Retain-S"),
    ({"session_id": "s"}, {"X-Retain-S": "1e3"}, "X-Retain-S"),
    ({"session_id": "s"}, {"X-Retain-S": "3601"}, "X-Retain-S"),
    ({}, {"X-Session-Id": "a b"}, "X-Session-Id"),
]


@pytest.mark.parametrize("path", ROUTES)
async def test_what_makes_no_sense_is_refused_by_name(path: str) -> None:
    async with running() as server:
        for fields, headers, param in REFUSED:
            response = await server.http.post(path, json={**ROUTES[path], **fields}, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), (fields, headers)
        assert server.engine.requests == []


async def test_headers_that_contradict_themselves_are_refused_by_name() -> None:
    """A proxy may have added one of its own; one that only repeats the other is fine."""
    async with running() as server:
        for name, values in (("X-Session-Id", ("a", "b")), ("X-Retain-S", ("5", "6"))):
            for path, body in ROUTES.items():
                headers = [(name, value) for value in values]
                response = await server.http.post(path, json={**body, "session_id": "a"}, headers=headers)
                assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        salts = [("X-Cache-Salt", "a"), ("X-Cache-Salt", "b")]
        assert (await server.http.delete("/v1/sessions/s", headers=salts)).json()["error"]["param"] == "X-Cache-Salt"
        assert server.engine.requests == []
        twice = [("X-Session-Id", "a"), ("X-Session-Id", "a")]
        assert (await server.http.post("/generate", json={"text": "hi"}, headers=twice)).status_code == 200


async def test_a_session_goes_on_from_one_answer() -> None:
    async with running() as server:
        for response in (
            await server.chat(n=2, session_id="s"),
            await server.complete(["a", "b"], session_id="s"),
            await server.http.post("/generate", json={"text": "a", "session_id": "s", "sampling_params": {"n": 2}}),
        ):
            assert response.status_code == 400
            assert "one answer" in response.json()["error"]["message"]
        inside = {"text": "a", "sampling_params": {"session_id": "s"}}
        assert "beside sampling_params" in (await server.http.post("/generate", json=inside)).text


async def test_without_prefix_caching_a_session_is_refused() -> None:
    """There would be nothing to keep; other requests go on."""
    async with running() as server:
        assert server.llm.client.info is not None
        server.llm.client.info = msgspec.structs.replace(
            server.llm.client.info, config={"enable_prefix_caching": False}
        )
        for path, body in ROUTES.items():
            response = await server.http.post(path, json={**body, "session_id": "s", "retain_s": 5})
            assert response.status_code == 400
            assert "keeps no prefixes" in response.json()["error"]["message"]
            assert (await server.http.post(path, json=body)).status_code == 200


async def kept(server: Running) -> bool:
    """Whether the session ``s`` is kept; asks the engine behind everything that was told before."""
    return (await server.http.post("/v1/sessions/s/prefetch")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_where_tools_may_be_called_pages_are_kept_after_a_call_only(stream: bool) -> None:
    """An answer that calls no tool waits for none; so does a call that was cut. A named function is called although its finish reason is ``stop``."""
    fields = {"session_id": "s", "retain_s": 60, "stream": stream}
    async with running(CALL, tool_parser=HermesToolParser, grammar_checker=lambda _kind, _value: None) as server:
        await server.chat(tools=TOOLS, **fields)
        assert await kept(server)
        await server.chat(tools=TOOLS, **fields, max_tokens=20)
        assert not await kept(server)
        await server.chat(tools=TOOLS, **fields, tool_choice={"type": "function", "function": {"name": "lookup"}})
        assert await kept(server)
    async with running("no call", tool_parser=HermesToolParser) as server:
        await server.chat(tools=TOOLS, **fields)
        assert not await kept(server)
        assert server.engine.control[-2:] == ["release_session", "prefetch_session"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_leaves_what_was_kept_before_it(stream: bool) -> None:
    """The next attempt finds the pages; tools make no difference, nor does an error in the engine."""
    answers = iter(
        (
            Reply(tokens=[*CALL.encode(), 256]),
            Reply(tokens=list(b"no c"), finish=None),
            Reply(tokens=list(b"no c"), error="broken"),
        )
    )
    fields = {"session_id": "s", "retain_s": 60, "tools": TOOLS}
    async with running(lambda _: next(answers), tool_parser=HermesToolParser) as server:
        await server.chat(**fields)
        assert await kept(server)
        cut = asyncio.create_task(server.chat(**fields, stream=stream))
        await until(lambda: server.engine.running)
        await server.control.post("/abort", json={"abort_all": True})
        assert '"finish_reason":"abort"' in (await cut).text
        assert await kept(server)
        await server.chat(**fields, stream=stream)
        assert server.engine.control == ["prefetch_session"] * 2


@pytest.mark.parametrize("path", ROUTES)
async def test_where_the_server_looks_for_no_calls_pages_are_kept_after_every_good_end(path: str) -> None:
    """The client knows what follows; the next turn without ``retain_s`` ends it."""
    async with running() as server:
        await server.http.post(path, json={**ROUTES[path], "session_id": "s", "retain_s": 60})
        assert await kept(server)
        await server.http.post(path, json={**ROUTES[path], "session_id": "s"})
        assert not await kept(server)


async def test_a_session_is_brought_up_and_released_by_its_tenant_only() -> None:
    async with running() as server:
        await server.complete("hi", session_id="s", retain_s=60, cache_salt="grüße")
        for options in (
            {},
            {"headers": {"X-Cache-Salt": "other"}},
            {"json": {"cache_salt": "other"}},
        ):
            for method, path in (("POST", "/v1/sessions/s/prefetch"), ("DELETE", "/v1/sessions/s")):
                response = await server.http.request(method, path, **options)
                assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
        salt = {"X-Cache-Salt": "grüße".encode()}
        up = await server.http.post("/v1/sessions/s/prefetch", json={"cache_salt": "grüße"})
        assert (up.status_code, up.json()) == (200, {"session_id": "s", "pages": 2})
        assert (await server.http.post("/v1/sessions/s/prefetch", headers=salt)).status_code == 200
        metrics = await server.metrics()
        assert "tokenspeed:sessions 1.0" in metrics
        assert "tokenspeed:retained_pages 2.0" in metrics
        assert 'tokenspeed:prefix_hits_cut_total{reason="evicted"} 0.0' in metrics
        assert (await server.http.delete("/v1/sessions/s", headers=salt)).json() == {"session_id": "s", "pages": 2}
        assert (await server.http.delete("/v1/sessions/s", headers=salt)).status_code == 404


async def test_what_is_wrong_with_a_question_about_a_session_is_named() -> None:
    async with running() as server:
        for options, param in (
            ({"json": {"cache_salt": "a"}, "headers": {"X-Cache-Salt": "b"}}, "cache_salt"),
            ({"json": {"retain_s": 5}}, "retain_s"),
            ({"json": {"cache_salt": "x" * 257}}, "cache_salt"),
        ):
            response = await server.http.post("/v1/sessions/s/prefetch", **options)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await server.http.delete("/v1/sessions/-s")).status_code == 400
        assert (await server.http.delete("/v1/sessions/" + "s" * 129)).status_code == 400
        assert (await server.http.get("/v1/sessions/s")).status_code == 405
        assert (await server.control.delete("/v1/sessions/s")).status_code == 404
        assert server.engine.control == []


async def test_the_key_guards_sessions_and_a_server_that_drains_answers_503() -> None:
    async with running(config=ServingConfig(port=0, api_key=("key",))) as server:
        for method, path in (("POST", "/v1/sessions/s/prefetch"), ("DELETE", "/v1/sessions/s")):
            assert (await server.http.request(method, path)).status_code == 404
            assert (await server.http.request(method, path, headers={"authorization": "none"})).status_code == 401
            server.context.draining = True
            assert (await server.http.request(method, path)).status_code == 503
            server.context.draining = False


async def test_the_document_describes_sessions() -> None:
    async with running() as server:
        document = (await server.http.get("/openapi.json")).json()
    assert "post" in document["paths"]["/v1/sessions/{session_id}/prefetch"]
    assert "delete" in document["paths"]["/v1/sessions/{session_id}"]
    schemas = document["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "GenerateBody"):
        assert {"session_id", "retain_s"} <= set(schemas[name]["properties"])
    assert schemas["SessionBody"]["additionalProperties"] is False
