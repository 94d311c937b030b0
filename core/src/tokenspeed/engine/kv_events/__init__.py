"""KV events: what enters and leaves the prefix cache, told to routers over ZeroMQ in the form that vLLM's subscribers read.

``config`` reads ``--kv-events-config``, ``batching`` turns what the scheduler recorded into events, ``wire`` is their form, ``publisher`` sends them.
Nothing is imported here: assembly reads the settings and needs no sockets.
"""

from __future__ import annotations

__all__: list[str] = []
