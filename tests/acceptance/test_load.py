"""Many connections at once: nothing is lost, nothing is mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .streams import read_streams

STREAMS = 200


def test_two_hundred_streams_complete_with_their_own_text(serve: Callable[..., Any]) -> None:
    """Each has its own prompt and seed; its text must be what the same request gets in other company and, for some, alone."""
    server = serve("toy", "--plugins", "none")
    bodies = [
        {
            "model": server.model,
            "prompt": f"stream number {i}",
            "max_tokens": 16,
            "temperature": 1.0,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(STREAMS)
    ]
    together = asyncio.run(read_streams(server.url, bodies))
    assert [stream.error for stream in together] == [""] * STREAMS
    assert all(stream.done and stream.finish == "length" and stream.usage is not None for stream in together)
    assert [stream.usage["completion_tokens"] for stream in together if stream.usage] == [16] * STREAMS
    texts = [stream.text for stream in together]
    assert len(set(texts)) > STREAMS // 2, "texts that are all alike would hide a mix-up"
    other = asyncio.run(read_streams(server.url, bodies[::-1], at_once=32))
    assert [stream.text for stream in other[::-1]] == texts
    alone = asyncio.run(read_streams(server.url, bodies[::40], at_once=1))
    assert [stream.text for stream in alone] == texts[::40]
    idle = server.wait_for(lambda m: m["num_requests_running"] == 0 and m['kv_pages{state="active"}'] == 0, 5.0)
    assert sum(value for name, value in idle.items() if name.startswith("requests_finished_total")) == len(
        together
    ) + len(other) + len(alone)
