"""The Mooncake store passes core's suites against a real master and a real client that holds the memory, over TCP on free ports."""

from __future__ import annotations

import ctypes.util
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenspeed_plugin_kvstore_mooncake.plugin import tokenspeed_kv_stores
from tokenspeed_plugin_kvstore_mooncake.store import MooncakeStore

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import KVNamespace, KVStoreContext
from tokenspeed.testing.kv_store import ServedStoreSuite
from tokenspeed.testing.kv_store_bench import StoreServer
from tokenspeed.testing.ports import ReservedPorts

SPEC = tokenspeed_kv_stores()[0]


def missing() -> str:
    """Why no cluster can be run here, or an empty string."""
    libraries = ["ibverbs", "rdmacm", "numa", "uring", "jsoncpp", "glog", "curl"]
    absent = [name for name in libraries if ctypes.util.find_library(name) is None]
    if absent:
        return f"needs the system's lib{', lib'.join(absent)} (see the README)"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"needs mooncake-transfer-engine-non-cuda: {error}"
    return ""


class Cluster(StoreServer):
    """A master, and a client process with 64 MB: killing either one loses what was kept."""

    def __init__(self, folder: Path) -> None:
        self.reserved = ReservedPorts(3)
        self.rpc, self.metrics, self.client_port = self.reserved.ports
        self.options = {"master": f"127.0.0.1:{self.rpc}"}
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._raw: Any = None
        self.start()

    def start(self) -> None:
        if self._processes and all(process.poll() is None for process in self._processes):
            return
        self.kill()
        self._processes = [
            self._run(
                "mooncake_master",
                f"-rpc_port={self.rpc}",
                f"-metrics_port={self.metrics}",
                "-rpc_address=127.0.0.1",
                "-metrics_host=127.0.0.1",
                "-default_kv_lease_ttl=1000",
            )
        ]
        wait_for_port(self.rpc)
        self._processes.append(
            self._run(
                "mooncake_client",
                f"-master_server_address=127.0.0.1:{self.rpc}",
                "-metadata_server=P2PHANDSHAKE",
                "-host=127.0.0.1",
                f"-port={self.client_port}",
                "-global_segment_size=64 MB",
            )
        )
        end = time.monotonic() + 60
        while not self._takes_pages():
            assert time.monotonic() < end, "the cluster takes no pages"
            time.sleep(0.1)

    def kill(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait(20)

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def read(self, namespace: KVNamespace, key: bytes) -> bytes:
        return bytes(self.raw.get(f"{namespace.id}/{key.hex()}"))

    def write(self, namespace: KVNamespace, key: bytes, data: bytes) -> None:
        name = f"{namespace.id}/{key.hex()}"
        self.raw.remove(name, True)
        if data:  # an object of no bytes cannot be: nothing under the key is the nearest to it
            assert self.raw.put(name, data) == 0

    @property
    def raw(self) -> Any:
        if self._raw is None:
            from mooncake.store import MooncakeDistributedStore

            self._raw = MooncakeDistributedStore()
            assert self._raw.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{self.rpc}") == 0
        return self._raw

    def _takes_pages(self) -> bool:
        return bool(self.raw.put("probe", b"x" * 100) == 0)

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        path = Path(sysconfig.get_path("scripts")) / program
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen([path, *arguments], stdout=log, stderr=log, cwd=self._folder)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def wait_for_port(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("mooncake"))
    yield cluster
    cluster.kill()
    cluster.reserved.close()


@pytest.mark.skipif(bool(missing()), reason=missing())
class TestMooncake(ServedStoreSuite):
    spec = SPEC


def context(**options: Any) -> KVStoreContext:
    return KVStoreContext(staging=np.zeros(4096, dtype=np.uint8), timeout_s=1.0, options=options)


def test_a_library_that_is_missing_is_said_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('no libibverbs.so.1')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no libibverbs\.so\.1.*mooncake-transfer-engine-non-cuda"):
        MooncakeStore(context())


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_process_that_dies_is_a_call_that_fails(host: Cluster) -> None:
    """The library may crash: the engine goes on, and makes a new object when it tries again."""
    store = MooncakeStore(context(**host.options))
    space = KVNamespace(model="m", dtype="float32", layout="NHD", page_size=4, page_bytes=100)
    assert store.exists(space, [bytes(16)], 5.0) == [False]
    store._process.kill()
    store._process.wait()
    with pytest.raises((EOFError, BrokenPipeError)):
        store.exists(space, [bytes(16)], 5.0)
    store.close()
