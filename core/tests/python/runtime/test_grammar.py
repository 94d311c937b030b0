"""Where a request stands in its grammar: marks of reasoning, ends, tokens taken back, several tokens a step."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import re
import threading
import time
import types

import msgspec
import numpy as np
import pytest
import torch

from tokenspeed.builtin.kernels.sampling import apply_bitmask, argmax
from tokenspeed.interfaces.grammar import GrammarContext, GrammarRequest, mask_words
from tokenspeed.messages import SamplingParams
from tokenspeed.runtime.grammar import GrammarStore, SlotGrammars
from tokenspeed.runtime.grammar_state import GrammarState
from tokenspeed.runtime.plan import SlotGrammar, SlotRequest
from tokenspeed.runtime.sampler import Sampler
from tokenspeed.runtime.slot_sampling import SlotSampling
from tokenspeed.testing.tiny_grammar import TinyGrammarBackend

VOCAB, STOP = 300, 256
CONTEXT = GrammarContext(
    vocabulary=[*(bytes((byte,)) for byte in range(256)), b""], vocab_size=VOCAB, stop_token_ids=(STOP,)
)
BACKEND = TinyGrammarBackend(CONTEXT)


def compiled(regex: str):
    return BACKEND.compile(GrammarRequest(kind="regex", value=regex))


def state(regex: str, **more) -> GrammarState:
    return GrammarState(compiled(regex), **{"end_ids": (STOP,), "stop_ids": (STOP,), **more})


def allowed(one: GrammarState) -> set[int]:
    mask = np.zeros((1, mask_words(VOCAB)), dtype=np.int32)
    one.fill(mask, 0)
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB]).tolist())


EVERYTHING = set(range(VOCAB))


@pytest.mark.parametrize("marker", [(7,), (1, 1, 2), (1, 2, 1, 2, 3), (5, 5, 5), (1, 2, 3, 1, 2, 4)])
def test_reasoning_ends_where_the_marker_first_stands_whole(marker):
    """Against plain search in random ids of a small alphabet, in which beginnings of the marker overlap."""
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.choice([*marker, 1, 2]) for _ in range(30)]
        found = next(
            (at for at in range(30) if tuple(ids[at + 1 - len(marker) : at + 1]) == marker and at + 1 >= len(marker)),
            None,
        )
        one = state("x*", reasoning_end=marker)
        for at, token in enumerate(ids):
            assert one.begun == (found is not None and at > found)
            if one.begun:
                assert allowed(one) == {ord("x"), STOP}
                break
            assert allowed(one) == EVERYTHING
            one.take(token)
        assert not one.fault


def test_an_end_token_in_the_reasoning_ends_the_request():
    one = state("x", reasoning_end=(1, 2))
    one.take(1)
    one.take(STOP)
    assert one.ended
    assert allowed(one) == EVERYTHING


def test_least_lengths_ignored_ends_and_ends_of_the_request_yield_to_a_grammar_that_is_complete():
    one = state("ab?", min_tokens=5, ignored_ids=(STOP,), end_ids=(STOP, 290))
    assert allowed(one) == {ord("a")}
    one.take(ord("a"))
    assert allowed(one) == {ord("b")}
    one.take(ord("b"))
    assert allowed(one) == {STOP, 290}
    late = state("ab?", ignored_ids=(STOP,), end_ids=(STOP, 290))
    late.take(ord("a"))
    assert allowed(late) == {ord("b"), 290}


def test_an_end_of_the_request_that_is_text_of_the_grammar_stands_where_both_allow_it():
    one = state("[ab]+c", end_ids=(STOP, ord("b")))
    assert allowed(one) == {ord("a")}  # b would end what is not complete
    only = state("bc", end_ids=(STOP, ord("b")))
    assert allowed(only) == {ord("b")}  # nothing else could be said


def test_a_token_that_the_grammar_does_not_allow_is_a_fault_that_can_be_taken_back():
    one = state("ab")
    one.take(ord("x"))
    assert "token 120" in one.fault
    one.undo(1)
    assert not one.fault
    assert allowed(one) == {ord("a")}


def test_tokens_are_taken_back_across_the_end_and_the_marker():
    rng = random.Random(5)
    ids = [9, 1, 1, 2, *b"abab", STOP, 4, 4]
    one, seen = state("(ab)*", reasoning_end=(1, 2)), []
    for token in ids:
        seen.append((allowed(one), one.begun, one.ended))
        one.take(token)
    at = len(ids)
    for _ in range(100):
        back = rng.randint(0, at)
        one.undo(back)
        at -= back
        if at < len(ids):
            assert (allowed(one), one.begun, one.ended) == seen[at]
        forward = rng.randint(0, len(ids) - at)
        for token in ids[at : at + forward]:
            one.take(token)
        at += forward
        assert one.length == at


def slots(count: int) -> SlotGrammars:
    return SlotGrammars(GrammarStore(BACKEND), max_slots=count, vocab_size=VOCAB, stop_ids=(STOP,))


def slot_request(slot: int, regex: str | None, *, number: int = 0, output=(), reasoning_end=()) -> SlotRequest:
    data = None if regex is None else BACKEND.serialize(compiled(regex))
    grammar = None if data is None else SlotGrammar(data[:40], data, tuple(reasoning_end))
    packed = np.array(list(output), dtype="<i4").tobytes()
    return SlotRequest(slot, SamplingParams(64), 0, (STOP,), b"", packed, number, grammar)


class Now:
    """Tokens that are there."""

    def __init__(self, values) -> None:
        self.values = np.array(values, dtype=np.int64)
        self.waits = 0

    def wait(self):
        self.waits += 1
        return self.values


def ids_of(bits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_tokens_are_waited_for_when_the_next_mask_is_made_and_not_before():
    machine = slots(2)
    machine.load(slot_request(1, "abc"))
    one = np.array([1], dtype=np.int32)
    drawn = Now([[ord("a")]])
    machine.drawn(one, drawn)
    assert drawn.waits == 0
    assert ids_of(machine.masks(one).bits[0]) == {ord("b")}


def test_a_request_that_changes_slots_keeps_its_matcher_and_takes_nothing_twice(monkeypatch):
    machine = slots(3)
    machine.load(slot_request(0, "abcd", number=5))
    machine.drawn(np.array([0], dtype=np.int32), Now([[ord("a")]]))
    machine.load(slot_request(0, None, number=6))
    replays = []
    monkeypatch.setattr(GrammarState, "__init__", lambda *_, **__: replays.append(1))
    machine.load(slot_request(2, "abcd", number=5, output=b"a"))
    assert not replays
    monkeypatch.undo()
    assert ids_of(machine.masks(np.array([2], dtype=np.int32)).bits[0]) == {ord("b")}
    # A token of a step in flight was lost with the slot: the output is what counts.
    machine.drawn(np.array([2], dtype=np.int32), Now([[ord("b")]]))
    machine.load(slot_request(1, "abcd", number=5, output=b"a"))
    assert ids_of(machine.masks(np.array([1], dtype=np.int32)).bits[0]) == {ord("b")}


def test_a_grammar_that_cannot_be_read_is_a_fault_of_its_row():
    machine = slots(2)
    broken = msgspec.structs.replace(slot_request(0, "a"), grammar=SlotGrammar(b"k", b"no json"))
    machine.load(broken)
    machine.load(slot_request(1, "a"))
    masks = machine.masks(np.array([0, 1], dtype=np.int32))
    assert list(masks.faults) == [0]
    assert "cannot be used" in masks.faults[0]
    assert ids_of(masks.bits[1]) == {ord("a")}


def test_compiled_grammars_are_shared_and_kept_within_a_bound():
    store = GrammarStore(BACKEND, max_bytes=60)
    data = {text: BACKEND.serialize(compiled(text)) for text in ("a", "b", "c", "d")}
    first = store.get(b"a", data["a"])
    assert store.get(b"a", data["a"]) is first
    for text in "bcd":
        store.get(text.encode(), data[text])
    assert len(store) == 60 // len(data["a"])
    assert store.get(b"a", data["a"]) is not first


class _Sized:
    """A backend whose grammars are much larger in memory than in transit; counts what is read."""

    def __init__(self, nbytes: int = 0, wait: threading.Event | None = None) -> None:
        self.nbytes, self._wait, self.reads = nbytes, wait, 0

    def deserialize(self, data: bytes):
        self.reads += 1
        if data == b"slow" and self._wait is not None:
            assert self._wait.wait(20)
        if data == b"bad":
            raise ValueError("no grammar")
        return types.SimpleNamespace(nbytes=self.nbytes)


def test_the_bound_on_kept_grammars_counts_their_memory_and_their_number():
    store = GrammarStore(_Sized(1 << 20), max_bytes=4 << 20)
    for key in range(12):
        store.get(bytes((key,)), b"x")
    assert len(store) == 4
    many = GrammarStore(_Sized(), max_grammars=5)
    for key in range(12):
        many.get(bytes((key,)), b"x")
    assert len(many) == 5


def test_what_reads_one_grammar_does_not_wait_for_another_and_a_grammar_is_read_once():
    go = threading.Event()
    backend = _Sized(wait=go)
    store = GrammarStore(backend)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(store.get, b"k", b"slow") for _ in range(2)]
        while not backend.reads:
            time.sleep(0.001)
        store.get(b"other", b"quick")  # before ``go``: behind one lock this would wait for ever
        go.set()
        assert slow[0].result(20) is slow[1].result(20)
    assert backend.reads == 2


def test_a_slot_is_taken_over_while_its_grammar_is_still_read(monkeypatch):
    """A rank that has not got the grammar reads it beside the forward passes over the prompt; the first mask waits."""
    go, whole = threading.Event(), BACKEND.deserialize

    def slow(data):
        assert go.wait(20)
        return whole(data)

    backend = TinyGrammarBackend(CONTEXT)
    monkeypatch.setattr(backend, "deserialize", slow)
    machine = SlotGrammars(GrammarStore(backend), max_slots=2, vocab_size=VOCAB, stop_ids=(STOP,))
    machine.load(slot_request(0, "abc", number=1))
    machine.load(slot_request(0, "xyz", number=2))  # the first one was aborted
    machine.load(slot_request(1, "abc", number=3, output=b"a"))
    go.set()
    masks = machine.masks(np.array([0, 1], dtype=np.int32))
    assert not masks.faults
    assert (ids_of(masks.bits[0]), ids_of(masks.bits[1])) == ({ord("x")}, {ord("b")})


def test_a_grammar_that_could_not_be_read_is_tried_again():
    store = GrammarStore(_Sized())
    for _ in range(2):
        with pytest.raises(ValueError, match="no grammar"):
            store.get(b"k", b"bad")
    assert store.get(b"k", b"good") is store.get(b"k", b"good")


def test_a_row_whose_grammar_takes_too_long_ends_alone(monkeypatch):
    """Masks that take longer with every token, as an ambiguous grammar's do; the clock is the test's. A peak is forgiven, and other rows go on."""
    now = [0.0]
    machine = SlotGrammars(GrammarStore(BACKEND), max_slots=2, vocab_size=VOCAB, stop_ids=(STOP,), clock=lambda: now[0])
    machine.load(slot_request(0, "a*", number=0))
    machine.load(slot_request(1, "b*", number=1))
    machine.masks(np.array([0, 1], dtype=np.int32))
    whole, slow, cost = GrammarState.fill, machine._slots[0].state, [0.0]

    def fill(self, mask, row):
        now[0] += cost[0] if self is slow else 0.0001
        whole(self, mask, row)

    monkeypatch.setattr(GrammarState, "fill", fill)
    both = np.array([0, 1], dtype=np.int32)
    ends = []
    for cost[0] in [0.0, 0.09, *[0.001] * 20, 0.09, *[0.001] * 20, *[0.02] * 20]:
        ends.append(machine.masks(both))
        machine.drawn(both, Now([[ord("a")], [ord("b")]]))
    at = next(at for at, masks in enumerate(ends) if masks.faults)
    assert 45 < at < 60
    assert list(ends[at].faults) == [0]
    assert "ambiguous" in ends[at].faults[0]
    assert all(list(masks.faults) == [0] for masks in ends[at:])
    assert ids_of(ends[-1].bits[1]) == {ord("b"), STOP}


def test_time_is_counted_on_rank_0_alone(monkeypatch):
    """Another rank's own judgement would leave it with other tokens than rank 0."""
    follower = SlotGrammars(GrammarStore(BACKEND), max_slots=1, vocab_size=VOCAB, stop_ids=(STOP,), clock=None)
    follower.load(slot_request(0, "a*"))
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    assert not follower.masks(np.array([0], dtype=np.int32)).faults


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_a_drafter_of_any_width_changes_no_token(width):
    """Speculation with a stand-in drafter: proposals right, wrong and against the grammar; masks for all positions, what is accepted taken, the rest
    never seen. The tokens are those of one token a step."""
    regexes = ["[a-f]+(gh)*", "(abc|abd|[x-z]+ )*", "yes|no", "a*b*c*"]
    count, steps = len(regexes), 24
    logits = torch.randn(count, 80, VOCAB, generator=torch.Generator().manual_seed(11)) * 3

    def greedy(bits: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
        masked = rows.clone()
        apply_bitmask(masked, torch.from_numpy(bits), torch.arange(len(rows)))
        return argmax(masked)

    alone = []
    for row, regex in enumerate(regexes):
        one, tokens = state(regex), []
        while not one.ended and len(tokens) < steps:
            mask = np.zeros((1, mask_words(VOCAB)), dtype=np.int32)
            one.fill(mask, 0)
            tokens.append(int(greedy(mask, logits[row, len(tokens)][None])[0]))
            one.take(tokens[-1])
        alone.append(tokens)

    rng, machine = random.Random(width), slots(count)
    for row, regex in enumerate(regexes):
        machine.load(slot_request(row, regex, number=row))
    outputs: list[list[int]] = [[] for _ in regexes]
    every = np.arange(count, dtype=np.int32)
    while any(len(o) < steps and STOP not in o for o in outputs):
        drafts = np.full((count, width - 1), -1, dtype=np.int64)
        for row in range(count):
            at = len(outputs[row])
            right = alone[row][at : at + width - 1]
            proposed = [token if rng.random() < 0.8 else rng.choice([5, ord("a"), STOP]) for token in right]
            drafts[row, : len(proposed)] = proposed
        masks = machine.masks(every, drafts)
        assert masks.bits.shape[0] == count * width
        assert not masks.faults
        tokens, accepted = np.full((count, width), -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
        for row in range(count):
            at = len(outputs[row])
            verified = greedy(masks.bits[row * width : (row + 1) * width], logits[row, at : at + width]).tolist()
            right = 0
            while right < width - 1 and drafts[row, right] == verified[right] != STOP:
                right += 1
            tokens[row, : right + 1], accepted[row] = verified[: right + 1], right + 1
            if STOP not in outputs[row]:
                outputs[row] += verified[: right + 1]
        machine.drawn(every, Now(tokens), Now(accepted))
    for row in range(count):
        assert outputs[row][: len(alone[row])] == alone[row], regexes[row]


def test_masks_come_before_penalties_and_filters_and_bias_before_masks():
    """A bias cannot lift what is not allowed, top-k counts among what is, and rows without a grammar draw what they draw alone."""
    rows = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8)) * 4
    params = SamplingParams(64, temperature=1.0, top_k=2, logit_bias=((7, 90.0),), repetition_penalty=1.3)
    requests = [
        msgspec.structs.replace(slot_request(i, "[a-e]" if i % 2 else None, number=i), params=params, seed=i)
        for i in range(4)
    ]
    cpu = torch.device("cpu")
    machine = Sampler(
        SlotSampling(max_slots=4, vocab_size=VOCAB, device=cpu), argmax, grammars=slots(4), apply_bitmask=apply_bitmask
    )
    for one in requests:
        machine.load(one)
    zeros = np.zeros(4, dtype=np.int32)
    drawn = machine.sample(rows.clone(), np.arange(4, dtype=np.int32), zeros).tokens[:, 0].tolist()
    for i in (1, 3):
        best = sorted(b"abcde", key=lambda token: -float(rows[i, token]))[:2]
        assert drawn[i] in best
    plain = Sampler(SlotSampling(max_slots=4, vocab_size=VOCAB, device=cpu), argmax)
    for i in (0, 2):
        plain.load(requests[i])
    others = np.array([0, 2], dtype=np.int32)
    assert plain.sample(rows[[0, 2]], others, zeros[:2]).tokens[:, 0].tolist() == [drawn[0], drawn[2]]
    assert re.fullmatch("[a-e]", chr(drawn[1]))
