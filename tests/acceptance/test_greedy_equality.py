"""Greedy tokens equal those of transformers on every way through the engine: alone, together, in small chunks, over a warm prefix, through retractions,
overlapped, from GGUF and from safetensors, on one rank and on two.

The fast tests run a few short prompts; ``-m slow`` runs 50 prompts of 5 to 900 tokens, 64 new tokens each (acceptance 2 of the foundation).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.engine.assembly import Assembly, assemble
from tokenspeed.engine.launch import launch
from tokenspeed.engine.local import LocalEngine
from tokenspeed.messages import (
    ControlRequest,
    EngineReady,
    GenerateRequest,
    SamplingParams,
    TokenOutput,
    decode_from_engine,
    encode,
)
from tokenspeed.weights.describe import describe_model

from .greedy_oracle import Oracle, english_prompts, packaged_gguf, write_sharded_checkpoint


@dataclass(frozen=True)
class Extent:
    """How much is compared; ``pool`` is a KV pool in tokens that is too small for all requests at once."""

    prompts: int
    longest: int
    new_tokens: int
    pool: int


FAST = Extent(prompts=8, longest=120, new_tokens=12, pool=512)
BRIEF = Extent(prompts=3, longest=40, new_tokens=6, pool=512)
FULL = Extent(prompts=50, longest=900, new_tokens=64, pool=2048)
_FULL = pytest.param(FULL, id="full", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
EXTENTS = pytest.mark.parametrize("extent", [pytest.param(FAST, id="fast"), _FULL])
#: Collectives over sockets make ranks on one small machine slow.
RANKS_EXTENTS = pytest.mark.parametrize("extent", [pytest.param(BRIEF, id="fast"), _FULL])


@pytest.fixture(scope="module")
def gguf() -> Path:
    return packaged_gguf()


@pytest.fixture(scope="module")
def oracle(gguf: Path) -> Iterator[Oracle]:
    threads = torch.get_num_threads()
    yield Oracle.load(gguf)
    torch.set_num_threads(threads)
    gc.collect()


@pytest.fixture(scope="module")
def safetensors(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    write_sharded_checkpoint(oracle, folder)
    return folder


def assembly(model: Path, *, size: int = 1, **settings: Any) -> Assembly:
    settings = {
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_model_len": 1024,
        "disable_overlap_schedule": True,
        **settings,
    }
    parallel = ParallelConfig(tensor_parallel_size=size, world_size=size)
    config = EngineConfig(model=str(model), parallel=parallel, **settings)
    return assemble(config, describe_model(str(model)))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(count, temperature=0.0, ignore_eos=True)


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    assert outputs[-1].finish == "length", outputs[-1].error
    return [token for item in outputs for token in item.tokens]


def together(engine: LocalEngine, prompts: Sequence[Sequence[int]], extent: Extent) -> list[list[int]]:
    return [tokens_of(outputs) for outputs in engine.generate(prompts, greedy(extent.new_tokens))]


def one_at_a_time(engine: LocalEngine, prompts: Sequence[Sequence[int]], extent: Extent) -> list[list[int]]:
    return [together(engine, [prompt], extent)[0] for prompt in prompts]


def over_a_warm_prefix(engine: LocalEngine, prompts: Sequence[Sequence[int]], extent: Extent) -> list[list[int]]:
    """The second time around, every full page of a prompt is in the cache."""
    together(engine, prompts, extent)
    warm = engine.generate(prompts, greedy(extent.new_tokens))
    page = engine.info.page_size
    for prompt, outputs in zip(prompts, warm, strict=True):
        assert outputs[0].cached_tokens == (len(prompt) - 1) // page * page
    return [tokens_of(outputs) for outputs in warm]


def through_retractions(engine: LocalEngine, prompts: Sequence[Sequence[int]], extent: Extent) -> list[list[int]]:
    """Short answers teach admission to expect short ones, so that it lets in more than the pool can hold."""
    for i in range(20):
        engine.generate([[1000 + i]], greedy(1))
    tokens = together(engine, prompts, extent)
    assert engine.control("stats").result.retractions > 0
    return tokens


Way = Callable[[LocalEngine, Sequence[Sequence[int]], Extent], list[list[int]]]

WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "one at a time": (one_at_a_time, {}),
    "together": (together, {}),
    "overlapped": (together, {"disable_overlap_schedule": False}),
    "chunks of 16": (together, {"chunked_prefill_size": 16}),
    "chunks of 16, overlapped": (together, {"chunked_prefill_size": 16, "disable_overlap_schedule": False}),
    "warm prefix": (over_a_warm_prefix, {}),
    "retractions": (through_retractions, {"max_total_tokens": -1}),
    "retractions, overlapped": (through_retractions, {"max_total_tokens": -1, "disable_overlap_schedule": False}),
    "no prefix cache": (together, {"enable_prefix_caching": False}),
    "builtin kernels": (together, {"plugins": "models-llama"}),
}


def compare(oracle: Oracle, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], extent: Extent) -> None:
    assert [len(answer) for answer in answers] == [extent.new_tokens] * len(prompts)
    differences = [oracle.first_difference(*pair) for pair in zip(prompts, answers, strict=True)]
    assert not any(differences), "\n".join(filter(None, differences))


@EXTENTS
@pytest.mark.parametrize("way", WAYS)
def test_gguf_on_every_way_through_the_scheduler(oracle: Oracle, gguf: Path, extent: Extent, way: str) -> None:
    run, settings = WAYS[way]
    if settings.get("max_total_tokens"):
        settings = {**settings, "max_total_tokens": extent.pool}
    prompts = english_prompts(oracle.tokenizer, extent.prompts, 5, extent.longest)
    engine = LocalEngine(assembly(gguf, **settings))
    compare(oracle, prompts, run(engine, prompts, extent), extent)


@EXTENTS
def test_safetensors(oracle: Oracle, safetensors: Path, extent: Extent) -> None:
    prompts = english_prompts(oracle.tokenizer, extent.prompts, 5, extent.longest)
    compare(oracle, prompts, together(LocalEngine(assembly(safetensors)), prompts, extent), extent)


@RANKS_EXTENTS
@pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
def test_two_tensor_parallel_ranks(oracle: Oracle, gguf: Path, extent: Extent, overlap: bool) -> None:
    prompts = english_prompts(oracle.tokenizer, extent.prompts, 5, extent.longest)
    ranks = assembly(gguf, size=2, disable_overlap_schedule=not overlap, max_total_tokens=32_768)
    compare(oracle, prompts, over_sockets(ranks, prompts, extent), extent)


def over_sockets(ranks: Assembly, prompts: Sequence[Sequence[int]], extent: Extent) -> list[list[int]]:
    """Run the engine in processes of its own and talk to it as the server does."""
    with launch(ranks) as handle, zmq.Context() as context:
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.connect(handle.to_engine)
        pull.connect(handle.from_engine)
        assert pull.poll(120_000), handle.poll()
        ready = decode_from_engine(pull.recv())
        assert isinstance(ready, EngineReady), ready
        for rid, prompt in enumerate(prompts):
            tokens = np.array(prompt, dtype="<i4").tobytes()
            push.send(encode(GenerateRequest(rid, tokens, greedy(extent.new_tokens), 0.0)))
        outputs: list[list[TokenOutput]] = [[] for _ in prompts]
        while not all(items and items[-1].finish for items in outputs):
            assert pull.poll(300_000), handle.poll()
            for item in decode_from_engine(pull.recv()).items:
                outputs[item.rid].append(item)
        push.send(encode(ControlRequest(1, "shutdown")))
        assert handle.wait(60)
        context.destroy(0)
    return [tokens_of(items) for items in outputs]


@EXTENTS
@pytest.mark.parametrize("chunk", [16, 256])
def test_log_probabilities_of_prompts_and_tokens(oracle: Oracle, gguf: Path, extent: Extent, chunk: int) -> None:
    prompts = english_prompts(oracle.tokenizer, extent.prompts, 5, extent.longest)
    params = SamplingParams(4, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    answers = LocalEngine(assembly(gguf, chunked_prefill_size=chunk)).generate(prompts, params)
    for prompt, outputs in zip(prompts, answers, strict=True):
        tokens = tokens_of(outputs)
        expected = oracle.logprobs([*prompt, *tokens])
        first, *rest = outputs[0].prompt_logprobs or []
        assert first is None
        assert len(rest) == len(prompt) - 1
        of_output = [entry for item in outputs for entry in item.logprobs or []]
        assert len(of_output) == len(tokens)
        for i, (token, entry) in enumerate(zip([*prompt[1:], *tokens], [*rest, *of_output], strict=True)):
            assert entry is not None
            row = expected[i]
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert entry.top_logprobs == pytest.approx(row.topk(len(entry.top_ids)).values.tolist(), abs=1e-3)
            larger, close = int((row > row[token] + 1e-3).sum()), int((row > row[token] - 1e-3).sum())
            assert larger < entry.rank <= close
