"""The engine's face of the C++ scheduler: its configuration, and requests as it wants them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed._scheduler import (
    CacheGroupConfig,
    CacheGroupKind,
    RequestSpec,
    SchedulerConfig,
    SubmitRefusal,
    WritePolicy,
)
from tokenspeed.config import EngineConfig
from tokenspeed.engine.kv_events.config import kv_events_of
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.engine.settings import resolved
from tokenspeed.types import CacheGroup

__all__ = ["REFUSED_PARAMS", "request_spec", "scheduler_config"]

#: The field of a request's JSON that a refusal of the scheduler is about.
REFUSED_PARAMS = {
    int(SubmitRefusal.EMPTY_PROMPT): "prompt",
    int(SubmitRefusal.BAD_TOKEN): "prompt",
    int(SubmitRefusal.BAD_MAX_NEW_TOKENS): "max_tokens",
    int(SubmitRefusal.TOO_LONG): "prompt",
    int(SubmitRefusal.NEVER_FITS): "prompt",
    int(SubmitRefusal.BAD_PRIORITY): "priority",
    int(SubmitRefusal.BAD_RETAIN): "retain_s",
}

#: ``CacheGroup.kind`` as the scheduler calls it, where not every token's page is kept.
_KINDS = {"window": CacheGroupKind.WINDOW, "recurrent": CacheGroupKind.RECURRENT}

#: ``--kvstore-write-policy`` as the scheduler calls it.
_WRITE_POLICIES = {
    "write-through": WritePolicy.THROUGH,
    "write-on-evict": WritePolicy.ON_EVICT,
    "selective": WritePolicy.SELECTIVE,
}


def scheduler_config(
    config: EngineConfig,
    *,
    num_pages: Sequence[int],
    host_pages: Sequence[int] = (),
    groups: Sequence[CacheGroup] = (),
    step_sizes: Sequence[int] = (),
) -> SchedulerConfig:
    """The scheduler's configuration for resolved settings; pages per cache group, and host pages where there is a host tier. Every rank makes the same one,
    for the sizes of its buffers.

    Args:
        groups: the model's cache groups; left out where all are full.
        step_sizes: prompt tokens that steps with decodes are filled up to, ascending; none where they are not.

    Raises:
        ValueError: a group that the scheduler cannot serve, by name.
    """
    kinds = groups or [CacheGroup(kind="full", layers=())] * len(num_pages)
    hosts = host_pages or [0] * len(num_pages)
    return SchedulerConfig(
        groups=[
            CacheGroupConfig(
                page_size=group.interval if group.kind == "recurrent" else resolved(config.block_size),
                num_pages=pages,
                kind=_KINDS.get(group.kind, CacheGroupKind.FULL),
                host_pages=host,
                window=group.window,
            )
            for group, pages, host in zip(kinds, num_pages, hosts, strict=True)
        ],
        max_num_seqs=resolved(config.max_num_seqs),
        max_batched_tokens=resolved(config.chunked_prefill_size),
        max_model_len=resolved(config.max_model_len),
        overlap_depth=0 if config.disable_overlap_schedule else 1,
        enable_prefix_caching=config.enable_prefix_caching,
        max_step_us=int((config.max_step_ms or 0.0) * 1000),
        step_sizes=step_sizes,
        write_policy=_WRITE_POLICIES[config.kvstore_write_policy],
        l3=bool(host_pages) and config.kvstore is not None,
        prefetch_threshold=config.prefetch_threshold,
        # A look-up and a load, each with its deadline.
        prefetch_timeout_us=int(config.kvstore_timeout_ms * 2000),
        kv_events=kv_events_of(config) is not None,
        retain_percent=config.session_retain_percent,
    )


def request_spec(request: LiveRequest) -> RequestSpec:
    """``request`` for the scheduler. Log probabilities of a prompt need all of it computed: nothing may be reused."""
    return RequestSpec(
        id=request.id,
        tokens=request.prompt_ids(),
        max_new_tokens=request.params.max_new_tokens,
        salt=request.salt,
        priority=request.priority,
        max_reuse_tokens=0 if request.prompt_logprobs is not None else -1,
        session=request.session,
        retain_us=request.retain_us,
    )
