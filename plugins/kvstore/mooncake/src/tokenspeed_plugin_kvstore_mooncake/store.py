"""Frames as objects of a Mooncake cluster, under ``NAMESPACE/HASH``, moved straight from and to the registered staging memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext

__all__ = ["MooncakeStore"]

#: Memory of the client for what does not come from registered memory: nothing of ours.
_LOCAL_BUFFER = 1 << 20


class MooncakeStore(KVStore):
    """One client an object. What it puts lives in the segments of the cluster's nodes; with ``segment_mb`` this process is one of them, and what lies there
    ends with it.
    """

    def __init__(self, ctx: KVStoreContext) -> None:
        super().__init__(ctx)
        self._client = _client_class()()
        self._closed = False
        options = ctx.options
        status = self._client.setup(
            str(options.get("hostname", "127.0.0.1")),
            str(options.get("metadata", "P2PHANDSHAKE")),
            int(options.get("segment_mb", 0)) << 20,
            _LOCAL_BUFFER,
            str(options.get("protocol", "tcp")),
            str(options.get("devices", "")),
            str(options.get("master", "127.0.0.1:50051")),
        )
        if status:
            raise ConnectionError(f"Mooncake: setup with master {options.get('master')} failed with status {status}")
        status = self._client.register_buffer(ctx.staging.ctypes.data, ctx.staging.nbytes)
        if status:
            raise OSError(f"Mooncake: {ctx.staging.nbytes} bytes of memory could not be registered: status {status}")

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:  # noqa: ARG002
        if not keys:
            return []
        answer = self._client.batch_is_exist(_names(namespace, keys))
        if any(status < 0 for status in answer):
            raise ConnectionError(f"Mooncake: status {min(answer)} for whether pages exist")
        return [status == 1 for status in answer]

    def get_into(
        self,
        namespace: KVNamespace,
        keys: Sequence[bytes],
        frames: Sequence[Frame],
        timeout_s: float,  # noqa: ARG002
    ) -> list[bool]:
        if not keys:
            return []
        read = self._client.batch_get_into(_names(namespace, keys), *_buffers(frames))
        return [count == len(frame) for count, frame in zip(read, frames, strict=True)]

    def put(
        self,
        namespace: KVNamespace,
        keys: Sequence[bytes],
        frames: Sequence[Frame],
        timeout_s: float,  # noqa: ARG002
    ) -> list[bool]:
        if not keys:
            return []
        # put leaves an object as it is where it exists; upsert replaces it.
        return [status == 0 for status in self._client.batch_upsert_from(_names(namespace, keys), *_buffers(frames))]

    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:  # noqa: ARG002
        removed = int(self._client.remove_by_regex(f"^{namespace.id}/.*", True))
        if removed < 0:
            raise ConnectionError(f"Mooncake: status {removed} for a removal")
        return removed

    def close(self) -> None:
        if self._closed:  # the library does not survive a second time
            return
        self._closed = True
        self._client.unregister_buffer(self.ctx.staging.ctypes.data)
        self._client.close()


def _client_class() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"KV store mooncake: {error}. Install mooncake-transfer-engine (hosts with CUDA) or mooncake-transfer-engine-non-cuda, and the system's "
            "libibverbs, librdmacm, libnuma, liburing, libjsoncpp, libglog and libcurl"
        ) from error
    return MooncakeDistributedStore


def _names(namespace: KVNamespace, keys: Sequence[bytes]) -> list[str]:
    return [f"{namespace.id}/{key.hex()}" for key in keys]


def _buffers(frames: Sequence[Frame]) -> tuple[list[int], list[int]]:
    return [frame.ctypes.data for frame in frames], [len(frame) for frame in frames]
