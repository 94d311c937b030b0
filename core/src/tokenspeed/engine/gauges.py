"""The engine's figures for the server: counted here where the scheduler's own meaning differs, and sent rarely."""

from __future__ import annotations

from collections import Counter

from tokenspeed._scheduler import CacheGroupKind, Scheduler, SchedulerStats
from tokenspeed.engine.grammars import Grammars
from tokenspeed.engine.tiers import Tiers
from tokenspeed.messages import HIT_CUTS, EngineStats, GroupStats
from tokenspeed.types import FinishReason

__all__ = ["Gauges"]

_INTERVAL_US = 100_000


class Gauges:
    """Ends by reason and steps are counted here: a stop string is an abort for the scheduler, yet a good end for the client."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars | None = None, tiers: Tiers | None = None) -> None:
        self._scheduler = scheduler
        self._tiers = tiers
        self._grammars = grammars or Grammars()
        self._ends: Counter[FinishReason] = Counter()
        self._due_us = 0
        self._fresh = True
        self._steps = 0
        self._generated = 0

    def ended(self, reason: FinishReason) -> None:
        """A request ended."""
        self._ends[reason] += 1
        self._fresh = False

    def stepped(self, generated: int) -> None:
        """The results of a plan were taken: ``generated`` tokens."""
        self._steps += 1
        self._generated += generated
        self._fresh = False

    def changed(self) -> None:
        """Something else moved the gauges: a request came, the cache was flushed."""
        self._fresh = False

    def due(self, now_us: int, *, idle: bool) -> EngineStats | None:
        """The figures when 100 ms have passed since the last ones, or when the engine goes idle with unsent changes."""
        if self._fresh or (now_us < self._due_us and not idle):
            return None
        self._due_us, self._fresh = now_us + _INTERVAL_US, True
        return self.now()

    def now(self) -> EngineStats:
        """The figures of this moment."""
        stats, grammars = self._scheduler.stats(), self._grammars.figures
        return EngineStats(
            waiting=stats.waiting,
            running=stats.running,
            retracted=stats.retracted,
            pages_active=stats.pages_active[0],
            pages_cached=stats.pages_cached[0],
            pages_free=stats.pages_free[0],
            prompt_tokens=stats.prompt_tokens_queried,
            cached_tokens=stats.prefix_hit_tokens,
            computed_prompt_tokens=stats.prefill_tokens,
            generated_tokens=self._generated,
            retractions=stats.retractions,
            aborted=self._ends[FinishReason.ABORT],
            failed=self._ends[FinishReason.ERROR],
            finished=self._ends[FinishReason.STOP] + self._ends[FinishReason.LENGTH],
            evicted_pages=stats.evicted_pages,
            steps=self._steps,
            grammar_waiting=self._grammars.waiting,
            grammar_compiles=grammars.compiles,
            grammar_compile_seconds=grammars.compile_seconds,
            grammar_hits=grammars.hits,
            grammar_failures=grammars.failures,
            tiers=None if self._tiers is None else self._tiers.figures(),
            sessions=stats.sessions,
            retained_pages=stats.retained_pages,
            hits_cut=dict(zip(HIT_CUTS, stats.hits_cut, strict=True)),
            groups=self._groups(stats),
        )

    def _groups(self, stats: SchedulerStats) -> list[GroupStats]:
        moved = self._tiers.moved if self._tiers is not None else None
        found = []
        for index, group in enumerate(self._scheduler.config.groups):
            if index and group.kind == CacheGroupKind.FULL:
                continue  # group 0 has told of their pages
            found.append(
                GroupStats(
                    group=index,
                    kind=group.kind.name.lower(),
                    active=stats.pages_active[index],
                    cached=stats.pages_cached[index],
                    free=stats.pages_free[index],
                    host_total=stats.host_pages_total[index],
                    host_free=stats.host_pages_free[index],
                    host_cached=stats.host_pages_cached[index],
                    host_moving=stats.host_pages_moving[index],
                    written_back=moved.out[index] if moved is not None else 0,
                    loaded_back=moved.back[index] if moved is not None else 0,
                )
            )
        return found if len(found) > 1 else []
