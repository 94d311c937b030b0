"""Frames as objects of a Mooncake cluster, under ``NAMESPACE/HASH``, moved from and to registered memory by a process of the store's own."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext
from tokenspeed_plugin_kvstore_mooncake.worker import receive, send

__all__ = ["MooncakeStore"]

#: How long the library may take to be imported and to find its cluster; core does not wait so long.
_SETUP_S = 12.0
_OPTIONS: dict[str, Any] = {
    "master": "127.0.0.1:50051",
    "metadata": "P2PHANDSHAKE",
    "hostname": "127.0.0.1",
    "protocol": "tcp",
    "devices": "",
    "segment_mb": 0,
}


class MooncakeStore(KVStore):
    """One process with one client an object. What it puts lives in the segments of the cluster's nodes; with ``segment_mb`` the process is one of them, and
    what lies there ends with it. A call that passes its deadline ends the process, for it cannot be called off otherwise.
    """

    def __init__(self, ctx: KVStoreContext) -> None:
        super().__init__(ctx)
        size = len(ctx.staging)
        descriptor = os.memfd_create("tokenspeed-mooncake")
        try:
            os.ftruncate(descriptor, size)
            self._memory = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tokenspeed_plugin_kvstore_mooncake.worker", str(descriptor), str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
            )
        finally:
            os.close(descriptor)
        try:
            answer = self._ask({name: ctx.options.get(name, value) for name, value in _OPTIONS.items()}, _SETUP_S)
        except BaseException:
            self.close()
            raise
        if "missing" in answer:
            self.close()
            raise ConfigError(
                f"KV store mooncake: {answer['missing']}. Install mooncake-transfer-engine (hosts with CUDA) or "
                "mooncake-transfer-engine-non-cuda, and the system's libibverbs, librdmacm, libnuma, liburing, libjsoncpp, libglog and libcurl"
            )
        if "error" in answer:
            self.close()
            raise ConnectionError(f"Mooncake: {answer['error']}")

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        if not keys:
            return []
        answer = self._call("exists", _names(namespace, keys), [], timeout_s)
        if any(status < 0 for status in answer):
            raise ConnectionError(f"Mooncake: status {min(answer)} for whether pages exist")
        return [status == 1 for status in answer]

    def get_into(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        if not keys:
            return []
        answer = self._call("get", _names(namespace, keys), frames, timeout_s)
        for frame, part in zip(frames, self._parts(frames), strict=True):
            frame[:] = part
        return [count == len(frame) for count, frame in zip(answer, frames, strict=True)]

    def put(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        if not keys:
            return []
        for frame, part in zip(frames, self._parts(frames), strict=True):
            part[:] = frame
        return [status == 0 for status in self._call("put", _names(namespace, keys), frames, timeout_s)]

    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        removed = int(self._call("delete", [f"^{namespace.id}/.*"], [], timeout_s))
        # The library answers 0 where no master answers, too.
        self.exists(namespace, [bytes(16)], end - time.monotonic())
        if removed < 0:
            raise ConnectionError(f"Mooncake: status {removed} for a removal")
        return removed

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _call(self, call: str, names: list[str], frames: Sequence[Frame], timeout_s: float) -> Any:
        sizes = [len(frame) for frame in frames]
        offsets = [end - size for end, size in zip(np.cumsum(sizes, dtype=int).tolist(), sizes, strict=True)]
        request = {"call": call, "names": names, "offsets": offsets, "sizes": sizes}
        return self._ask(request, timeout_s)["result"]

    def _ask(self, request: dict[str, Any], timeout_s: float) -> Any:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        send(_binary(to), request)
        if not select.select([back], [], [], max(timeout_s, 0))[0]:
            self._process.kill()
            raise TimeoutError(f"Mooncake: no answer in {timeout_s:.1f} s")
        return receive(_binary(back))

    def _parts(self, frames: Sequence[Frame]) -> list[Frame]:
        """The shared memory of frames that stand one after another."""
        ends = np.cumsum([len(frame) for frame in frames]).tolist()
        return [self._memory[end - len(frame) : end] for frame, end in zip(frames, ends, strict=True)]


def _binary(stream: Any) -> BinaryIO:
    binary: BinaryIO = stream
    return binary


def _names(namespace: KVNamespace, keys: Sequence[bytes]) -> list[str]:
    return [f"{namespace.id}/{key.hex()}" for key in keys]
