"""Real KV stores for the acceptance tests: a directory, a Redis server, a Mooncake cluster, each of them broken on demand."""

from __future__ import annotations

import ctypes.util
import importlib.util
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

from tokenspeed.testing.ports import ReservedPorts

__all__ = ["FileStore", "MooncakeStore", "RedisStore", "Store", "unavailable"]


def unavailable(name: str) -> str:
    """Why a store cannot be run here, or an empty string."""
    if name == "redis" and shutil.which("redis-server") is None:
        return "needs redis-server: apt-get install redis-server"
    if name == "mooncake":
        absent = [
            lib
            for lib in ("ibverbs", "rdmacm", "numa", "uring", "jsoncpp", "glog")
            if not ctypes.util.find_library(lib)
        ]
        if absent:
            return f"needs the system's lib{', lib'.join(absent)}: see plugins/kvstore/mooncake/README.md"
        if importlib.util.find_spec("mooncake") is None:
            return "needs mooncake-transfer-engine-non-cuda"
    return ""


def wait_for_port(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end, f"nothing listens on port {port}"
            time.sleep(0.05)


class Store:
    """A store's processes, and the flags by which a server finds it."""

    flags: tuple[str, ...]

    def __init__(self, folder: Path, ports: int = 1) -> None:
        self.folder = folder
        self._reserved = ReservedPorts(ports) if ports else None
        self.ports = self._reserved.ports if self._reserved is not None else []
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str | Path) -> None:
        """Start a process of the store."""
        with (self.folder / "store.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder))

    def send(self, number: signal.Signals) -> None:
        """Send every process a signal."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def stop(self) -> None:
        """End everything."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait(20)
        if self._reserved is not None:
            self._reserved.close()

    def damage(self) -> bool:
        """Change a byte of every page; False where a store offers no way."""
        return False


class FileStore(Store):
    """A directory. What corresponds to a server that hangs or is gone does not exist."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ports=0)
        self.pages = folder / "pages"
        self.flags = ("--kvstore", "file", "--set", f"kvstore-file.directory={self.pages}")

    def damage(self) -> bool:
        for path in self.pages.glob("*/??/*"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return True


class RedisStore(Store):
    """A server without persistence."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (self.port,) = self.ports
        self.flags = ("--kvstore", "redis", "--set", f"kvstore-redis.url=redis://127.0.0.1:{self.port}/0")
        self.run("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "")
        wait_for_port(self.port)

    def damage(self) -> bool:
        import redis

        with redis.Redis(port=self.port) as client:
            for key in list(client.scan_iter("tokenspeed:*")):
                data = bytearray(client.get(key))  # type: ignore[arg-type]
                data[-1] ^= 1
                client.set(key, bytes(data))
        return True


class MooncakeStore(Store):
    """A master, and a client that holds the memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ports=3)
        rpc, metrics, port = self.ports
        scripts = Path(sysconfig.get_path("scripts"))
        self.flags = ("--kvstore", "mooncake", "--set", f"kvstore-mooncake.master=127.0.0.1:{rpc}")
        self.run(
            scripts / "mooncake_master",
            f"-rpc_port={rpc}",
            f"-metrics_port={metrics}",
            "-rpc_address=127.0.0.1",
            "-metrics_host=127.0.0.1",
        )
        wait_for_port(rpc)
        self.run(
            scripts / "mooncake_client",
            f"-master_server_address=127.0.0.1:{rpc}",
            "-metadata_server=P2PHANDSHAKE",
            "-host=127.0.0.1",
            f"-port={port}",
            "-global_segment_size=256 MB",
        )
        wait_for_port(port)
