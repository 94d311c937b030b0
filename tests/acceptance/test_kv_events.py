"""What a router knows of the cache: a subscriber that loses messages follows an engine through evictions and clears, and ends with the engine's tree."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tokenspeed import SamplingParams
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ConfigError
from tokenspeed.messages import TokenOutput
from tokenspeed.testing.kv_events import KVEventSubscriber, PrefixMirror
from tokenspeed.weights.describe import describe_model

PAGE, POOL = 16, 640  # tokens


class LossySubscriber(KVEventSubscriber):
    """Loses each third message."""

    received = 0

    def _receive(self) -> tuple[int, bytes] | None:
        message = super()._receive()
        self.received += 1
        return None if self.received % 3 == 0 else message


def engine_with_events(events: dict[str, object], **settings: object) -> LocalEngine:
    config = EngineConfig(
        model="toy",
        plugins="none",
        num_threads=1,
        block_size=PAGE,
        max_total_tokens=POOL,
        max_model_len=256,
        kv_events_config=json.dumps(events),
        **settings,
    )
    return LocalEngine(assemble(config, describe_model("toy")))


def serve(engine: LocalEngine, prompt: list[int]) -> TokenOutput:
    """The last output of ``prompt``; one token is generated."""
    rid = engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0.0))
    while True:
        for output in engine.step():
            if output.rid == rid and output.finish is not None:
                return output


def test_a_lossy_subscriber_ends_with_the_tree_of_the_engine(tmp_path: Path) -> None:
    """Issue 5, acceptance 6. The pool holds a tenth of what is asked, so most pages are evicted; the cache is flushed in between."""
    rng = random.Random(5)
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}  # fmt: skip
    engine = engine_with_events(events)
    scheduler = engine._loop._scheduler
    families = [[rng.randrange(200) for _ in range(128)] for _ in range(8)]
    prompts = [family[: rng.randrange(1, 128)] + [rng.randrange(200) for _ in range(rng.randrange(1, 90))] for family in families * 12]  # fmt: skip
    mirror = PrefixMirror()
    with LossySubscriber(str(events["endpoint"]), str(events["replay_endpoint"])) as subscriber:
        for number, prompt in enumerate(prompts):
            serve(engine, prompt)
            mirror.apply(subscriber.poll(0.01))
            if number == 40:
                engine.control("flush_cache")
                engine.step()
                mirror.apply(subscriber.catch_up())
        assert scheduler.stats().evicted_pages > 100
        cached = scheduler.stats().pages_cached[0]
        for _ in range(1000):  # however far the publisher's thread is
            mirror.apply(subscriber.catch_up())
            if len(mirror.tier()) == cached:
                break
        assert subscriber.replayed > 0
    assert len(mirror.tier()) == cached > 20
    chains = [[bytes(key) for key in scheduler.calc_rolling_hash(prompt)] for prompt in prompts]
    assert set(mirror.tier()) <= {key for chain in chains for key in chain}
    for prompt, chain in zip(prompts, chains, strict=True):
        for depth, key in enumerate(chain):
            if key in mirror.tier():
                page = mirror.tier()[key]
                assert page.tokens == tuple(prompt[depth * PAGE : (depth + 1) * PAGE])
                assert page.parent == (chain[depth - 1] if depth else None)
    # The last of them is still there as far as the mirror says; the engine finds as much, less the token that is always computed.
    found = serve(engine, [*prompts[-1], 1])
    assert found.stats is not None
    assert found.stats.cached_tokens == PAGE * mirror.match(chains[-1])
    engine.close()


def test_pages_of_the_host_tier_are_told_as_such(tmp_path: Path) -> None:
    """Copies to the host are told when they have arrived, without tokens, and go with their eviction there."""
    rng = random.Random(6)
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}  # fmt: skip
    engine = engine_with_events(events, kvstore_ratio=1.5)
    scheduler = engine._loop._scheduler
    mirror = PrefixMirror()
    for _ in range(30):
        serve(engine, [rng.randrange(200) for _ in range(rng.randrange(20, 120))])
    for _ in range(2000):  # until no copy is under way
        engine.step()
        if not scheduler.cache_ops_in_flight and not scheduler.cache_ops_pending:
            break
    stats = scheduler.stats()
    assert stats.host_evicted_pages > 0
    expected = {"GPU": stats.pages_cached[0], "CPU": stats.host_pages_cached[0]}
    with KVEventSubscriber(str(events["endpoint"]), str(events["replay_endpoint"])) as subscriber:
        for _ in range(1000):
            mirror.apply(subscriber.catch_up())
            if {medium: len(mirror.tier(medium)) for medium in expected} == expected:
                break
    assert {medium: len(mirror.tier(medium)) for medium in expected} == expected
    assert all(page.tokens == () for page in mirror.tier("CPU").values())
    engine.close()


def test_events_need_a_prefix_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config asks for events of the prefix cache"):
        engine_with_events({"enable_kv_cache_events": True}, enable_prefix_caching=False)


def test_events_that_are_off_open_no_socket(tmp_path: Path) -> None:
    """Not even one that could not be opened."""
    engine = engine_with_events({"endpoint": f"ipc://{tmp_path}/no/such/folder/pub"})
    assert serve(engine, [1, 2, 3]).finish == "length"
    engine.close()
