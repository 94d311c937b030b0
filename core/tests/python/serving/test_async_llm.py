"""The server's books: threads, accounting, log lines, and what stands on the message path."""

from __future__ import annotations

import ast
import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

import tokenspeed
from tokenspeed.messages import Outputs, RequestStats, SamplingParams, TokenOutput
from tokenspeed.serving.generation import GenerationRequest
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import running, until

pytestmark = pytest.mark.anyio

NEVER = Reply(tokens=(), finish=None)


class Recording(ByteTokenizer):
    """Notes the thread of each call, and stands at long texts until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[bool] = []
        self.go = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        if len(text) > 10_000:
            assert self.go.wait(60)
        return super().encode(text)


async def test_ops_13_long_texts_are_tokenised_beside_the_loop() -> None:
    """ops-13: a long text goes to a thread, so that /health answers meanwhile; a short one does not pay for that."""
    tokenizer = Recording()
    async with running(tokenizer=tokenizer, max_model_len=100_000) as server:
        long = asyncio.create_task(server.complete("x" * 20_000))
        await until(lambda: tokenizer.threads)
        assert (await server.http.get("/health")).status_code == 200
        assert not long.done()
        tokenizer.go.set()
        assert (await long).status_code == 200
        await server.complete("short")
    assert tokenizer.threads == [False, True]


async def test_many_short_texts_are_tokenised_beside_the_loop() -> None:
    """What counts is the sum over the prompts."""
    tokenizer = Recording()
    async with running(tokenizer=tokenizer) as server:
        assert (await server.complete(["x" * 100] * 30, max_tokens=1)).status_code == 200
    assert tokenizer.threads == [False] * 30


async def test_texts_keep_their_order_over_batches() -> None:
    async with running(max_model_len=100_000) as server:
        texts = [letter * 40_000 for letter in "abcde"]
        rows = await server.llm.encode_all(texts, add_special_tokens=False, param="prompt")
    assert [(set(row), len(row)) for row in rows] == [({ord(letter)}, 40_000) for letter in "abcde"]


async def test_a_request_carries_the_time_of_its_arrival() -> None:
    """On the clock that the engine reads, too."""
    async with running() as server:
        before = time.monotonic()
        await server.complete()
        assert before <= server.engine.requests[0].arrival_s <= time.monotonic()


async def test_an_abort_that_is_asked_for_again_counts_once() -> None:
    async with running(lambda _: NEVER) as server:
        server.engine.answering = False  # it gets to nothing meanwhile
        generation = server.llm.submit(request_of(1))
        assert [server.llm.abort_requests(None, "api") for _ in range(3)] == [1, 0, 0]
        generation.abort("disconnect")
        server.engine.answering = True
        await until(lambda: not server.llm._closing)
        assert server.llm.metrics.aborted == {"api": 1}
        assert server.engine.aborts == [generation.choices[0].rid]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_that_end_with_a_failed_one_are_no_disconnects(stream: bool) -> None:
    replies = iter([Reply(tokens=[97], error="broken"), Reply(tokens=[97] * 1000, finish=None)])
    async with running(lambda _: next(replies), step_s=0.005) as server:
        await server.complete(n=2, stream=stream, max_tokens=400)
        await until(lambda: not server.engine.running)
        assert server.llm.metrics.aborted == {"error": 1}


def request_of(*prompt: int) -> GenerationRequest:
    return GenerationRequest(prompts=[list(prompt)], params=SamplingParams(8), request_id="r", streaming=True)


async def test_a_last_output_that_nobody_takes_is_still_accounted_for() -> None:
    """The client leaves between the engine's last word and its being read: counted once, as aborted, and nothing is sent to the engine."""
    async with running(lambda _: NEVER) as server:
        generation = server.llm.submit(request_of(1, 2))
        rid = generation.choices[0].rid
        await server.engine.send(Outputs([TokenOutput(rid, [97], "stop", stats=RequestStats(2, 0, 1))]))
        await until(lambda: server.llm.live_requests == 0)
        generation.abort("disconnect")
        generation.abort("disconnect")
        assert await generation.next() is None
        assert server.llm.metrics.finished == {"abort": 1}
        assert server.engine.aborts == []


async def test_an_abort_and_the_last_output_may_cross() -> None:
    """The engine's last word for an aborted request is expected: no orphan."""
    async with running(lambda _: NEVER) as server:
        generation = server.llm.submit(request_of(1))
        rid = generation.choices[0].rid
        generation.abort("disconnect")
        await server.engine.send(Outputs([TokenOutput(rid, [97]), TokenOutput(rid, [97], "stop")]))
        await until(lambda: not server.llm._closing)
        assert server.llm.metrics.orphans == 0


async def test_each_request_s_cost_is_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """--enable-log-request-stats: one line when it ends, with everything that request_stats of the answer has, by the same names."""
    caplog.set_level(logging.INFO, "tokenspeed.serving")
    async with running("hello") as server:
        server.llm._log_stats = server.llm._log_requests = True
        answer = (await server.complete("abcd", max_tokens=3)).json()
    lines = [record.message for record in caplog.records if record.name.endswith("async_llm")]
    assert len(lines) == 2
    assert "prompt tokens 4" in lines[0]
    (stats,) = answer["usage"]["request_stats"]
    assert {"grammar_ms", "host_tokens", "storage_tokens", "hit_cut", "hit_rate", "queue_ms"} < set(stats)
    text = ", ".join(f"{name} {value}" for name, value in stats.items() if name != "index")
    assert lines[1].endswith(f"[0]: length; {text}")
    assert "abcd" not in "".join(lines)


def test_ops_10_nothing_on_the_message_path_imports_pickle() -> None:
    """ops-10: neither the server, the messages nor the engine can unpickle what arrives."""
    root = Path(tokenspeed.__file__).parent
    files = [file for folder in ("serving", "messages", "engine") for file in (root / folder).rglob("*.py")]
    assert len(files) > 30
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not {name.split(".")[0] for name in names if name} & {
                "pickle",
                "cloudpickle",
                "dill",
                "marshal",
                "shelve",
            }, file
            assert not (isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj")), file
