"""From an assembly to what runs on one rank: platform, groups, model, KV pool, backends, executor; and on rank 0 the loop."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenspeed._scheduler import Scheduler, SchedulerConfig
from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.backends import BackendPairs, bind_pool, make_backends
from tokenspeed.engine.channel import Channel
from tokenspeed.engine.control import Control
from tokenspeed.engine.end_tokens import end_ids_of
from tokenspeed.engine.event_loop import EventLoop, Executor, now_us
from tokenspeed.engine.gauges import Gauges
from tokenspeed.engine.grammar_setup import GrammarParts, build_grammars, load_grammar_parts
from tokenspeed.engine.graph_setup import Graphs, plan_graphs
from tokenspeed.engine.kv_events.config import kv_events_of
from tokenspeed.engine.kv_events.publisher import KVEventPublisher
from tokenspeed.engine.memory import memory_advice, memory_by_use, pool_flag
from tokenspeed.engine.pools import count_pages, group_infos, make_pool
from tokenspeed.engine.requests import Admission
from tokenspeed.engine.scheduling import scheduler_config
from tokenspeed.engine.settings import resolved
from tokenspeed.engine.tiers import CacheSource, Tiers, make_cache
from tokenspeed.errors import ModelError
from tokenspeed.interfaces.kernel import KernelContext, KernelRequest
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.interfaces.platform import Platform, PlatformContext
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.dtypes import dtype_from_name, short_name
from tokenspeed.layers.loading import check_complete
from tokenspeed.layers.moe import Experts
from tokenspeed.layers.parallel import ParallelGroups
from tokenspeed.layers.quantization import quantization_for
from tokenspeed.layers.recurrent import RecurrentLayer
from tokenspeed.messages import EngineInfo
from tokenspeed.plugins.events import ModelLoadedContext
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.options import hide_given
from tokenspeed.plugins.selection import load_target
from tokenspeed.runtime.cache_executor import CacheExecutor
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.forward import eager
from tokenspeed.runtime.graphs import DecodeGraphs
from tokenspeed.runtime.kv_pool import KVPool, storage_bytes
from tokenspeed.runtime.mixed_graphs import MixedGraphs
from tokenspeed.runtime.page_tables import make_tables
from tokenspeed.runtime.parallel import join_ranks
from tokenspeed.runtime.sampler import Sampler
from tokenspeed.runtime.slot_sampling import SlotSampling
from tokenspeed.runtime.warmup import warm_up
from tokenspeed.weights.stream import iterate_weights

__all__ = ["Rank", "build_loop", "build_rank"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank runs with.

    Attributes:
        load_seconds: how long the weights took.
        cache: the tiers below the device, if any.
        graphs: what was captured, for the start block.
    """

    executor: ModelExecutor
    platform: Platform
    pool: KVPool
    weight_bytes: int
    vocab_size: int
    load_seconds: float
    cache: CacheExecutor | None = None
    grammar: GrammarParts = field(default_factory=GrammarParts)
    graphs: str = ""


def build_rank(assembly: Assembly, *, rank: int = 0, world_size: int = 1, directory: Path | None = None) -> Rank:
    """Make everything that executes plans on this rank; with several ranks, returns when all of them have come this far.

    Args:
        directory: private directory that the ranks share; not needed by one rank.

    Raises:
        ConfigError, ModelError, PluginError: what was wrong, in words for the user.
    """
    config = assembly.config
    platform = _platform(assembly, rank, world_size)
    groups, everyone = ParallelGroups(), None
    if directory is not None and world_size > 1:
        groups, everyone = join_ranks(platform.collective_backend(), directory=directory, rank=rank, size=world_size)
    kernels = _kernels(assembly, platform)
    with memory_advice(
        "the weights were loaded", "take a smaller --dtype, or more devices with --tensor-parallel-size"
    ):
        model, seconds = _load_model(assembly, platform, kernels, groups, progress=rank == 0)
    assembly.events.model_loaded(
        ModelLoadedContext(model=model, model_path=assembly.model.path, rank=rank, seconds=seconds)
    )
    cache_groups = model.cache_groups(assembly.model.hf_config, groups["attn"].size)
    # Where work is queued, the largest step runs before the pool gets its size, over one that just lets it run.
    measured = platform.asynchronous
    counted = None if measured else count_pages(assembly, platform, cache_groups, everyone)
    pool = make_pool(assembly, platform, cache_groups, counted, kernels)
    # Of this, the sizes of steps alone: groups with windows or states have more pages than those of a pool that is yet to be sized.
    plan_shape = scheduler_config(assembly.config, num_pages=pool.num_pages[:1])
    backends = make_backends(assembly, platform, model, pool, kernels, plan_shape.max_step_tokens)
    grammar = load_grammar_parts(assembly, rank=rank, vocab_size=_vocab_size(assembly))
    executor, graphs = _executor(assembly, platform, model, pool, kernels, backends, plan_shape, grammar)
    reserved = 0
    if measured:
        scratch = use.scratch if (use := platform.memory_use()) is not None else 0
        sizes = {"max_rows": resolved(config.max_num_seqs), "max_tokens": plan_shape.max_step_tokens}
        reserved = graphs.reserve_bytes(scratch, **sizes)
        pages = count_pages(assembly, platform, cache_groups, everyone, reserved_bytes=reserved)
        pool = make_pool(assembly, platform, cache_groups, pages, kernels)
        bind_pool(model, pool, backends, executor)
    with memory_advice("capturing graphs", f"lower {pool_flag(config)}, or give --enforce-eager"):
        sized = config.max_total_tokens is None and config.kv_cache_memory_bytes is None
        captured = graphs.capture(
            platform, executor, reserved=reserved, utilization=config.gpu_memory_utilization if sized else None
        )
    room, longest = pool.num_pages[0] * assembly.page_size, resolved(config.max_model_len)
    if rank == 0 and room < longest:
        _log.warning(
            "The KV pool holds %d tokens: requests may have so many, not --max-model-len %d; raise --max-total-tokens or --kv-cache-memory-bytes",
            room,
            longest,
        )
    cache = make_cache(assembly, platform, pool, rank=rank, world_size=world_size)
    if cache is not None:
        executor.use_cache(cache)
    return Rank(
        executor=executor,
        platform=platform,
        pool=pool,
        weight_bytes=storage_bytes([*model.parameters(), *model.buffers()]),
        vocab_size=_vocab_size(assembly),
        load_seconds=seconds,
        cache=cache,
        grammar=grammar,
        graphs=captured,
    )


def build_loop(
    assembly: Assembly,
    rank: Rank,
    *,
    channel: Channel,
    executor: Executor | None = None,
    cache: CacheSource | None = None,
    clock: Callable[[], int] = now_us,
) -> tuple[EventLoop, EngineInfo]:
    """The loop of rank 0 around ``executor`` and ``cache`` (default: the rank's own), and what the engine says of itself. ``clock``: microseconds."""
    config = assembly.config
    host_pages = rank.cache.host.num_pages if rank.cache is not None else ()
    scheduler = Scheduler(
        scheduler_config(
            config,
            num_pages=rank.pool.num_pages,
            host_pages=host_pages,
            groups=rank.pool.groups,
            step_sizes=rank.executor.mixed_sizes,
        )
    )
    cache = cache or rank.cache
    with ExitStack() as started:  # nothing of it outlives a start that fails
        if cache is not None:
            started.callback(cache.close)
        grammars = build_grammars(rank.grammar)
        started.callback(grammars.close)
        tiers = None if cache is None or rank.cache is None else Tiers(scheduler, cache, rank.cache)
        gauges = Gauges(scheduler, grammars, tiers)
        info = _info(assembly, rank)
        events = kv_events_of(config)
        block_sizes = [group.page_size for group in scheduler.config.groups]
        loop = EventLoop(
            scheduler=scheduler,
            executor=executor or rank.executor,
            tiers=tiers,
            admission=Admission(
                vocab_size=rank.vocab_size,
                end_ids=end_ids_of(assembly, vocab_size=rank.vocab_size),
                seed=config.seed,
            ),
            channel=channel,
            control=Control(scheduler=scheduler, gauges=gauges, info=info),
            gauges=gauges,
            grammars=grammars,
            kv_events=KVEventPublisher(events, block_sizes=block_sizes) if events is not None else None,
            overlap_depth=scheduler.config.overlap_depth,
            clock=clock,
        )
        started.pop_all()
    return loop, info


def _platform(assembly: Assembly, rank: int, world_size: int) -> Platform:
    context = PlatformContext(
        local_rank=rank,
        local_world_size=world_size,
        threads=assembly.config.num_threads,
        options=assembly.options_of("platform"),
    )
    platform: Platform = load_target(assembly.platform_spec.target)(context)
    platform.init_process()
    return platform


def _kernels(assembly: Assembly, platform: Platform) -> KernelRegistry:
    shared: dict[str, Any] = {}

    def context(plugin: str) -> KernelContext:
        return KernelContext(
            device=platform.device,
            threads=torch.get_num_threads(),
            shared=shared,
            options=assembly.options.get(plugin, {}),
        )

    return assembly.kernel_registry(context, capability=platform.capability)


def _load_model(
    assembly: Assembly, platform: Platform, kernels: KernelRegistry, groups: ParallelGroups, *, progress: bool
) -> tuple[CausalLM, float]:
    began_s = time.monotonic()
    config = assembly.config
    dtype = dtype_from_name(config.dtype)
    context = LayerContext(
        dtype=dtype,
        device=platform.device,
        select_kernel=kernels.select,
        groups=groups,
        kv_layout=assembly.kv_layout,
        kv_dtype=dtype_from_name(config.kv_cache_dtype),
        max_positions=config.max_model_len or 0,
        quantization=quantization_for(assembly.model.config),
        allocate=platform.allocate,
    )
    model: CausalLM = load_target(assembly.model_spec.target)(assembly.model.hf_config, context)
    filled = model.load_weights(iterate_weights(assembly.model, model=model, progress=progress))
    check_complete(model, filled)
    model.eval()
    platform.settle("weights", [*model.parameters(), *model.buffers()])
    return model, time.monotonic() - began_s


def _executor(
    assembly: Assembly,
    platform: Platform,
    model: CausalLM,
    pool: KVPool,
    kernels: KernelRegistry,
    backends: BackendPairs,
    plan_shape: SchedulerConfig,
    grammar: GrammarParts,
) -> tuple[ModelExecutor, Graphs]:
    """The executor, warmed up where the platform queues its work, and its graphs, which are yet to be captured."""
    config = assembly.config
    vocab_size = _vocab_size(assembly)
    request = KernelRequest(
        family="sampling",
        mode="argmax",
        dtype=short_name(dtype_from_name(config.dtype)),
        shape={"vocab_size": vocab_size},
    )
    argmax = kernels.select(request)
    apply_bitmask = kernels.select(
        KernelRequest(family="sampling", mode="apply_bitmask", dtype="fp32", shape={"vocab_size": vocab_size})
    )
    draw = kernels.select(dataclasses.replace(request, mode="draw"))
    max_rows, max_model_len = resolved(config.max_num_seqs), resolved(config.max_model_len)
    state = SlotSampling(max_slots=max_rows, vocab_size=vocab_size, device=platform.device)
    tables = make_tables(
        pool.groups,
        page_size=assembly.page_size,
        max_slots=max_rows,
        max_model_len=max_model_len,
        device=platform.device,
    )
    executor = ModelExecutor(
        model=model,
        forward=eager(model, [backend for pair in backends.values() for backend in pair]),
        sampler=Sampler(state, argmax, grammars=grammar.for_slots(max_rows), apply_bitmask=apply_bitmask, draw=draw),
        state=state,
        tables=tables,
        page_sizes=pool.page_sizes,
        max_rows=max_rows,
        max_tokens=plan_shape.max_step_tokens,
        device=platform.device,
    )
    bind_pool(model, pool, backends, executor)
    decoders = [decode for _, decode in backends.values()]
    plan = plan_graphs(
        config,
        platform,
        decoders,
        [module for module in model.modules() if isinstance(module, RecurrentLayer)],
        decoder_name=assembly.choices["attention.decode"].winner.name,
        max_rows=max_rows,
        max_tokens=plan_shape.max_step_tokens,
        experts=[module for module in model.modules() if isinstance(module, Experts)],
    )
    common: dict[str, Any] = {
        "model": model,
        "backends": decoders,
        "argmax": argmax,
        "tables": tables,
        "page_sizes": pool.page_sizes,
        "last_tokens": executor.last_tokens,
        "vocab_size": vocab_size,
        "dtype": dtype_from_name(config.dtype),
        "max_seq_len": max_model_len,
    }
    graphs = Graphs(plan, partial(DecodeGraphs, **common), partial(MixedGraphs, **common))
    if platform.asynchronous:
        advice = f"lower --chunked-prefill-size (now {config.chunked_prefill_size}) or --max-num-seqs (now {max_rows})"
        with memory_advice("the largest step ran", advice):
            warm_up(executor, max_rows=max_rows, max_tokens=plan_shape.max_step_tokens, max_model_len=max_model_len)
            grammar.warm_up(apply_bitmask, platform.device)
    return executor, graphs


def _info(assembly: Assembly, rank: Rank) -> EngineInfo:
    config = assembly.config
    plain: dict[str, Any] = msgspec.to_builtins(config)
    plain["plugin_options"] = hide_given(assembly.host.registry.specs("option"), config.plugin_options)
    return EngineInfo(
        max_model_len=min(resolved(config.max_model_len), rank.pool.num_pages[0] * assembly.page_size),
        vocab_size=rank.vocab_size,
        page_size=assembly.page_size,
        kv_pages=rank.pool.num_pages[0],
        kv_bytes=rank.pool.nbytes,
        weight_bytes=rank.weight_bytes,
        dtype=config.dtype,
        device=rank.platform.describe(),
        load_seconds=rank.load_seconds,
        plan=assembly.plan.to_json(),
        config=plain,
        host_pages=rank.cache.host.num_pages[0] if rank.cache is not None else 0,
        host_bytes=rank.cache.host.nbytes if rank.cache is not None else 0,
        graphs=rank.graphs,
        memory=memory_by_use(rank.platform),
        groups=group_infos(rank.pool, rank.cache.host.num_pages if rank.cache is not None else ()),
    )


def _vocab_size(assembly: Assembly) -> int:
    size = assembly.model.hf_config.vocab_size
    if not isinstance(size, int):
        raise ModelError(f"the model's configuration has vocab_size {size!r}; it must be a number")
    return size
