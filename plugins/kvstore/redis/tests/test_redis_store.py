"""The Redis store passes core's suites against a real ``redis-server``, which the tests start on a free port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from tokenspeed_plugin_kvstore_redis.plugin import tokenspeed_kv_stores
from tokenspeed_plugin_kvstore_redis.store import RedisStore

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.engine.report import explain_text, to_json
from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import KVNamespace, KVStoreContext
from tokenspeed.testing.kv_store import ServedStoreSuite
from tokenspeed.testing.kv_store_bench import StoreServer
from tokenspeed.testing.ports import ReservedPorts
from tokenspeed.weights.describe import describe_model

PROGRAM = shutil.which("redis-server")
SPEC = tokenspeed_kv_stores()[0]

needs_server = pytest.mark.skipif(PROGRAM is None, reason="needs redis-server: apt-get install redis-server")


class Server(StoreServer):
    def __init__(self, folder: Path) -> None:
        self.reserved = ReservedPorts()
        (self.port,) = self.reserved.ports
        self.options = {"url": f"redis://127.0.0.1:{self.port}/0", "prefix": "test"}
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        assert PROGRAM is not None
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([PROGRAM, *arguments], stdout=subprocess.DEVNULL)
        with self.client() as client:
            end = time.monotonic() + 60
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < end
                    time.sleep(0.05)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(20)

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def client(self) -> Any:
        return redis.Redis(port=self.port)

    def read(self, namespace: KVNamespace, key: bytes) -> bytes:
        with self.client() as client:
            return bytes(client.get(f"test:{namespace.id}:{key.hex()}"))

    def write(self, namespace: KVNamespace, key: bytes, data: bytes) -> None:
        with self.client() as client:
            client.set(f"test:{namespace.id}:{key.hex()}", data)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()
    server.reserved.close()


@needs_server
class TestRedis(ServedStoreSuite):
    spec = SPEC


def context(**options: Any) -> KVStoreContext:
    return KVStoreContext(staging=np.zeros(4096, dtype=np.uint8), timeout_s=1.0, options=options)


SPACE = KVNamespace(model="m", dtype="float32", layout="NHD", page_size=4, page_bytes=100)


@needs_server
def test_pages_end_with_their_time_to_live(host: Server) -> None:
    store = RedisStore(context(**host.options, ttl_s=100))
    frame = store.ctx.staging[:100]
    store.put(SPACE, [bytes(16)], [frame], 5.0)
    with host.client() as client:
        assert 0 < client.ttl(f"test:{SPACE.id}:{bytes(16).hex()}") <= 100
    store.close()


@needs_server
def test_a_server_that_is_full_refuses_and_says_so(host: Server) -> None:
    """Without an eviction policy Redis answers writes with an error: the guard counts it and goes on reading."""
    store = RedisStore(context(**host.options))
    frame = store.ctx.staging[:1000]
    frame[:] = np.frombuffer(os.urandom(1000), dtype=np.uint8)
    with host.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            store.put(SPACE, [bytes(16)], [frame], 5.0)
        client.config_set("maxmemory", 0)
    assert store.put(SPACE, [bytes(16)], [frame], 5.0) == [True]
    store.close()


@pytest.mark.parametrize("options", [{"url": "http://127.0.0.1"}, {"prefix": "a b*"}])
def test_wrong_options_are_said_at_start(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"KV store redis"):
        RedisStore(context(**options))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret@host",
        "redis://:s3cret@host:port/0",
        "redis://:s3cret",
        "redis://host/0?socket_timeout=s3cret",
        "s3cret",
    ],
)
def test_a_wrong_address_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--set kvstore-redis\.url: the .*write redis://HOST") as caught:
        RedisStore(context(url=url))
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port where nobody listens."""
    with contextlib.closing(ReservedPorts()) as reserved:
        yield reserved.ports[0]


def test_the_address_is_shown_to_nobody(caplog: pytest.LogCaptureFixture, unused_port: int) -> None:
    """Not in what an engine says of itself, in ``/plugins``, or in the report of its start."""
    url = f"redis://:s3cret@127.0.0.1:{unused_port}/0"
    config = EngineConfig(
        model="toy",
        kvstore="redis",
        max_total_tokens=512,
        max_model_len=96,
        kvstore_timeout_ms=100.0,
        plugin_options={"kvstore-redis.url": url},
    )
    assembly = assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None)
    engine = LocalEngine(assembly)
    shown = [engine.info, to_json(assembly), explain_text(assembly, verbose=True), assembly.plan, caplog.text]
    engine.close()
    assert "s3cret" not in repr(shown)
    assert "***" in repr(engine.info.plan)
    assert assembly.options_of("kv_store")["url"] == url


def test_a_server_that_is_not_there_is_no_error_of_the_constructor(unused_port: int) -> None:
    store = RedisStore(context(url=f"redis://127.0.0.1:{unused_port}/0"))
    with pytest.raises(redis.ConnectionError):
        store.exists(SPACE, [bytes(16)], 1.0)
