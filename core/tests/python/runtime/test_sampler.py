"""The vectorised sampler draws what its definition draws, row by row, whatever the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tokenspeed.messages import SamplingParams
from tokenspeed.runtime.plan import SlotRequest
from tokenspeed.runtime.reference_sampler import reference_sample
from tokenspeed.runtime.sampler import Sampler
from tokenspeed.runtime.slot_sampling import SlotSampling

VOCAB = 700  # larger than the head, so that tails exist
END = (3, 5)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(logits).any(dim=-1), -1, logits.argmax(dim=-1))


def sampler(requests: list[SlotRequest], vocab: int = VOCAB) -> Sampler:
    state = SlotSampling(max_slots=len(requests), vocab_size=vocab, device=torch.device("cpu"))
    for request in requests:
        state.load(request)
    return Sampler(state, argmax)


def request(slot: int, *, seed: int = 0, prompt=(), output=(), **params) -> SlotRequest:
    def pack(ids):
        return np.array(ids, dtype="<i4").tobytes()

    return SlotRequest(slot, SamplingParams(64, **params), seed, END, pack(prompt), pack(output))


def sample(machine: Sampler, logits: torch.Tensor, slots, positions) -> list[int]:
    result = machine.sample(logits.clone(), np.array(slots, dtype=np.int32), np.array(positions, dtype=np.int32))
    assert result.tokens.shape == (len(slots), 1)
    return result.tokens[:, 0].tolist()


CASES = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for t, k, p, m in itertools.product(
        (0.3, 1.0, 1.8), (0, 1, 40, 300, 5000), (1.0, 0.9, 0.05, 0.999), (0.0, 0.1, 1e-6)
    )
]


@pytest.mark.parametrize("spread", [0.2, 1.5, 6.0])
@pytest.mark.parametrize("vocab", [50, VOCAB, 3000])
def test_every_combination_of_filters_draws_what_the_definition_draws(spread, vocab):
    logits = torch.randn(len(CASES), vocab, generator=torch.Generator().manual_seed(1)) * spread
    requests = [request(i, seed=1000 + i * 7919 - 2**40, **case) for i, case in enumerate(CASES)]
    machine = sampler(requests, vocab)
    drawn = sample(machine, logits, range(len(CASES)), [i % 9 for i in range(len(CASES))])
    for i, r in enumerate(requests):
        expected = reference_sample(logits[i].tolist(), r.params, seed=r.seed, output=[0] * (i % 9))
        assert drawn[i] == expected, r.params


def test_penalties_bias_and_minimum_length_agree_with_the_definition():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(24, VOCAB, generator=generator) * 3
    requests, histories = [], []
    for i in range(24):
        prompt = torch.randint(0, VOCAB, (50,), generator=generator).tolist()
        output = torch.randint(0, VOCAB, (i % 5,), generator=generator).tolist() * 2
        histories.append((prompt, output))
        requests.append(
            request(
                i,
                seed=i,
                prompt=prompt,
                output=output,
                temperature=0.0 if i % 3 == 0 else 0.8,
                presence_penalty=0.5 * (i % 2),
                frequency_penalty=-0.7 * (i % 4),
                repetition_penalty=1.0 + 0.3 * (i % 3),
                logit_bias=((9, 4.0), (10, -100.0)) if i % 2 else (),
                min_tokens=6 if i % 4 == 0 else 0,
            )
        )
    drawn = sample(sampler(requests), logits, range(24), [len(o) for _, o in histories])
    for i, (r, (prompt, output)) in enumerate(zip(requests, histories, strict=True)):
        assert drawn[i] == reference_sample(
            logits[i].tolist(), r.params, seed=r.seed, prompt=prompt, output=output, end_ids=END
        ), i


def test_generated_tokens_are_counted_as_they_are_drawn():
    """A frequency penalty larger than any gap walks down the ranking, one token a step; a reload from the output so far changes nothing."""
    logits = torch.arange(VOCAB, 0, -1.0)[None].repeat(2, 1)
    requests = [request(0, temperature=0.0, frequency_penalty=10000.0), request(1, temperature=0.0)]
    machine = sampler(requests)
    seen = [sample(machine, logits, [0, 1], [i, i]) for i in range(4)]
    assert seen == [[0, 0], [1, 0], [2, 0], [3, 0]]
    again = sampler([request(0, temperature=0.0, frequency_penalty=10000.0, output=[0, 1, 2]), requests[1]])
    assert sample(again, logits, [0, 1], [3, 3]) == [3, 0]


def test_the_same_seed_gives_the_same_token_in_any_batch_and_slot():
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:] = logits[0]
    machine = sampler([request(i, seed=42 if i in (1, 4) else i, temperature=1.0) for i in range(6)])
    together = sample(machine, logits, range(6), [17] * 6)
    alone = sample(machine, logits[:1], [4], [17])
    assert together[1] == together[4] == alone[0]
    assert len(set(together)) > 2


def test_draws_follow_the_distribution_in_head_and_tail():
    """20,000 draws from 600 equally likely tokens and one of weight 1/4: shares of head, tail and that token."""
    draws, vocab = 20_000, 601
    row = torch.zeros(vocab)
    row[7] = float(np.log(200.0))
    machine = sampler([request(0, seed=5, temperature=1.0)], vocab)
    logits = row.repeat(1000, 1)
    slots, tokens = [0] * 1000, []
    for start in range(0, draws, 1000):
        tokens += sample(machine, logits, slots, range(start, start + 1000))
    counts = np.bincount(tokens, minlength=vocab)
    assert abs(counts[7] / draws - 0.25) < 0.015
    rest = np.delete(counts, 7)
    assert (rest > 0).all()
    expected = draws * 0.75 / 600
    chi2 = ((rest - expected) ** 2 / expected).sum()
    assert abs(chi2 - 599) < 5 * np.sqrt(2 * 599)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("logprobs", [-1, 0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_bad_logits_is_marked_and_touches_no_other_row(poison, logprobs, temperature):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    machine = sampler([request(i, seed=i, temperature=temperature, logprobs=logprobs) for i in range(3)])
    good = sample(machine, logits, [0, 1, 2], [2, 2, 2])
    logits[1, 600] = poison
    result = machine.sample(logits, np.arange(3, dtype=np.int32), np.full(3, 2, dtype=np.int32))
    assert result.bad.tolist() == [False, True, False]
    assert result.tokens[:, 0].tolist() == [good[0], -1, good[2]]
    if logprobs >= 0:
        assert np.isfinite(result.logprobs.chosen).all()
        assert np.isfinite(result.logprobs.top).all()


def test_logprobs_are_those_of_the_model_before_any_change():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    requests = [
        request(0, temperature=0.0, logprobs=2, logit_bias=((9, 50.0),)),
        request(1, temperature=0.0),
        request(2, temperature=0.0, logprobs=0),
    ]
    result = sampler(requests).sample(logits.clone(), np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.int32))
    expected = torch.log_softmax(logits, dim=-1)
    assert result.logprob_rows.tolist() == [0, 2]
    assert result.top.tolist() == [2, 0]
    assert result.tokens[0, 0] == 9
    assert result.logprobs.chosen[0] == pytest.approx(float(expected[0, 9]), abs=1e-5)
    assert result.logprobs.rank[0] == 1 + int((expected[0] > expected[0, 9]).sum())
    assert result.logprobs.top_ids[0].tolist() == logits[0].topk(2).indices.tolist()
    assert result.logprobs.rank[1] == 1
