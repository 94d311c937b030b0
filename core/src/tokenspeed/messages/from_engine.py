"""Messages from the engine to the server process."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "HIT_CUTS",
    "ControlReply",
    "EngineFailed",
    "EngineInfo",
    "EngineReady",
    "EngineStats",
    "FromEngine",
    "Outputs",
    "RequestStats",
    "TierStats",
    "TokenLogprobs",
    "TokenOutput",
]


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probability of one token and of the best alternatives at its position, natural logarithm; ``rank`` is 1 for the likeliest."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


#: Why the cache gave a prompt no more than it did: it gave all that it could; nobody has sent the next page before (or so long ago that it is forgotten); it
#: was given up for want of room; the request asks for prompt log probabilities; the KV store did not answer in time; the tier that had it did not bring it;
#: it is there, and the window or state to go on behind it was never kept.
HIT_CUTS = ("none", "new", "evicted", "prompt_logprobs", "store_timeout", "load_failed", "boundary")


class RequestStats(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What a finished request cost. Times in ms from its arrival in the server; ``grammar_ms``, how long it waited for its grammar, is part of ``queue_ms``.

    Attributes:
        host_tokens: of ``cached_tokens``, those that came back from the host tier.
        storage_tokens: of ``host_tokens``, those that the KV store gave for this request.
        hit_cut: why the cache gave no more: one of ``HIT_CUTS``.
        hit_cut_group: the cache group that lacked it: 0 for full attention, others where a window or a state could not be resumed any later.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    preemptions: int = 0
    preempted_ms: float = 0.0
    decode_tok_s: float = 0.0
    grammar_ms: float = 0.0
    host_tokens: int = 0
    storage_tokens: int = 0
    hit_cut: str = "none"
    hit_cut_group: int = 0


class TokenOutput(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """New tokens of one request. The last one carries ``finish`` (a ``FinishReason`` text) and ``stats``.

    Attributes:
        tokens: ids generated since the last output, the stopping token included.
        stop_reason: the id that ended it where ``finish`` is ``stop`` and a stop token did it; ``None`` otherwise.
        cached_tokens: prompt tokens served from the cache; sent with the first output.
        logprobs: one per token when asked for.
        prompt_logprobs: sent once, before or with the first token: entry i belongs to prompt token i, the first is ``None``.
        stats: with the last output; ``None`` beside ``finish == "error"`` says that the request was refused at submit and never ran.
        error: text for ``finish == "error"``; ``param`` is the field of a refused request that is at fault, empty where none is.
            ``status`` is the HTTP status to answer with, 0 where nothing but the above says it.
    """

    rid: int
    tokens: list[int]
    finish: str = ""
    stop_reason: int | None = None
    cached_tokens: int = -1
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stats: RequestStats | None = None
    error: str = ""
    param: str = ""
    status: int = 0


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """The tiers below the device: gauges, then cumulative counters. Bytes and what concerns the store are rank 0's.

    Attributes:
        host_pages, host_free, host_cached, host_moving: of cache group 0; ``EngineStats.groups`` has all.
        host_full: pages that were not written back because every host page was in use.
        bad_pages, lost_pages: pages of the store that were damaged, or that it did not have although it said so.
        store_up: the store takes calls, for loads and for saves; true where there is none.
        bypassed: calls that were spared a store that is down.
    """

    host_pages: int
    host_free: int
    host_cached: int
    host_moving: int
    store_up: tuple[bool, bool]
    host_hit_tokens: int
    storage_hit_tokens: int
    written_back: int
    loaded_back: int
    prefetched: int
    stored: int
    written_back_bytes: int
    loaded_back_bytes: int
    prefetched_bytes: int
    stored_bytes: int
    write_backs_failed: int
    load_backs_failed: int
    prefetches_failed: int
    stores_failed: int
    host_evicted: int
    host_full: int
    lookups: int
    lookup_hits: int
    prefetch_timeouts: int
    reloads: int
    bad_pages: int = 0
    lost_pages: int = 0
    store_errors: int = 0
    store_timeouts: int = 0
    bypassed: int = 0
    store_seconds: float = 0.0
    store_evicted: int = 0


class GroupStats(msgspec.Struct, array_like=True, frozen=True):
    """Pages of one cache group, or states of a recurrent one: gauges by tier, then pages moved so far, as rank 0 counts them.

    Attributes:
        group: its index; full groups move in lockstep and are told of once, as group 0.
        kind: ``full`` (latents too), ``window`` or ``recurrent``.
    """

    group: int
    kind: str
    active: int
    cached: int
    free: int
    host_total: int = 0
    host_free: int = 0
    host_cached: int = 0
    host_moving: int = 0
    written_back: int = 0
    loaded_back: int = 0


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """Gauges and cumulative counters of the engine at one moment; sent after steps (at most every 100 ms) and once more when it goes idle.

    Attributes:
        pages_active, pages_cached, pages_free: of cache group 0.
        groups: every cache group, where the model has windows or states besides full attention; empty otherwise.
    """

    waiting: int
    running: int
    retracted: int
    pages_active: int
    pages_cached: int
    pages_free: int
    prompt_tokens: int
    cached_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    retractions: int
    aborted: int
    failed: int
    finished: int
    evicted_pages: int
    steps: int
    grammar_waiting: int = 0
    grammar_compiles: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_hits: int = 0
    grammar_failures: int = 0
    tiers: TierStats | None = None
    sessions: int = 0
    retained_pages: int = 0
    hits_cut: dict[str, int] = {}
    groups: list[GroupStats] = []


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """Everything one step has to tell."""

    items: list[TokenOutput]
    stats: EngineStats | None = None


class GroupInfo(msgspec.Struct, array_like=True, frozen=True):
    """A cache group as the engine sized it.

    Attributes:
        kind: ``full`` (latents too; all full groups as one), ``window`` or ``recurrent``.
        span: tokens of a window, or between two states that can be kept; 0 otherwise.
        pages, host_pages: on the device and the host; states of a recurrent group.
        page_bytes: of one page or state, in all its layers.
    """

    kind: str
    span: int
    pages: int
    host_pages: int
    page_bytes: int


class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the running engine is, for ``/get_server_info`` and the start-up block.

    Attributes:
        plan: the verified plugin plan and selections, plain JSON.
        config: the effective settings, plain JSON.
        kv_pages: of cache group 0.
        host_pages: of the host tier, of cache group 0; 0 without one. It and the sizes are those of one rank.
        graphs: how many graphs were captured, of what and in what time, or why there are none or fewer than could be; empty where the platform has none.
        memory: bytes of the device by use (``weights``, ``kv``, ``graphs``, ``steps``, ``free``) and in ``total``; empty where the platform does not tell.
        groups: every cache group, where the model has windows or states besides full attention; empty otherwise.
    """

    max_model_len: int
    vocab_size: int
    page_size: int
    kv_pages: int
    kv_bytes: int
    weight_bytes: int
    dtype: str
    device: str
    load_seconds: float
    plan: dict[str, Any]
    config: dict[str, Any]
    host_pages: int = 0
    host_bytes: int = 0
    graphs: str = ""
    memory: dict[str, int] = {}
    groups: list[GroupInfo] = []


class EngineReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine takes requests from now on."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine cannot start or go on; it exits right after. ``kind`` is ``config``, ``plugin``, ``model`` or ``internal``."""

    kind: str
    error: str


class ControlReply(msgspec.Struct, tag="control", array_like=True, frozen=True):
    """Answer to a ``ControlRequest`` of the same ``id``."""

    id: int
    ok: bool
    result: Any = None


FromEngine = Outputs | EngineReady | EngineFailed | ControlReply
