"""What a rank does between its start and its end: build everything, say that it is ready, loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.bootstrap import bootstrap
from tokenspeed.engine.build import Rank, build_loop, build_rank
from tokenspeed.engine.channel import ZmqChannel
from tokenspeed.engine.lifeline import Lifeline
from tokenspeed.engine.rank_caches import RankCaches
from tokenspeed.engine.ranks import FollowerLoop, LeaderExecutor, PlanSender
from tokenspeed.engine.start import EngineStart
from tokenspeed.engine.tiers import CacheSource
from tokenspeed.messages import EngineReady
from tokenspeed.plugins.events import EngineReadyContext, ShutdownContext
from tokenspeed.plugins.plan import PluginPlan

__all__ = ["serve_rank"]


def serve_rank(start: EngineStart, channel: ZmqChannel | None, lifeline: Lifeline, began_s: float) -> None:
    """Serve until told to end. ``channel`` is rank 0's to the server."""
    sender = PlanSender(_addresses(start)) if start.rank == 0 and start.world_size > 1 else None
    assembly = bootstrap(PluginPlan.decode(start.plan), start.config, "engine", start.rank, start.world_size)
    reason = "shutdown requested"
    try:
        rank = build_rank(assembly, rank=start.rank, world_size=start.world_size, directory=Path(start.directory))
        # What is loaded now lives as long as the process: the collector need not walk over it in the middle of a step.
        gc.collect()
        gc.freeze()
        if channel is None:
            address, answers = _addresses(start)[start.rank - 1], start.address("cache-answers")
            FollowerLoop(rank.executor, address, on_end=lifeline.stop, cache=rank.cache, answers=answers).run()
        else:
            cache: CacheSource | None = rank.cache
            if rank.cache is not None and start.world_size > 1:
                cache = RankCaches(rank.cache, start.address("cache-answers"), start.world_size)
            _lead(assembly, rank, channel, sender, lifeline, began_s, cache)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        assembly.events.shutdown(ShutdownContext(role="engine", reason=reason))


def _lead(
    assembly: Assembly,
    rank: Rank,
    channel: ZmqChannel,
    sender: PlanSender | None,
    lifeline: Lifeline,
    began_s: float,
    cache: CacheSource | None,
) -> None:
    tiers = rank.cache is not None
    executor = rank.executor if sender is None else LeaderExecutor(rank.executor, sender, tiers=tiers)
    loop, info = build_loop(assembly, rank, executor=executor, channel=channel, cache=cache)
    assembly.events.engine_ready(
        EngineReadyContext(model_name=assembly.config.model, kv_pages=info.kv_pages, seconds=time.monotonic() - began_s)
    )
    channel.send(EngineReady(info))
    loop.run()
    lifeline.stop()  # the other ranks end next, and are no loss any more
    if sender is not None:
        sender.close()


def _addresses(start: EngineStart) -> Sequence[str]:
    return [start.address(f"plans-{rank}") for rank in range(1, start.world_size)]
