"""Random draws on the device, none of which the host waits for. ``tokenspeed.builtin.kernels.draw`` is the definition.

A first kernel reads each row once, by many programs: the largest logit and the mass of each chunk of 32 tokens. A second one, one program a row, takes the
chunks whose largest logit is among the ``_SELECT`` largest of all: every token above the smallest of those is in one of these chunks, some thousands of
tokens in place of the vocabulary. Where the filters end among them, which is nearly always, they are found by bisection over the logits' bits. The rest of
the vocabulary is read again only for rows whose filters reach further, or whose draw falls into the tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["draw"]

_CHUNK = 32
#: Largest chunks that are looked at, and room for those that tie with the last.
_SELECT = 128
_ROOM = 256
_HEAD = tl.constexpr(64)
_LOWEST = tl.constexpr(-(2**31))
_CHOICE = tl.constexpr(0)
_TOKEN = tl.constexpr(1)


@triton.jit
def _keys(x):
    """fp32 as int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The fp32 whose key is ``key`` (int64 scalar)."""
    low = key.to(tl.int32)
    return (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _unit(words):
    return (words.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * 2.3283064365386962890625e-10


@triton.jit
def _gumbel(seed, position, ids):
    """fp64 noise of tokens ``ids`` (any shape)."""
    zero = ids * 0
    a, b, c, d = tl.philox(seed, ids >> 2, zero + position, zero + _TOKEN, zero)
    which = ids & 3
    words = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    return -tl.log(-tl.log(_unit(words)))


@triton.jit
def _chunks(
    x_ptr, index_ptr, temperature_ptr, largest_ptr, mass_ptr, V, stride, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = part * BLOCK + tl.arange(0, BLOCK)
    ids = number[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    source = x_ptr + tl.load(index_ptr + row) * stride
    x = tl.load(source + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, axis=1)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    mass = tl.sum(tl.exp((x - base[:, None]) / tl.load(temperature_ptr + row).to(tl.float32)), axis=1)
    tl.store(largest_ptr + row * chunks + number, largest, mask=number < chunks)
    tl.store(mass_ptr + row * chunks + number, mass, mask=number < chunks)


@triton.jit
def _row_count(source, V, key, BLOCK: tl.constexpr):
    """Tokens of a row whose key is at least ``key``."""
    count = 0
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(source + ids, mask=ids < V, other=0.0).to(tl.float32)
        count += tl.sum(((_keys(x) >= key) & (ids < V)).to(tl.int32), axis=0)
    return count


@triton.jit
def _row_mass(source, V, key, top, temperature, BLOCK: tl.constexpr):
    """fp64 mass of those tokens."""
    mass = tl.zeros((), dtype=tl.float64)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(source + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        weights = tl.exp((x - top) / temperature.to(tl.float32))
        mass += tl.sum(tl.where((_keys(x) >= key) & (ids < V), weights, 0.0).to(tl.float64), axis=0)
    return mass


@triton.jit
def _draw(
    x_ptr, index_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, largest_ptr, mass_ptr, list_ptr, out_ptr,
    V, stride, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SELECT: tl.constexpr, ROOM: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = x_ptr + tl.load(index_ptr + row) * stride
    temperature, seed = tl.load(temperature_ptr + row), tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.int32)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)

    # The largest chunks, in order of their numbers.
    number = tl.arange(0, CHUNKS)
    largest = tl.load(largest_ptr + row * chunks + number, mask=number < chunks, other=-float("inf"))
    top = tl.max(largest, axis=0)
    keys = tl.where(number < chunks, _keys(largest), _LOWEST)
    high = tl.max(keys, axis=0).to(tl.int64)
    least, upper = tl.full((), _LOWEST, dtype=tl.int64), high
    while least < upper:
        middle = (least + upper + 1) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= SELECT
        least = tl.where(enough, middle, least)
        upper = tl.where(enough, upper, middle - 1)
    chosen = (keys >= least) & (number < chunks)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    count = tl.sum(chosen.to(tl.int32), axis=0)
    tl.store(list_ptr + row * ROOM + place, number, mask=chosen & (place < ROOM))
    scale = tl.exp((largest - top).to(tl.float64) / temperature)
    masses = tl.load(mass_ptr + row * chunks + number, mask=number < chunks, other=0.0)
    whole = tl.sum(tl.where(largest > -float("inf"), masses.to(tl.float64) * scale, 0.0), axis=0)
    tl.debug_barrier()

    # Their tokens.
    lane = tl.arange(0, ROOM)
    listed = tl.load(list_ptr + row * ROOM + lane, mask=lane < count, other=0)
    ids = listed[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (lane < count)[:, None] & (ids < V)
    x = tl.load(source + ids, mask=inside, other=-float("inf")).to(tl.float32)
    keys = tl.where(inside, _keys(x), _LOWEST)
    inside = inside & (keys >= least)  # all of the row's tokens with such keys, if there was room
    weights = tl.where(inside, tl.exp((x - top).to(tl.float64) / temperature), 0.0)
    known = tl.sum(inside.to(tl.int32))

    top_k_on, top_p_on, min_p_on = (top_k > 0) & (top_k < V), top_p < 1, min_p > 0
    filtered = top_k_on | top_p_on | min_p_on
    wanted = tl.where(filtered, tl.where(top_k_on, top_k, 1), _HEAD)
    lower, upper = least, high
    if top_k_on | (not filtered):  # the key of the last of so many
        while lower < upper:
            middle = (lower + upper + 1) >> 1
            enough = tl.sum((inside & (keys >= middle)).to(tl.int32)) >= wanted
            lower = tl.where(enough, middle, lower)
            upper = tl.where(enough, upper, middle - 1)
    fits = (count <= ROOM) & ((wanted <= known) | (known >= V))
    floor = tl.where(min_p_on, tl.log(tl.where(min_p_on, min_p, 1.0)), -float("inf"))
    # What is drawn from: tokens from (over, over_id) exclusive down to (lower, lower_id), of the listed chunks or of all.
    every, over, over_id, lower_id = False, high + 1, -1, V
    if filtered:
        above = tl.sum(tl.where(keys >= lower, weights, 0.0))
        share = top_p * tl.where(top_k_on, above, whole)
        ends = above >= share
        if top_p_on & ends:
            upper = high
            while lower < upper:
                middle = (lower + upper + 1) >> 1
                enough = tl.sum(tl.where(keys >= middle, weights, 0.0)) >= share
                lower = tl.where(enough, middle, lower)
                upper = tl.where(enough, upper, middle - 1)
        short = (_logit(least) - top).to(tl.float64) / temperature < floor
        every = not (fits & (top_k_on | (top_p_on & ends) | short | (known >= V)))
        if every:
            lower = tl.full((), _LOWEST, dtype=tl.int64)
            if top_k_on:
                upper = high
                while lower < upper:
                    middle = (lower + upper + 1) >> 1
                    enough = _row_count(source, V, middle, BLOCK) >= top_k
                    lower = tl.where(enough, middle, lower)
                    upper = tl.where(enough, upper, middle - 1)
            if top_p_on:
                share = top_p * _row_mass(source, V, lower, top, temperature, BLOCK)
                upper = high
                while lower < upper:
                    middle = (lower + upper + 1) >> 1
                    enough = _row_mass(source, V, middle, top, temperature, BLOCK) >= share
                    lower = tl.where(enough, middle, lower)
                    upper = tl.where(enough, upper, middle - 1)
    else:
        # The head's last key may be shared: of those the lowest ids belong to it.
        need = _HEAD - tl.sum((inside & (keys > lower)).to(tl.int32))
        tied = inside & (keys == lower)
        first, lower_id = -1, V - 1
        while first < lower_id:
            half = (first + lower_id) >> 1
            enough = tl.sum((tied & (ids <= half)).to(tl.int32)) >= need
            first = tl.where(enough, first, half + 1)
            lower_id = tl.where(enough, half, lower_id)
        head = tl.sum(tl.where(inside & ((keys > lower) | (tied & (ids <= lower_id))), weights, 0.0))
        zero = position * 0
        word, _, _, _ = tl.philox(seed, zero, position, zero + _CHOICE, zero)
        every = _unit(word) >= head / whole
        if every:
            over, over_id = lower, lower_id
            lower, lower_id = tl.full((), _LOWEST, dtype=tl.int64), V

    best, token, tries = tl.full((), -float("inf"), dtype=tl.float64), 0, 0
    while (best == -float("inf")) & (tries < 2):
        scores = tl.full((STEP, CHUNK), -float("inf"), dtype=tl.float64)
        tokens = tl.zeros((STEP, CHUNK), dtype=tl.int32)
        step = tl.arange(0, STEP)
        for at in range(0, tl.where(every, chunks, tl.minimum(count, ROOM)), STEP):
            which = at + step
            if not every:
                which = tl.load(list_ptr + row * ROOM + at + step, mask=at + step < count, other=chunks)
            some = which[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            logit = tl.load(source + some, mask=some < V, other=-float("inf")).to(tl.float32)
            key = _keys(logit)
            value = (logit - top).to(tl.float64) / temperature
            kept = (some < V) & (value >= floor) & ((key > lower) | ((key == lower) & (some <= lower_id)))
            kept = kept & ((key < over) | ((key == over) & (some > over_id)))
            drawn = tl.where(kept, value + _gumbel(seed, position, some), -float("inf"))
            tokens = tl.where(drawn > scores, some, tokens)
            scores = tl.where(drawn > scores, drawn, scores)
        best = tl.max(scores)
        token = tl.min(tl.where(scores == best, tokens, 2147483647))
        # Rounding can leave the tail with a sliver of mass and no token: then the head is drawn from after all.
        lower, lower_id, over, over_id = over, over_id, high + 1, -1
        every = False
        tries += 1
    tl.store(out_ptr + row, tl.minimum(tl.maximum(token, 0), V - 1).to(tl.int64))


def draw(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Kernel ``sampling.draw``: logits (R, V), row stride allowed, of which the rows ``index`` (n) are drawn from; the rest (n). Tokens (n) int64."""
    rows, vocab = len(index), logits.shape[1]
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    chunks = triton.cdiv(vocab, _CHUNK)
    largest = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    masses = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    listed = torch.empty((rows, _ROOM), dtype=torch.int32, device=logits.device)
    stride = logits.stride(0)
    _chunks[(rows, triton.cdiv(chunks, 128))](
        logits, index, temperature, largest, masses, vocab, stride, chunks, CHUNK=_CHUNK, BLOCK=128, num_warps=4
    )
    _draw[(rows,)](
        logits, index, temperature, top_k, top_p, min_p, seeds, positions, largest, masses, listed, out, vocab, stride, chunks,
        CHUNK=_CHUNK, CHUNKS=triton.next_power_of_2(chunks), SELECT=_SELECT, ROOM=_ROOM, STEP=32, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return out
