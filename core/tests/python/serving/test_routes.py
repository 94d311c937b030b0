"""The other routes of both ports, keys, and metrics."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

import tokenspeed
from tokenspeed.config import ServingConfig
from tokenspeed.messages import EngineStats, Outputs, TierStats
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import MODEL, events, running, until

pytestmark = pytest.mark.anyio

ENDLESS = Reply(tokens=[97] * 100_000, finish=None)


async def test_models_are_listed_and_shown_by_name() -> None:
    async with running() as server:
        listed = (await server.http.get("/v1/models")).json()
        shown = await server.http.get(f"/v1/models/{MODEL}")
        missing = await server.http.get("/v1/models/none")
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert shown.json()["max_model_len"] == 512
    assert missing.status_code == 404
    assert "'none'" in missing.json()["error"]["message"]


async def test_generate_takes_text_or_ids() -> None:
    async with running("hello") as server:
        text = (
            await server.http.post(
                "/generate", json={"text": "ab", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
            )
        ).json()
        ids = (await server.http.post("/generate", json={"input_ids": [97, 98], "sampling_params": {"n": 2}})).json()
        stream = await server.http.post(
            "/generate", json={"text": "ab", "stream": True, "return_logprob": True, "return_prompt_logprob": True}
        )
        refused = [
            await server.http.post("/generate", json=body)
            for body in (
                {},
                {"text": "a", "input_ids": [1]},
                {"text": "a", "sampling_params": {"max_tokens": 3}},
                {"text": "a", "sampling_params": {"bogus": 3}},
                {"text": ""},
                {"input_ids": []},
                {"text": "a", "top_logprobs_num": 2},
                {"text": "a", "sampling_params": {"stream": True}},
            )
        ]
        assert server.engine.requests[0].params.temperature == 0
    assert text["text"] == "hel"
    assert text["output_ids"] == [*b"hel"]
    assert text["meta_info"]["finish_reason"] == {"type": "length", "matched": None}
    assert [entry["text"] for entry in ids] == ["hello", "hello"]
    parts = events(stream.text)
    assert "".join(part["text"] for part in parts) == "hello"
    assert parts[0]["meta_info"]["prompt_logprobs"][0] == {"id": 97, "logprob": None, "top": []}
    assert parts[-1]["meta_info"]["completion_tokens"] == 6
    assert [response.status_code for response in refused] == [400] * len(refused)


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with running() as server:
        ids = (await server.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
        text = (await server.http.post("/detokenize", json={"tokens": ids["tokens"]})).json()
        chat = (await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "q"}]})).json()
        bad = [await server.http.post("/detokenize", json={"tokens": tokens}) for tokens in ([999], [-1], "x", [])]
    assert text == {"prompt": "héllo"}
    assert ids["count"] == len("héllo".encode())
    assert bytes(chat["tokens"]).decode() == "user: q\nassistant: "
    assert [response.status_code for response in bad] == [400] * 4


async def test_control_routes_are_on_their_own_port_only() -> None:
    async with running() as server:
        for path in ("/get_server_info", "/get_model_info", "/plugins", "/health", "/version"):
            assert (await server.control.get(path)).status_code == 200
        for path in ("/get_server_info", "/abort", "/flush_cache", "/plugins"):
            assert (await server.http.get(path)).status_code == 404
        assert (await server.control.post("/flush_cache")).json()["flushed"] is True
        info = (await server.control.get("/get_server_info")).json()
    assert info["engine"]["max_model_len"] == 512
    assert info["status"] == "ready"
    assert "flush_cache" in server.engine.control


async def test_the_plan_tells_of_captured_graphs_once_the_engine_runs() -> None:
    async with running() as server:
        client = server.llm.client
        assert client.info is not None
        assert "graphs" not in (await server.control.get("/plugins")).json(), "the platform has none"
        client.info = msgspec.structs.replace(client.info, graphs="off (--enforce-eager)")
        assert (await server.control.get("/plugins")).json()["graphs"] == "off (--enforce-eager)"
        assert (await server.control.get("/get_server_info")).json()["engine"]["graphs"] == "off (--enforce-eager)"


async def test_abort_takes_the_id_that_a_client_gave() -> None:
    async with running(lambda _: ENDLESS, step_s=0.005) as server:
        tasks = []
        for name in ("mine", "mine-2"):
            server.http.headers["x-request-id"] = name
            tasks.append(asyncio.create_task(server.chat(max_tokens=400)))
            await until(lambda: len(server.engine.running) == len(tasks))
        assert (await server.control.post("/abort", json={"rid": "chatcmpl"})).json() == {"aborted": 0}
        assert (await server.control.post("/abort", json={"rid": "mine"})).json() == {"aborted": 1}
        assert (await tasks[0]).json()["choices"][0]["finish_reason"] == "abort"
        assert (await server.control.post("/abort", json={"rid": "mine-2"})).json() == {"aborted": 1}
        assert (await tasks[1]).json()["id"] == "chatcmpl-mine-2"


async def test_generate_says_that_a_request_is_one_prompt() -> None:
    async with running() as server:
        for name, value in (("text", ["a", "b"]), ("input_ids", [[1], [2]])):
            error = (await server.http.post("/generate", json={name: value})).json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(f"{name}: one prompt a request; ")


async def test_server_info_names_every_figure_and_has_them_before_the_first_request() -> None:
    async with running() as server:
        stats = (await server.control.get("/get_server_info")).json()["stats"]
        assert set(stats) == set(EngineStats.__struct_fields__)
        assert (stats["pages_free"], stats["tiers"]) == (server.engine.info.kv_pages, None)
        numbers = [index + 10 for index in range(len(TierStats.__struct_fields__))]
        tiers = msgspec.structs.replace(TierStats(*numbers), store_up=(True, False), store_seconds=1.5)
        await server.engine.send(Outputs([], msgspec.structs.replace(server.engine.stats(), tiers=tiers, steps=77)))
        await until(lambda: server.llm.client.stats.steps == 77)
        shown = (await server.control.get("/get_server_info")).json()["stats"]["tiers"]
    assert shown == {**msgspec.structs.asdict(tiers), "store_up": {"loads": True, "saves": False}}


async def test_abort_ends_requests_by_id_or_all() -> None:
    """Their clients get finish reason abort; a client may bring the id along."""
    async with running(lambda _: ENDLESS, step_s=0.005) as server:
        server.http.headers["x-request-id"] = "mine"
        tasks = [asyncio.create_task(server.chat(max_tokens=400))]
        await until(lambda: len(server.engine.running) == 1)
        del server.http.headers["x-request-id"]
        tasks.append(asyncio.create_task(server.chat(max_tokens=400)))
        await until(lambda: len(server.engine.running) == 2)
        assert (await server.control.post("/abort", json={"rid": "chatcmpl-mine"})).json() == {"aborted": 1}
        await until(lambda: server.llm.live_requests == 1)
        assert (await server.control.post("/abort", json={"rid": "nobody"})).json() == {"aborted": 0}
        assert (await server.control.post("/abort", json={"abort_all": True})).json() == {"aborted": 1}
        reasons = [(await task).json()["choices"][0]["finish_reason"] for task in tasks]
        assert (await server.control.post("/abort", json={})).status_code == 400
        metrics = await server.metrics()
    assert reasons == ["abort", "abort"]
    assert 'tokenspeed:requests_aborted_total{reason="api"} 2.0' in metrics


async def test_the_key_guards_every_route_of_both_ports() -> None:
    """Any of the keys opens, nothing else does, and health, metrics and unknown paths are no exception."""
    config = ServingConfig(port=0, api_key=("first", "second"))
    async with running(config=config) as server:
        for client, paths in (
            (server.http, ["/health", "/metrics", "/v1/models", "/openapi.json", "/version", "/nope"]),
            (server.control, ["/plugins", "/health", "/nope"]),
        ):
            for path in paths:
                for header in ("", "Bearer", "Bearer wrong", "Basic first", "first", "Bearer first second"):
                    response = await client.get(path, headers={"authorization": header})
                    assert response.status_code == 401, (path, header)
                    assert response.json()["error"]["code"] == "invalid_api_key"
                for key in ("Bearer first", "bearer second"):
                    assert (await client.get(path, headers={"authorization": key})).status_code in (200, 404)


async def test_metrics_show_what_happened() -> None:
    async with running("hello") as server:
        await server.chat()
        await server.complete("x", max_tokens=2)
        text = await server.metrics()
    for line in (
        "tokenspeed:requests_total 2.0",
        'tokenspeed:requests_finished_total{reason="stop"} 1.0',
        'tokenspeed:requests_finished_total{reason="length"} 1.0',
        "tokenspeed:generation_tokens_total 8.0",
        "tokenspeed:time_to_first_token_seconds_count 2.0",
        "tokenspeed:inter_token_latency_seconds_count 6.0",
        "tokenspeed:e2e_request_latency_seconds_count 2.0",
        "tokenspeed:request_queue_time_seconds_count 2.0",
        'tokenspeed:kv_pages{state="free"} 256.0',
        'tokenspeed:kv_pages{state="active"} 0.0',
        "tokenspeed:prefix_cache_hit_rate 0.0",
        "tokenspeed:retractions_total 0.0",
        "tokenspeed:engine_up 1.0",
        'tokenspeed:http_responses_total{path="/v1/completions",status="200"} 1.0',
    ):
        assert line in text, line


async def test_probes_count_apart_so_that_a_start_and_a_drain_are_no_failed_requests() -> None:
    """``/health`` says 503 as long as either takes; what was asked for meanwhile and refused is a failed request."""
    async with running(ready=False) as server:
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.head("/health")).status_code == 503
        assert (await server.control.get("/health/")).status_code == 503
        assert (await server.chat()).status_code == 503
        await server.metrics()
        lines = (await server.metrics()).splitlines()
    counts = [
        line for line in lines if line.startswith(("tokenspeed:http_responses_total", "tokenspeed:http_probes_total"))
    ]
    assert counts == [
        'tokenspeed:http_responses_total{path="/v1/chat/completions",status="503"} 1.0',
        'tokenspeed:http_probes_total{path="/health",status="503"} 3.0',
        'tokenspeed:http_probes_total{path="/metrics",status="200"} 1.0',
    ]


async def test_a_limit_on_pending_requests_answers_503() -> None:
    async with running(lambda _: ENDLESS, step_s=0.005, config=ServingConfig(port=0, max_pending_requests=1)) as server:
        first = asyncio.create_task(server.chat(max_tokens=400))
        await until(lambda: server.engine.running)
        response = await server.chat()
        await server.control.post("/abort", json={"abort_all": True})
        await first
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"


async def test_the_limit_on_pending_requests_counts_choices() -> None:
    """A request's own prompts times n; more than the limit lets in at all is the request's fault."""
    async with running(config=ServingConfig(port=0, max_pending_requests=4)) as server:
        assert (await server.complete(["a", "b"], n=2, max_tokens=1)).status_code == 200
        response = await server.complete(["a", "b", "c"], n=2)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        assert len(server.engine.requests) == 4
    async with running(lambda _: ENDLESS, config=ServingConfig(port=0, max_pending_requests=4)) as server:
        first = asyncio.create_task(server.chat(n=3, max_tokens=400))
        await until(lambda: len(server.engine.running) == 3)
        response = await server.chat(n=2)
        await server.control.post("/abort", json={"abort_all": True})
        await first
    assert response.json()["error"]["code"] == "overloaded"


def test_pending_requests_are_bounded_by_default() -> None:
    assert 0 < ServingConfig().max_pending_requests < 2**20


async def test_there_is_one_version() -> None:
    """The package's own, which the distribution's repeats."""
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == tokenspeed.__version__
    async with running() as server:
        assert (await server.http.get("/version")).json() == {"version": tokenspeed.__version__}


async def test_tokenize_takes_template_arguments_as_the_chat_route_does() -> None:
    """Names that belong to fields of their own are refused, not overridden."""
    messages = [{"role": "user", "content": "x"}]
    async with running() as server:
        for path in ("/tokenize", "/v1/chat/completions"):
            for name in ("messages", "tools", "documents", "add_generation_prompt", "chat_template"):
                body = {"messages": messages, "chat_template_kwargs": {name: False}}
                response = await server.http.post(path, json=body)
                assert response.status_code == 400
                assert name in response.json()["error"]["message"]


async def test_wrong_paths_and_methods_have_the_error_body() -> None:
    async with running() as server:
        for response, status in (
            (await server.http.get("/nope"), 404),
            (await server.http.get("/v1/completions"), 405),
            (await server.http.delete("/health"), 405),
        ):
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_serving_never_imports_torch_or_the_engine() -> None:
    """After a request through a whole server neither torch nor transformers nor the engine is loaded."""
    code = (
        "import asyncio, sys\n"
        "from tokenspeed.testing.server import running\n"
        "async def main():\n"
        "    async with running() as server:\n"
        "        assert (await server.chat(stream=True)).status_code == 200\n"
        "asyncio.run(main())\n"
        "heavy = ('torch', 'transformers', 'tokenspeed.engine', 'tokenspeed.runtime', 'tokenspeed.weights')\n"
        "bad = [name for name in sys.modules if name in heavy or name.startswith(tuple(part + '.' for part in heavy))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_health_answers_head_as_it_answers_get() -> None:
    async with running(ready=False) as server:
        assert (await server.http.head("/health")).status_code == 503
    async with running() as server:
        for client in (server.http, server.control):
            response = await client.head("/health")
            assert (response.status_code, response.content) == (200, b"")
