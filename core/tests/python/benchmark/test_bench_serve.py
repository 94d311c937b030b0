"""``bench serve`` end to end against a scripted server on loopback."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator

import pytest

from tokenspeed.cli import bench
from tokenspeed.errors import ConfigError


class ScriptedServer:
    """Answers every completion with two text chunks and a usage chunk; notes bodies and how many requests were in flight at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.in_flight = self.most_in_flight = self.port = 0
        self.refuse = False
        self.together = 0  # how many answers behind the first one wait for each other
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(),))

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _main(self) -> None:
        self._end = asyncio.Event()
        self._met = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            answer = json.dumps({"data": [{"id": "scripted"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
        elif self.refuse:
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")
        else:
            await self._stream(json.loads(body), writer)
        await writer.drain()
        writer.close()

    async def _stream(self, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.most_in_flight == self.together:
            self._met.set()
        if self.together and len(self.bodies) > 1:
            await asyncio.wait_for(self._met.wait(), 60)
        chat = "messages" in body
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat else []
        events += [{"choices": [{"delta": {"content": t}} if chat else {"text": t}]} for t in ("one", " two")]
        events.append({"choices": [{"finish_reason": "length"}]})
        events.append(
            {
                "choices": [],
                "usage": {"prompt_tokens": 8, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
            }
        )
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in events:
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.001)
        writer.write(b"data: [DONE]\n\n")
        self.in_flight -= 1


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def invoke(port: int, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["serve", "--base-url", f"http://127.0.0.1:{port}/v1", "--no-progress", *flags]))


def test_every_request_is_sent_and_measured(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, usage and concurrency of a closed loop; the model's name is asked for; warm-up is not counted."""
    server.together = 3
    assert invoke(server.port, "--num-prompts", "9", "--max-concurrency", "3", "--warmup", "1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["failed"], result["output_tokens"], result["cached_tokens"]) == (9, 0, 27, 18)
    assert result["config"]["model"] == "scripted"
    assert len(server.bodies) == 10
    assert server.most_in_flight == 3
    assert all(
        body["ignore_eos"] is True and body["stream"] is True and body["max_tokens"] == 128 for body in server.bodies
    )


def test_agent_turns_carry_the_whole_history(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        invoke(
            server.port, "--workload", "agent", "--sessions", "2", "--turns", "3", "--warmup", "0", "--prefix-len", "5"
        )
        == 0
    )
    conversations = [body["messages"] for body in server.bodies]
    longest = max(conversations, key=len)
    assert [message["role"] for message in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "one two"
    assert longest[:4] in conversations
    assert "hit rate" in capsys.readouterr().out


def test_lines_for_a_pipe_are_not_broken(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(server.port, "--num-prompts", "2", "--warmup", "0", "--request-rate", "123456") == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert len(head) > 80
    assert head.endswith("sessions/s")


def test_a_refusing_server_is_an_error(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse = True
    assert invoke(server.port, "--num-prompts", "2", "--warmup", "0", "--model", "m", "--json") == 1
    assert json.loads(capsys.readouterr().out)["errors"] == ["HTTP 503: busy"] * 2
    with pytest.raises(ConfigError, match="warm-up request failed: HTTP 503"):
        invoke(server.port, "--num-prompts", "2")


def test_no_server_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1"):
        invoke(1, "--num-prompts", "2")


@pytest.mark.parametrize(
    "flags", [["--num-prompts", "0"], ["--request-rate", "-1"], ["--extra-body", "[1]"], ["--extra-body", "{"]]
)
def test_impossible_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        invoke(1, *flags)
