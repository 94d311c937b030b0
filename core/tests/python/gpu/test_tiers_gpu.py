"""On an accelerator a prompt whose pages have left the device finds them on the host or in a store, and says what the CPU reference says.

Needs the plugins hardware-cuda, kernels-triton, attention-triton and models-llama; the store's case kvstore-file too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.messages import SamplingParams, TierStats
from tokenspeed.weights.describe import describe_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
Make = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def model(random_llama: Any) -> str:
    path: str = random_llama.path
    return path


@pytest.fixture(scope="module")
def prompts(random_llama: Any) -> list[list[int]]:
    """Six of nine to eleven pages, the first two with five in common."""
    rng = np.random.default_rng(5)
    made = [rng.integers(0, random_llama.vocab, 590 + 20 * i).tolist() for i in range(6)]
    made[1][:320] = made[0][:320]
    return made


def make(model: str, **settings: Any) -> LocalEngine:
    common = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_total_tokens": 1600,
        "chunked_prefill_size": 256,
        "block_size": 64,
    }
    return LocalEngine(assemble(EngineConfig(model=model, **common | settings), describe_model(model, "auto")))


def generated(made: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [[token for part in parts for token in part.tokens] for parts in made.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def reference(model: str, prompts: list[list[int]], few_threads: int) -> list[list[int]]:
    made = make(model, device="cpu", plugins="models-llama", num_threads=few_threads, max_total_tokens=16384)
    return generated(made, prompts)


@pytest.fixture
def engine(model: str) -> Iterator[Make]:
    """Engines whose device pool holds two prompts of six."""
    made: list[LocalEngine] = []

    def start(**settings: Any) -> LocalEngine:
        made.append(make(model, **settings))
        return made[-1]

    yield start
    for each in made:
        each.close()


def tiers(made: LocalEngine) -> TierStats:
    stats: TierStats = made.control("stats").result.tiers
    return stats


def settle(made: LocalEngine) -> None:
    """Steps until nothing is on its way between the tiers."""
    end = time.monotonic() + 60
    while tiers(made).host_moving or made._loop._tiers.busy:
        made.step()
        assert time.monotonic() < end


def one_by_one(made: LocalEngine, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokens of each prompt, and how many of its own came from the host and from the store."""
    tokens, host, store = [], [], []
    for prompt in prompts:
        outputs = made.generate([prompt], GREEDY)[0]
        stats = outputs[-1].stats
        assert stats is not None
        tokens.append([token for output in outputs for token in output.tokens])
        host.append(stats.host_tokens)
        store.append(stats.storage_tokens)
        settle(made)
    return tokens, host, store


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"disable_overlap_schedule": True}], ids=str)
@pytest.mark.parametrize("policy", ["write-through", "write-on-evict"])
def test_pages_that_left_the_device_come_back_from_the_host(
    engine: Make, prompts: list[list[int]], reference: list[list[int]], policy: str, settings: dict[str, Any]
) -> None:
    made = engine(kvstore_ratio=6.0, kvstore_write_policy=policy, **settings)
    assert one_by_one(made, prompts)[0] == reference
    tokens, host, _ = one_by_one(made, prompts)
    assert tokens == reference
    assert all(count >= 256 for count in host[:4]), host


def test_prompts_at_once_with_retraction_and_loads_beside_decodes(
    engine: Make, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    made = engine(kvstore_ratio=6.0)
    for _ in range(3):
        assert generated(made, prompts) == reference
    assert tiers(made).loaded_back > 0


def test_the_first_prompts_after_a_restart_come_from_the_store(
    engine: Make, prompts: list[list[int]], reference: list[list[int]], tmp_path: Any
) -> None:
    store = {"kvstore": "file", "kvstore_ratio": 2.0, "plugin_options": {"kvstore-file.directory": str(tmp_path)}}
    first = engine(prefetch_threshold=64, **store)
    assert one_by_one(first, prompts)[0] == reference
    first.close()
    tokens, _, stored = one_by_one(engine(prefetch_threshold=64, **store), prompts)
    assert tokens == reference
    assert all(count >= 256 for count in stored), stored
