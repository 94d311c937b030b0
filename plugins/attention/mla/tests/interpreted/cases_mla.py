"""Decode, extend and the write of latents against the torch reference, under the Triton interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_plugin_attention_mla.expand import ExpandedPrefill, worth_expanding
from tokenspeed_plugin_attention_mla.pack import write_latent
from tokenspeed_plugin_attention_mla.work import TILES, LatentWork, Tiling

from tokenspeed.builtin.kernels import attention as reference
from tokenspeed.builtin.kernels import cache as reference_cache
from tokenspeed.interfaces.attention import LatentUp

SMALL = (Tiling(queries=16, latents=16), Tiling(queries=32, latents=16))
SWAPPED = tuple(replace(tile, swap=True) for tile in SMALL)


class Case:
    """Rows of latents over shuffled pages; what was never written is NaN, table entries past a row's pages are no pages."""

    def __init__(
        self, lengths, *, heads=16, width=1, page=16, rank=32, rope=16, layout="NHD", fp8=False, tiles=SMALL, seed=0
    ):
        torch.manual_seed(seed)
        self.heads, self.width, self.rank, self.layout = heads, width, rank, layout
        self.scale, self.kv_scale = (rank + rope) ** -0.5, 0.25 if fp8 else 1.0
        needed = [-(-length // page) for length in lengths]
        order = torch.randperm(sum(needed) + 3).tolist()
        self.table = torch.full((len(lengths), max([*needed, 1]) + 1), 2**30, dtype=torch.int32)
        latents = torch.full((len(order), page, rank + rope), float("nan"))
        for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
            for index in range(count):
                at = order.pop()
                self.table[row, index] = at
                used = min(page, length - index * page)
                latents[at, :used] = torch.randn(used, rank + rope)
        self.latents = latents.unsqueeze(2 if layout == "NHD" else 1)
        if fp8:
            self.latents = (self.latents / self.kv_scale).to(torch.float8_e4m3fn)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.work = LatentWork(
            heads=heads,
            rank=rank,
            rope=rope,
            page_size=page,
            max_rows=8,
            max_queries=64 * heads,
            processors=3,
            device=torch.device("cpu"),
            tiles=tiles,
        )

    def queries(self, tokens):
        return torch.randn(tokens, self.heads, self.latents.shape[-1])

    def expect(self, q, start):
        latents = self.latents.float() * self.kv_scale
        return reference.extend(
            q, latents, latents[..., : self.rank], self.table, self.lengths, start, self.scale, self.layout
        )

    def decode(self, q, planned=None, before=0):
        start = torch.arange(len(self.lengths) + 1, dtype=torch.int32) * self.width
        self.work.prepare(self.lengths.numpy() if planned is None else planned, self.width)
        got = self.work.decode(
            q,
            self.latents,
            self.table,
            self.lengths,
            start + before,
            width=self.width,
            scale=self.scale,
            kv_scale=self.kv_scale,
        )
        return got, self.expect(q, start)


def close(got, expected, tolerance=2e-5):
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tiles", [SMALL, SWAPPED], ids=["plain", "swapped"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("lengths", "heads", "width", "page"),
    [
        ((1,), 16, 1, 16),
        ((0, 1, 16, 17), 16, 1, 16),
        ((64, 63, 65), 5, 1, 64),
        ((33, 1, 150), 16, 1, 32),
        ((40, 3), 16, 3, 16),
        ((2, 90), 24, 2, 32),
        ((130,), 40, 1, 16),
    ],
)
def test_decode_equals_the_reference(lengths, heads, width, page, layout, tiles):
    case = Case(lengths, heads=heads, width=width, page=page, layout=layout, tiles=tiles)
    close(*case.decode(case.queries(len(lengths) * width)))


def test_decode_with_the_sizes_of_deepseek_and_the_tilings_of_the_device():
    case = Case((70, 9), heads=16, page=64, rank=512, rope=64, tiles=TILES)
    close(*case.decode(case.queries(2)))
    case = Case((65,), heads=20, width=2, page=16, rank=512, rope=64, tiles=TILES)
    close(*case.decode(case.queries(2)))


def test_a_row_shorter_than_planned_reads_what_it_has():
    """A plan may be of upper bounds: pieces past a row's end count for nothing."""
    case = Case((20, 35), page=16)
    got, expected = case.decode(case.queries(2), planned=np.array([200, 64], dtype=np.int32))
    close(got, expected)


def test_decode_rows_may_follow_extend_rows_in_a_step():
    case = Case((20, 35), page=16)
    close(*case.decode(case.queries(2), before=77))


@pytest.mark.parametrize("tiles", [SMALL, SWAPPED], ids=["plain", "swapped"])
def test_decode_of_fp8_latents_multiplies_by_their_scale(tiles):
    """Products are in fp16 there when queries are in bf16; here in fp32 by the queries' type."""
    case = Case((20, 70, 1), page=32, fp8=True, tiles=tiles)
    close(*case.decode(case.queries(3)))


@pytest.mark.parametrize("fp8", [False, True])
def test_decode_in_fp16(fp8):
    """The type of products over fp8 latents, whatever the queries'. bf16 is for the device: the interpreter computes with its bits."""
    case = Case((20, 70), page=32, fp8=fp8)
    if not fp8:
        case.latents = case.latents.half()
    got, expected = case.decode(case.queries(2).half())
    assert got.dtype == torch.float16
    close(got.float(), expected.float(), 4e-3)


@pytest.mark.parametrize(
    ("lengths", "new", "heads"),
    [((1, 16, 37), (1, 16, 5), 16), ((20,), (20,), 3), ((50, 17), (2, 17), 24), ((8, 30), (0, 12), 16)],
)
def test_extend_equals_the_reference(lengths, new, heads):
    case = Case(lengths, heads=heads, page=16)
    start = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    q = case.queries(int(start[-1]))
    count = np.array(new, dtype=np.int32)
    case.work.prepare_extend(case.lengths.numpy() - count, count)
    got = case.work.extend(q, case.latents, case.table, case.lengths, start, scale=case.scale, kv_scale=case.kv_scale)
    close(got, case.expect(q, start))


@pytest.mark.parametrize("workspace", [2**20, 1], ids=["all heads at once", "head by head"])
@pytest.mark.parametrize(
    ("lengths", "new", "fp8"), [((1, 16, 37), (1, 16, 5), False), ((50, 17), (2, 17), True), ((8, 30), (0, 12), False)]
)
def test_prompts_over_expanded_latents_equal_absorbed_ones(lengths, new, fp8, workspace):
    case = Case(lengths, heads=3, page=16, layout="HND", fp8=fp8)
    start = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    up = LatentUp(keys=torch.randn(3, 32, 32) / 4, values=torch.randn(3, 16, 32) / 4)
    q = torch.randn(int(start[-1]), 3, 32 + 16)
    count = np.array(new, dtype=np.int32)
    prefill = ExpandedPrefill(max_rows=8, max_tokens=64, workspace_bytes=workspace, device=torch.device("cpu"))
    prefill.prepare(case.lengths.numpy() - count, count)
    got = prefill.run(q, case.latents, case.table, start, up, scale=case.scale, kv_scale=case.kv_scale)
    close(got, up.project(case.expect(up.absorb(q), start)), 1e-4)


def test_expansion_pays_for_prompts_and_not_for_a_few_tokens_after_a_long_context():
    sizes = {"rank": 512, "rope": 64, "nope": 128, "v_dim": 128}
    assert worth_expanding(np.array([0, 0]), np.array([1000, 3]), **sizes)
    assert worth_expanding(np.array([8192]), np.array([2048]), **sizes)
    assert not worth_expanding(np.array([8192]), np.array([16]), **sizes)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_written_latents_are_those_of_the_reference(layout, to, scale):
    torch.manual_seed(1)
    rows = torch.randn(6, 48 + 16 + 8) * 3
    if to is torch.float8_e4m3fn:  # what needs no rounding: the interpreter loses its carry
        rows = rows.to(to).float() * scale
    rows[0, 3], rows[1, 5], rows[2, 50] = 1e4, float("nan"), -1e4
    latent, rope = rows[:, :48], rows[:, 56:72]  # of strided rows, as slices of a product are
    shape = (4, 4, 1, 64) if layout == "NHD" else (4, 1, 4, 64)
    slots = torch.tensor([7, -1, 0, 15, 4, -1])
    got, expected = (torch.zeros(shape).to(to) for _ in range(2))
    write_latent(latent, rope, got, slots, layout, scale)
    reference_cache.write_latent(latent, rope, expected, slots, layout, scale)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
