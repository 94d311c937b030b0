"""Sessions through the whole engine, with the toy model and a clock of the test's own: what is kept, for how long, and that tokens stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.errors import ConfigError
from tokenspeed.messages import EngineStats, SamplingParams, TokenOutput
from tokenspeed.weights.describe import describe_model

PAGE = 4
SECOND = 1_000_000
TURN = [(3 * i) % 250 for i in range(32)]
OTHERS = [[(7 * i + j + 1) % 250 for j in range(40)] for i in range(6)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)


class Sessions:
    """An engine of 24 pages whose clock stands still unless it is set."""

    def __init__(self, **settings: Any) -> None:
        self.now = SECOND
        common: dict[str, Any] = {
            "block_size": PAGE, "chunked_prefill_size": 32, "max_num_seqs": 4, "max_total_tokens": 96, "max_model_len": 96,
        }  # fmt: skip
        config = EngineConfig(**{"model": "toy", **common, **settings})
        assembly = assemble(config, describe_model("toy"), tool_call_parser=None, reasoning_parser=None)
        self.engine = LocalEngine(assembly, clock=lambda: self.now)

    def turn(self, prompt: Sequence[int], **session: int) -> tuple[list[int], TokenOutput]:
        """A request to its end, the tiers at rest afterwards: its tokens, and its last output."""
        rid = self.engine.add_request(prompt, GREEDY, **session)
        tokens: list[int] = []
        while True:
            for item in self.engine.step():
                assert item.rid == rid
                tokens += item.tokens
                if item.finish:
                    self.settle()
                    return tokens, item

    def pressure(self) -> list[list[int]]:
        """More prompts than the device has room for, none of them a session's."""
        return [self.turn(prompt)[0] for prompt in OTHERS]

    def settle(self) -> None:
        """Step until nothing is on its way."""
        tiers, end = self.engine._loop._tiers, time.monotonic() + 20
        while tiers is not None and tiers.busy:
            self.engine.step()
            assert time.monotonic() < end

    @property
    def stats(self) -> EngineStats:
        stats: EngineStats = self.engine.control("stats").result
        return stats

    @property
    def kept(self) -> tuple[int, int]:
        """Sessions, and pages kept for them, once the engine has looked at its clock."""
        self.engine.step()
        return self.stats.sessions, self.stats.retained_pages

    def cached(self, prompt: Sequence[int]) -> int:
        end = self.turn(prompt)[1]
        assert end.stats is not None
        return end.stats.cached_tokens


@pytest.fixture
def make() -> Iterator[Callable[..., Sessions]]:
    """Makes engines."""
    made: list[Sessions] = []

    def one(**settings: Any) -> Sessions:
        made.append(Sessions(**settings))
        return made[-1]

    yield one
    for each in made:
        each.engine.close()


OVERLAP = pytest.mark.parametrize("overlap", [False, True])


@OVERLAP
def test_pages_are_kept_under_pressure_until_the_deadline(make: Callable[..., Sessions], overlap: bool) -> None:
    """With the session its next turn finds all whole pages that the turn before computed; without, nothing. Tokens are the same."""
    settings = {"disable_overlap_schedule": not overlap}
    plain, kept = make(**settings), make(**settings)
    first = plain.turn(TURN)[0]
    assert kept.turn(TURN, session=5, retain_us=10 * SECOND)[0] == first
    turned = len(TURN) + len(first) - 1  # the last token was not computed
    assert kept.kept == (1, turned // PAGE)
    assert kept.pressure() == plain.pressure()
    kept.now += 9 * SECOND
    again = TURN + first + [1, 2, 3]
    (without, missed), (within, found) = plain.turn(again), kept.turn(again)
    assert within == without
    assert missed.stats is not None
    assert found.stats is not None
    assert (missed.stats.cached_tokens, found.stats.cached_tokens) == (0, turned // PAGE * PAGE)
    assert (missed.stats.hit_cut, found.stats.hit_cut) == ("evicted", "new")
    cuts = kept.stats.hits_cut
    assert sum(cuts.values()) == 2 + len(OTHERS)
    assert cuts["new"] == sum(cuts.values())


@OVERLAP
def test_pages_are_given_up_after_the_deadline(make: Callable[..., Sessions], overlap: bool) -> None:
    engine = make(disable_overlap_schedule=not overlap)
    engine.turn(TURN, session=5, retain_us=10 * SECOND)
    engine.now += 10 * SECOND
    assert engine.kept == (0, 0)
    engine.pressure()
    assert engine.cached(TURN) == 0


@OVERLAP
def test_a_release_that_follows_the_last_output_at_once_counts(make: Callable[..., Sessions], overlap: bool) -> None:
    """With overlap a step of the request is still in flight then, and its pages are kept only from that step's end on."""
    engine = make(disable_overlap_schedule=not overlap).engine
    rid = engine.add_request(TURN, SamplingParams(max_new_tokens=60, temperature=0.0), session=5, retain_us=10 * SECOND)
    tokens = [token for _ in range(8) for item in engine.step() for token in item.tokens]
    assert tokens
    engine.stop(rid)
    reply = engine.control("release_session", session=5)
    assert reply.ok
    assert reply.result >= len(TURN) // PAGE
    assert any(item.rid == rid and item.finish == "stop" for item in engine.step())
    stats = engine.control("stats").result
    assert (stats.sessions, stats.retained_pages) == (0, 0)


def test_what_is_not_known_is_answered_so(make: Callable[..., Sessions]) -> None:
    engine = make()
    engine.turn(TURN, session=5, retain_us=10 * SECOND)
    for method in ("prefetch_session", "release_session"):
        for number in (6, -1, 2**63):
            reply = engine.engine.control(method, session=number)
            assert not reply.ok
            assert "not known" in reply.result
    reply = engine.engine.control("prefetch_session", session=5)
    assert (reply.ok, reply.result) == (True, 0)  # all of it is on the device
    engine.now += 10 * SECOND
    assert not engine.engine.control("prefetch_session", session=5).ok
    assert not engine.engine.control("release_session", session=5).ok


def test_a_turn_that_asks_for_no_time_ends_what_was_kept(make: Callable[..., Sessions]) -> None:
    engine = make()
    engine.turn(TURN, session=5, retain_us=10 * SECOND)
    engine.turn(TURN, session=5)
    assert engine.kept == (0, 0)


def test_sessions_keep_no_more_than_their_share_and_the_first_to_end_gives_way(make: Callable[..., Sessions]) -> None:
    """Nobody holds the pool: 40 % of 24 pages is one session of nine."""
    engine = make(session_retain_percent=40)
    engine.turn(TURN, session=1, retain_us=20 * SECOND)
    assert engine.kept == (1, 9)
    engine.turn(OTHERS[0][:32], session=2, retain_us=10 * SECOND)
    assert engine.kept == (1, 9)
    assert not engine.engine.control("release_session", session=1).ok
    assert engine.engine.control("release_session", session=2).ok
    none = make(session_retain_percent=0)
    none.turn(TURN, session=1, retain_us=20 * SECOND)
    assert none.kept == (0, 0)


def test_with_a_host_tier_a_session_goes_there_and_comes_back_on_prefetch(make: Callable[..., Sessions]) -> None:
    """Under so much pressure that what is kept goes as well it is on the host, whatever the write policy: a prefetch brings it up before its turn."""
    plain, engine = make(), make(kvstore_ratio=6.0, kvstore_write_policy="write-on-evict")
    first = plain.turn(TURN)[0]
    assert engine.turn(TURN, session=5, retain_us=100 * SECOND)[0] == first
    wide = [[(11 * i + j + 9) % 250 for j in range(88)] for i in range(2)]  # as wide as the device
    assert [engine.turn(prompt)[0] for prompt in wide] == [plain.turn(prompt)[0] for prompt in wide]
    reply = engine.engine.control("prefetch_session", session=5)
    assert reply.ok
    assert reply.result > 0
    engine.settle()
    assert engine.stats.tiers is not None
    assert engine.stats.tiers.loaded_back == reply.result
    again = TURN + first + [1, 2, 3]
    (without, _), (within, found) = plain.turn(again), engine.turn(again)
    assert within == without
    assert found.stats is not None
    assert (found.stats.cached_tokens, found.stats.host_tokens) == ((len(TURN) + len(first) - 1) // PAGE * PAGE, 0)


WIDE = [[(11 * i + j + 9) % 250 for j in range(88)] for i in range(10)]  # each as wide as the device


def test_a_session_is_found_on_the_host_after_many_prompts_as_wide_as_the_device(make: Callable[..., Sessions]) -> None:
    """The host is as large as the device: without a rank there too, the first of them would have pushed the session out."""
    plain, engine = make(), make(kvstore_ratio=1.5)
    first = plain.turn(TURN)[0]
    assert engine.turn(TURN, session=5, retain_us=100 * SECOND)[0] == first
    assert [engine.turn(prompt)[0] for prompt in WIDE] == [plain.turn(prompt)[0] for prompt in WIDE]
    again = TURN + first + [1, 2, 3]
    (without, _), (within, found) = plain.turn(again), engine.turn(again)
    assert within == without
    assert found.stats is not None
    assert found.stats.cached_tokens == (len(TURN) + len(first) - 1) // PAGE * PAGE
    assert found.stats.host_tokens > 0


def test_a_prefetch_brings_from_the_store_what_the_host_has_lost(make: Callable[..., Sessions]) -> None:
    plain = make()
    store: dict[str, Any] = {"kvstore": "memory", "prefetch_threshold": PAGE, "kvstore_timeout_ms": 60_000.0}
    engine = make(kvstore_ratio=0.5, **store)
    first = plain.turn(TURN)[0]
    assert engine.turn(TURN, session=5, retain_us=100 * SECOND)[0] == first
    assert [engine.turn(prompt)[0] for prompt in WIDE[:3]] == [plain.turn(prompt)[0] for prompt in WIDE[:3]]
    reply = engine.engine.control("prefetch_session", session=5)
    assert reply.ok
    assert reply.result > 0
    engine.settle()
    assert engine.stats.tiers is not None
    assert engine.stats.tiers.prefetched > 0
    assert engine.engine.control("prefetch_session", session=5).result == 0
    again = TURN + first + [1, 2, 3]
    (without, _), (within, found) = plain.turn(again), engine.turn(again)
    assert within == without
    assert found.stats is not None
    assert (found.stats.cached_tokens, found.stats.host_tokens) == ((len(TURN) + len(first) - 1) // PAGE * PAGE, 0)


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"session": -1, "retain_us": 5}, "retain_s"),
        ({"session": 5, "retain_us": 90_000 * SECOND}, "retain_s"),
        ({"session": 5, "retain_us": 1 << 63}, "retain_s"),
        ({"session": 5, "retain_us": -1}, "retain_s"),
        ({"session": 1 << 63, "retain_us": 5}, "session_id"),
        ({"session": -2, "retain_us": 5}, "session_id"),
    ],
)
def test_numbers_that_no_session_has_end_the_request_and_not_the_engine(
    make: Callable[..., Sessions], session: dict[str, int], param: str
) -> None:
    engine = make()
    _, end = engine.turn(TURN, **session)
    assert (end.finish, end.param) == ("error", param)
    assert engine.turn(TURN)[1].finish == "length"


@pytest.mark.parametrize("percent", [-1, 101])
def test_a_share_that_is_none_is_refused(make: Callable[..., Sessions], percent: int) -> None:
    with pytest.raises(ConfigError, match=rf"--session-retain-percent {percent}: it must lie in 0\.\.100"):
        make(session_retain_percent=percent)
