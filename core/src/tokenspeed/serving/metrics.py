"""Counters of the server process and their Prometheus text.

What the streams touch is plain Python numbers (adding costs a fraction of a microsecond); ``prometheus_client`` only writes the exposition. Nothing here raises
on strange numbers: they are clamped and counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed.messages import HIT_CUTS

if TYPE_CHECKING:
    from tokenspeed.messages import GroupStats, TierStats
    from tokenspeed.serving.engine_client import EngineClient
    from tokenspeed.serving.generation import Choice

__all__ = ["Histogram", "ServerMetrics", "render_metrics"]

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; negative ones (clocks of two processes) count as 0."""
        value = max(value, 0.0)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """The Prometheus form: cumulative counts."""
        family = HistogramMetricFamily(name, text)
        buckets, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(running)))
        family.add_metric([], buckets, self.total)
        return family


class ServerMetrics:
    """What the server counts by itself; the engine's gauges come from ``EngineStats``."""

    def __init__(self) -> None:
        self.submitted = 0
        self.finished: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.orphans = 0
        self.clamped = 0
        #: by path and status; what probes and scrapes were answered is apart
        self.responses: Counter[tuple[str, int]] = Counter()
        self.probes: Counter[tuple[str, int]] = Counter()
        self.ttft = Histogram(_LATENCY)
        self.itl = Histogram(_GAP)
        self.e2e = Histogram(_LATENCY)
        self.queue = Histogram(_LATENCY)
        self.prompt_length = Histogram(_TOKENS)
        self.output_length = Histogram(_TOKENS)

    def count_finished(self, choice: Choice, reason: str, now: float) -> None:
        """Account for a request at its end, whatever ended it; called once per request."""
        self.finished[reason] += 1
        cached = max(choice.cached_tokens, 0)
        stats = choice.stats
        if stats is not None:
            self.queue.observe(stats.queue_ms / 1e3)
            if stats.cached_tokens > choice.prompt_tokens or stats.cached_tokens < 0:
                self.clamped += 1
        self.prompt_tokens += choice.prompt_tokens
        self.cached_tokens += min(cached, choice.prompt_tokens)
        self.generation_tokens += choice.output_tokens
        self.e2e.observe(now - choice.submit_s)
        self.prompt_length.observe(choice.prompt_tokens)
        self.output_length.observe(choice.output_tokens)


class _Exposition(Collector):
    def __init__(self, metrics: ServerMetrics, client: EngineClient) -> None:
        self._metrics = metrics
        self._client = client

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._engine()

    def _server(self) -> Iterator[Metric]:
        m = self._metrics
        yield _counter("requests", "Requests handed to the engine.", m.submitted)
        yield _labelled(
            "requests_finished",
            "Requests that ended, by reason.",
            "reason",
            m.finished,
            ("stop", "length", "abort", "error", "refused"),
        )
        yield _labelled(
            "requests_aborted",
            "Aborts, by who asked.",
            "reason",
            m.aborted,
            ("disconnect", "api", "error", "shutdown", "orphan"),
        )
        yield _counter("prompt_tokens", "Prompt tokens of finished requests.", m.prompt_tokens)
        yield _counter(
            "cached_prompt_tokens", "Prompt tokens of finished requests that came from the cache.", m.cached_tokens
        )
        yield _counter("generation_tokens", "Tokens sampled for finished requests.", m.generation_tokens)
        yield _counter("orphan_outputs", "Engine outputs for requests that the server does not know.", m.orphans)
        yield _counter("metrics_clamped", "Values outside their range that were clamped.", m.clamped)
        yield _counter("bad_frames", "Frames from the engine that did not decode.", self._client.bad_frames)
        yield _answers("http_responses", "HTTP answers, those of probes left out.", m.responses)
        yield _answers("http_probes", "HTTP answers of /health and /metrics.", m.probes)
        yield m.ttft.family("tokenspeed:time_to_first_token_seconds", "Submission to first token.")
        yield m.itl.family("tokenspeed:inter_token_latency_seconds", "Gap between two outputs of one request.")
        yield m.e2e.family("tokenspeed:e2e_request_latency_seconds", "Submission to end.")
        yield m.queue.family("tokenspeed:request_queue_time_seconds", "Arrival to first step.")
        yield m.prompt_length.family("tokenspeed:request_prompt_tokens", "Prompt lengths.")
        yield m.output_length.family("tokenspeed:request_generation_tokens", "Output lengths.")

    def _engine(self) -> Iterator[Metric]:
        client, stats = self._client, self._client.stats
        yield _gauge("engine_up", "1 while the engine is ready and answers.", int(client.ready and not client.hung))
        if stats is None:
            return
        yield _gauge("num_requests_running", "Requests in the current step.", stats.running)
        yield _gauge("num_requests_waiting", "Requests that wait for admission.", stats.waiting)
        yield _gauge(
            "num_requests_retracted", "Requests that gave their pages back and wait to resume.", stats.retracted
        )
        pages = GaugeMetricFamily("tokenspeed:kv_pages", "KV pages by state.", labels=["state"])
        for state in ("active", "cached", "free"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        yield from _groups(stats.groups)
        yield _gauge("sessions", "Sessions whose pages are kept for their next turn.", stats.sessions)
        yield _gauge("retained_pages", "KV pages kept for sessions.", stats.retained_pages)
        asked = stats.prompt_tokens
        hits = min(max(stats.cached_tokens, 0), asked)
        yield _gauge(
            "prefix_cache_hit_rate",
            "Share of prompt tokens since the start that came from the cache.",
            hits / asked if asked else 0.0,
        )
        yield _counter("engine_prompt_tokens", "Prompt tokens admitted.", asked)
        yield _counter("engine_cached_tokens", "Prompt tokens found in the cache at admission.", hits)
        yield _counter(
            "engine_computed_prompt_tokens", "Prompt tokens that were computed.", stats.computed_prompt_tokens
        )
        yield _counter("engine_generated_tokens", "Tokens sampled.", stats.generated_tokens)
        yield _counter("retractions", "Requests that had to give their pages back.", stats.retractions)
        yield _labelled(
            "prefix_hits_cut", "Requests by why the cache gave no more.", "reason", Counter(stats.hits_cut), HIT_CUTS
        )
        yield _counter("evicted_pages", "Cached pages that were given up for new ones.", stats.evicted_pages)
        yield _counter("engine_steps", "Forward steps.", stats.steps)
        yield _gauge(
            "num_requests_grammar", "Requests that wait for their grammar to be compiled.", stats.grammar_waiting
        )
        yield _counter("grammar_compiles", "Grammars that were compiled, failures included.", stats.grammar_compiles)
        yield _counter("grammar_compile_seconds", "Time spent compiling grammars.", stats.grammar_compile_seconds)
        yield _counter("grammar_cache_hits", "Requests whose grammar was known already.", stats.grammar_hits)
        yield _counter("grammar_failures", "Requests that were refused for their grammar.", stats.grammar_failures)
        if stats.tiers is not None:
            yield from _tiers(stats.tiers)


def _groups(groups: list[GroupStats]) -> Iterator[Metric]:
    """Nothing where full attention is all that a model has: ``kv_pages`` and ``host_pages`` tell of that."""
    if not groups:
        return
    pages = GaugeMetricFamily(
        "tokenspeed:group_pages",
        "Pages, or states of a recurrent group, by tier and state.",
        labels=["group", "kind", "tier", "state"],
    )
    moved = CounterMetricFamily(
        "tokenspeed:group_pages_moved",
        "Pages that rank 0 moved between device and host.",
        labels=["group", "kind", "operation"],
    )
    for group in groups:
        name = [str(group.group), group.kind]
        for state in ("active", "cached", "free"):
            pages.add_metric([*name, "device", state], getattr(group, state))
        for state in ("total", "free", "cached", "moving"):
            pages.add_metric([*name, "host", state], getattr(group, f"host_{state}"))
        moved.add_metric([*name, "write_back"], group.written_back)
        moved.add_metric([*name, "load_back"], group.loaded_back)
    yield pages
    yield moved


def _tiers(t: TierStats) -> Iterator[Metric]:
    states = {"total": t.host_pages, "free": t.host_free, "cached": t.host_cached, "moving": t.host_moving}
    yield _gauges("host_pages", "Pages of the host tier by state; moving ones are in a transfer.", "state", states)
    up = dict(zip(("loads", "saves"), map(int, t.store_up), strict=True))
    yield _gauges("kv_store_up", "1 while the KV store takes calls; 0 while it is bypassed.", "calls", up)
    hits = Counter(host=t.host_hit_tokens - t.storage_hit_tokens, storage=t.storage_hit_tokens)
    yield _labelled("tier_hit_tokens", "Prompt tokens that a tier below the device gave.", "tier", hits, ())
    operations = ("write_back", "load_back", "prefetch", "store")

    def by_operation(*values: int) -> Counter[str]:
        return Counter(dict(zip(operations, values, strict=True)))

    pages = by_operation(t.written_back, t.loaded_back, t.prefetched, t.stored)
    yield _labelled("tier_pages", "Pages moved between tiers.", "operation", pages, ())
    size = by_operation(t.written_back_bytes, t.loaded_back_bytes, t.prefetched_bytes, t.stored_bytes)
    yield _labelled("tier_bytes", "Bytes moved between tiers by rank 0.", "operation", size, ())
    failed = by_operation(t.write_backs_failed, t.load_backs_failed, t.prefetches_failed, t.stores_failed)
    yield _labelled("tier_pages_failed", "Pages that were to be moved and were not.", "operation", failed, ())
    yield _counter("host_evicted_pages", "Cached pages of the host tier given up for new ones.", t.host_evicted)
    yield _counter("host_full_pages", "Pages not written back because every host page was in use.", t.host_full)
    yield _counter(
        "kv_store_lookups", "Requests, and prefetches of sessions, for whose prefix the KV store was asked.", t.lookups
    )
    yield _counter("kv_store_lookup_hits", "Requests of whose prefix the KV store had enough to load.", t.lookup_hits)
    yield _counter("kv_store_prefetch_timeouts", "Requests that did not wait for the KV store.", t.prefetch_timeouts)
    yield _counter("reloads", "Requests whose pages did not come back from the host tier.", t.reloads)
    faults = Counter(error=t.store_errors, timeout=t.store_timeouts, bad_page=t.bad_pages, lost_page=t.lost_pages)
    yield _labelled("kv_store_failures", "What the KV store did wrong.", "reason", faults, ())
    yield _counter("kv_store_bypassed", "Calls spared a KV store that is down.", t.bypassed)
    yield _counter("kv_store_seconds", "Time spent in calls of the KV store.", t.store_seconds)
    yield _counter("kv_store_evicted_pages", "Pages that the KV store gave up for others.", t.store_evicted)


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tokenspeed:{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _answers(name: str, text: str, counts: Counter[tuple[str, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tokenspeed:{name}", text, labels=["path", "status"])
    for (path, status), count in sorted(counts.items()):
        family.add_metric([path, str(status)], count)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"tokenspeed:{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tokenspeed:{name}", text, value=value)


def _labelled(name: str, text: str, label: str, counts: Counter[str], known: tuple[str, ...]) -> CounterMetricFamily:
    """A counter by label; the known values are shown from the start, so that rates are right from the first event on."""
    family = CounterMetricFamily(f"tokenspeed:{name}", text, labels=[label])
    for value in sorted({*known, *counts}):
        family.add_metric([value], counts[value])
    return family


def render_metrics(metrics: ServerMetrics, client: EngineClient) -> bytes:
    """The Prometheus text format of everything."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(metrics, client))
    return bytes(generate_latest(registry))
