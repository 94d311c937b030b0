"""Frames as strings of a Redis server, under ``PREFIX:NAMESPACE:HASH``. The server evicts by its own ``maxmemory-policy``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import Frame, KVNamespace, KVStore, KVStoreContext

__all__ = ["RedisStore"]

#: Bytes asked for or sent in one exchange: pages of megabytes must not pile up in the server's output buffer.
_EXCHANGE_BYTES = 8 << 20
_SCAN = 1000


class RedisStore(KVStore):
    """One connection an object; made again by the call after the one that lost it."""

    def __init__(self, ctx: KVStoreContext) -> None:
        super().__init__(ctx)
        url = str(ctx.options.get("url", "redis://127.0.0.1:6379/0"))
        self._prefix = str(ctx.options.get("prefix", "tokenspeed"))
        self._ttl_s = int(ctx.options.get("ttl_s", 0)) or None
        if not re.fullmatch(r"[\w.-]+", self._prefix):
            raise ConfigError(
                f"KV store redis: prefix {self._prefix!r} must be made of letters, digits, '.', '_' and '-'"
            )
        try:
            # No retries: core decides when a store is tried again.
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=ctx.timeout_s,
                socket_connect_timeout=ctx.timeout_s,
                retry=Retry(NoBackoff(), 0),
                single_connection_client=False,
            )
        except ValueError:
            # The error and what caused it quote parts of the address, which may hold a password.
            scheme, found, _ = url.partition("://")
            what = f"the {scheme}:// address" if found else "the address"
            raise ConfigError(
                f"KV store redis: --set kvstore-redis.url: {what} cannot be read; "
                "write redis://HOST:PORT/DB, rediss://... or unix://PATH, and special characters of a password as %XX"
            ) from None

    def exists(self, namespace: KVNamespace, keys: Sequence[bytes], timeout_s: float) -> list[bool]:  # noqa: ARG002
        if not keys:
            return []
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(self._name(namespace, key))
            return [bool(count) for count in pipe.execute()]

    def get_into(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        end = time.monotonic() + timeout_s
        found = [False] * len(keys)
        for begin, stop in _exchanges(frames):
            if time.monotonic() >= end:
                break
            values: list[Any] = self._client.mget([self._name(namespace, key) for key in keys[begin:stop]])
            for index, value in enumerate(values, begin):
                if value is not None and len(value) == len(frames[index]):
                    frames[index].data[:] = value
                    found[index] = True
        return found

    def put(
        self, namespace: KVNamespace, keys: Sequence[bytes], frames: Sequence[Frame], timeout_s: float
    ) -> list[bool]:
        end = time.monotonic() + timeout_s
        kept = [False] * len(keys)
        for begin, stop in _exchanges(frames):
            if time.monotonic() >= end:
                break
            with self._client.pipeline(transaction=False) as pipe:
                for index in range(begin, stop):
                    pipe.set(self._name(namespace, keys[index]), frames[index].data, ex=self._ttl_s)
                kept[begin:stop] = [bool(answer) for answer in pipe.execute()]
        return kept

    def delete(self, namespace: KVNamespace, timeout_s: float) -> int:
        end = time.monotonic() + timeout_s
        pattern, cursor, removed = f"{self._prefix}:{namespace.id}:*", 0, 0
        while True:
            cursor, names = self._client.scan(cursor, match=pattern, count=_SCAN)
            if names:
                removed += int(self._client.unlink(*names))
            if cursor == 0:
                return removed
            if time.monotonic() >= end:
                raise TimeoutError(f"{removed} pages were removed and more are left")

    def close(self) -> None:
        self._client.close()

    def _name(self, namespace: KVNamespace, key: bytes) -> str:
        return f"{self._prefix}:{namespace.id}:{key.hex()}"


def _exchanges(frames: Sequence[Frame]) -> list[tuple[int, int]]:
    """Ranges of frames of at most ``_EXCHANGE_BYTES``, and at least one frame each."""
    ranges: list[tuple[int, int]] = []
    begin = size = 0
    for index, frame in enumerate(frames):
        if index > begin and size + len(frame) > _EXCHANGE_BYTES:
            ranges.append((begin, index))
            begin, size = index, 0
        size += len(frame)
    return [*ranges, (begin, len(frames))] if frames else []
