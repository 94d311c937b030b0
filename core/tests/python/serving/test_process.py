"""The life of the server process: ports, readiness, signals, and the end of the engine's process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tokenspeed.testing.ports import ReservedPorts

COMMAND = [sys.executable, "-m", "tokenspeed.testing.serve_fake"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses pidfd and SIGSTOP")

#: How long anything may take on a machine that is busy with other things. What the server promises in seconds is held to by the acceptance tests.
PATIENCE_S = 60.0


class Server:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        hello = json.loads(line)
        self.engine: int = hello["engine"]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{hello['port']}", timeout=PATIENCE_S)

    def stream(self, *, began: bool = True, **fields: object) -> Stream:
        """A stream whose first token is there; with ``began=False`` one that may not have got to the engine."""
        stream = Stream(self.http.base_url, {"prompt": "x", "max_tokens": 50_000, "stream": True, **fields})
        assert not began or stream.began.wait(PATIENCE_S)
        return stream

    def metrics(self) -> str:
        return self.http.get("/metrics").text

    def health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return 0

    def code(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)


class Stream:
    """A stream that is read in a thread of its own."""

    def __init__(self, base: httpx.URL, body: dict[str, object]) -> None:
        self.text = ""
        self.began = threading.Event()
        self._args = (str(base).rstrip("/"), body)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        base, body = self._args
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=PATIENCE_S) as response,
        ):
            for piece in response.iter_text():
                self.text += piece
                self.began.set()

    def end(self) -> str:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.text


@contextlib.contextmanager
def serve(*flags: str) -> Iterator[Server]:
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    server = Server(process)
    try:
        yield server
    finally:
        server.http.close()
        if process.poll() is None:
            process.kill()
        process.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.engine, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaps stays a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ops_01_sigterm_lets_running_requests_finish() -> None:
    """ops-01: health turns red, new requests get 503 with Retry-After, the running one ends in full, exit code 0, the engine goes too."""
    with serve("--hung-after-s", "600") as server:
        os.kill(server.engine, signal.SIGSTOP)  # so that the request runs as long as this test needs it to
        stream = server.stream(began=False, max_tokens=50)
        until(lambda: "tokenspeed:requests_total 1.0" in server.metrics())
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.health() == 503)
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "shutting down" in refused.json()["error"]["message"]
        os.kill(server.engine, signal.SIGCONT)
        text = stream.end()
        assert server.code() == 0
        until(lambda: gone(server.engine))
    assert text.count('"text":"a"') + text.count('"text":"aa') >= 1
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_ops_01_after_the_drain_timeout_the_rest_ends_with_an_error() -> None:
    """ops-01: with a timeout of a moment the stream ends with an error event, still with exit code 0."""
    with serve("--drain-timeout-s", "0.3") as server:
        stream = server.stream()
        server.process.send_signal(signal.SIGTERM)
        text = stream.end()
        assert server.code() == 0
    assert '"error":{"message":"the server is shutting down"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_ops_03_further_signals_change_nothing() -> None:
    """ops-03: SIGTERM three times while a stream runs; it still finishes, exit code 0, nothing is left behind."""
    with serve() as server:
        stream = server.stream(max_tokens=150)
        for pause in (0.0, 0.05, 0.05):
            time.sleep(pause)
            server.process.send_signal(signal.SIGTERM)
        assert '"finish_reason":"length"' in stream.end()
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(signal.SIGTERM)
        assert server.code() == 0
        until(lambda: gone(server.engine))


def test_a_second_interrupt_ends_at_once() -> None:
    """SIGINT drains like SIGTERM; the second one forces the end."""
    with serve() as server:
        server.stream()
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.health() == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.code() == 130
        until(lambda: gone(server.engine))


def test_ops_04_a_killed_engine_ends_streams_and_the_server() -> None:
    """ops-04: SIGKILL of the engine: the stream ends with an error, health is 503, and the process exits non-zero."""
    with serve() as server:
        stream = server.stream()
        os.kill(server.engine, signal.SIGKILL)
        until(lambda: server.health() == 503)
        text = stream.end()
        assert server.code() == 1
    assert '"error":{"message":"an engine process ended unexpectedly"' in text


def test_ops_04_a_stopped_engine_turns_health_red() -> None:
    """ops-04: SIGSTOP imitates a hang: health is red within the limit, and green again after SIGCONT."""
    with serve("--hung-after-s", "1") as server:
        os.kill(server.engine, signal.SIGSTOP)
        until(lambda: server.health() == 503)
        os.kill(server.engine, signal.SIGCONT)
        until(lambda: server.health() == 200)


def test_ops_04_streams_of_a_stopped_engine_end_after_the_limit() -> None:
    """ops-04: an engine that stays stopped is given up: streams end with an error, the server with code 1; before the limit they wait."""
    with serve("--hung-after-s", "0.5", "--give-up-after-s", "4") as server:
        stream = server.stream()
        os.kill(server.engine, signal.SIGSTOP)
        until(lambda: server.health() == 503)
        assert server.process.poll() is None
        text = stream.end()
        assert server.code() == 1
    assert '"error":{"message":"the engine hangs: no answer and no CPU time used for 4 s"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_ops_15_a_port_in_use_fails_fast_and_names_the_port() -> None:
    """ops-15: before anything is loaded, with a clear line and an exit code that is not zero; also where only the control port is taken."""
    with contextlib.closing(ReservedPorts(2)) as reserved, socket.socket() as taken:
        port = reserved.ports[1]
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        for wanted in (port, port - 1):
            done = subprocess.run([*COMMAND, "--port", str(wanted)], capture_output=True, text=True, timeout=PATIENCE_S)
            assert done.returncode == 2
            assert f"127.0.0.1:{port}" in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
            assert done.stdout == ""  # no engine was started


def test_ops_15_an_engine_that_cannot_start_ends_the_server() -> None:
    """ops-15: exit code 1 and the engine's reason in the log."""
    done = subprocess.run(
        [*COMMAND, "--fail", "weights are missing"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "weights are missing" in done.stderr
    assert done.stdout == ""


def test_ops_10_only_the_http_ports_listen_and_only_on_loopback() -> None:
    """ops-10: the process tree listens on its two HTTP ports alone; the engine's sockets are files in a private folder."""
    with serve() as server:
        listening = []
        for pid in (server.process.pid, server.engine):
            inodes = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            tables = [Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
            for fields in (line.split() for table in tables for line in table):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    listening.append(fields[1])
    assert len(listening) == 2
    assert all(address.startswith("0100007F:") for address in listening)
