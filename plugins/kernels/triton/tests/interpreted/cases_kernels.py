"""Every kernel against a plain torch expression, under the Triton interpreter."""

import pytest
import torch
from tokenspeed_plugin_kernels_triton import activation, cache, draw, norm, pages, rope, sampling
from tokenspeed_plugin_kernels_triton.gemm import SmallGemm
from tokenspeed_plugin_kernels_triton.tuning import GemmConfig

from tokenspeed.builtin.kernels import cache as defined
from tokenspeed.builtin.kernels import rope as defined_rope
from tokenspeed.builtin.kernels import sampling as reference
from tokenspeed.testing.kernel_cases import kernel_cases


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 96, 512, GemmConfig(1, 16, 128, 1, 4, 2)),
        (1, 100, 520, GemmConfig(1, 16, 128, 2, 4, 2)),
        (1, 100, 520, GemmConfig(1, 8, 1024, 1, 4, 1)),
        (1, 96, 512, GemmConfig(1, 16, 128, 1, 4, 1, ahead=1)),
        (1, 100, 520, GemmConfig(1, 16, 128, 2, 4, 1, ahead=1)),
        (1, 100, 520, GemmConfig(1, 2, 1, 1, 4, 1, programs=3)),
        (8, 100, 520, GemmConfig(16, 32, 64, 2, 4, 2)),
        (3, 64, 256, GemmConfig(16, 32, 64, 4, 4, 2)),
        (17, 33, 48, GemmConfig(32, 16, 32, 1, 4, 2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_small_gemm_equals_linear_with_tails_splits_and_bias(m, n, k, config, bias):
    x, w, b = torch.randn(m, k + 8)[:, :k], torch.randn(n, k), torch.randn(n) if bias else None
    gemm = SmallGemm(torch.device("cpu"), 1 << 16)
    for _ in range(2):  # the second call finds the counters as the first left them
        torch.testing.assert_close(
            gemm(x, w, b, config=config), torch.nn.functional.linear(x, w, b), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 96, 512, GemmConfig(1, 16, 128, 1, 4, 2)),
        (1, 50, 200, GemmConfig(1, 16, 128, 1, 4, 2)),
        (1, 50, 200, GemmConfig(1, 16, 64, 1, 4, 1, ahead=1)),
        (1, 50, 200, GemmConfig(1, 4, 1, 1, 4, 1, programs=2)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_product_equals_the_product_and_its_activation(m, n, k, config, bias):
    x, w, b = torch.randn(m, k), torch.randn(2 * n, k) * 0.2, torch.randn(2 * n) if bias else None
    gate, up = torch.nn.functional.linear(x, w, b).split(n, -1)
    out = SmallGemm(torch.device("cpu"), 1 << 16)(x, w, b, config=config, gated=True)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, atol=1e-4, rtol=1e-4)


def rms(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def test_norms_equal_their_formula_and_the_residual_is_updated_in_place():
    x, residual, weight = torch.randn(3, 576), torch.randn(3, 576), torch.randn(576)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-5), rms(x, weight, 1e-5))
    total = x + residual
    out, same = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert same is residual
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, rms(total, weight, 1e-5))


def test_norm_of_rows_with_a_stride_reads_only_its_columns():
    wide, weight = torch.randn(4, 700), torch.randn(576)
    torch.testing.assert_close(norm.rms_norm(wide[:, :576], weight, 1e-6), rms(wide[:, :576], weight, 1e-6))


def test_gated_activations_equal_torch():
    x = torch.randn(5, 300)
    gate, up = x.split(150, -1)
    torch.testing.assert_close(activation.silu_and_mul(x), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(activation.gelu_tanh_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def rotated(x, cos, sin, rotary, interleaved):
    y = x.clone()
    if interleaved:
        a, b = x[..., 0:rotary:2], x[..., 1:rotary:2]
        y[..., 0:rotary:2], y[..., 1:rotary:2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        y[..., : rotary // 2], y[..., rotary // 2 : rotary] = a * cos - b * sin, b * cos + a * sin
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_qkv_rope_write_rotates_normalises_and_writes_only_mapped_slots(interleaved, layout, rotary, normed):
    tokens, q_heads, kv_heads, dim, page = 5, 9, 3, 64, 16
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim)
    positions = torch.randint(0, 50, (tokens,))
    angles = torch.arange(60)[:, None] / 10000 ** (torch.arange(0, rotary, 2) / rotary)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    shape = (4, kv_heads, page, dim) if layout == "HND" else (4, page, kv_heads, dim)
    k_cache, v_cache = torch.full(shape, 7.0), torch.full(shape, 7.0)
    slots = torch.tensor([3, 17, -1, 63, 40])
    q_norm, k_norm = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    q = rope.qkv_rope_write(
        qkv,
        positions,
        cos_sin,
        q_heads,
        kv_heads,
        dim,
        k_cache,
        v_cache,
        slots,
        layout,
        q_norm,
        k_norm,
        1e-6,
        interleaved,
    )
    qs, ks, vs = (t.view(tokens, -1, dim) for t in qkv.split([q_heads * dim, kv_heads * dim, kv_heads * dim], -1))
    if normed:
        qs, ks = rms(qs, q_norm, 1e-6), rms(ks, k_norm, 1e-6)
    cos, sin = cos_sin[positions][:, None].split(rotary // 2, -1)
    torch.testing.assert_close(q, rotated(qs, cos, sin, rotary, interleaved))
    ks = rotated(ks, cos, sin, rotary, interleaved)
    touched = torch.zeros(4, page, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = (slot // page, slot % page)
            touched[at] = True
            got_k, got_v = (c[at[0], :, at[1]] if layout == "HND" else c[at] for c in (k_cache, v_cache))
            torch.testing.assert_close(got_k, ks[token])
            torch.testing.assert_close(got_v, vs[token])
    untouched = k_cache.transpose(1, 2)[~touched] if layout == "HND" else k_cache[~touched]
    assert (untouched == 7.0).all()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_cache_write_skips_minus_one_and_takes_values_of_another_width(layout):
    k, v, slots = torch.randn(3, 2, 24), torch.randn(3, 2, 16), torch.tensor([5, -1, 20])
    shapes = [(2, 2, 16, d) if layout == "HND" else (2, 16, 2, d) for d in (24, 16)]
    k_cache, v_cache = (torch.zeros(s) for s in shapes)
    cache.write(k, v, k_cache, v_cache, slots, layout)
    for source, target in ((k, k_cache), (v, v_cache)):
        flat = (target.transpose(1, 2) if layout == "HND" else target).reshape(32, 2, -1)
        torch.testing.assert_close(flat[5], source[0])
        torch.testing.assert_close(flat[20], source[2])
        assert int((flat != 0).any(-1).any(-1).sum()) == 2


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_to_fp8_pages_are_those_of_the_definition_and_saturate(layout, dtype):
    tokens, heads, dim = 6, 2, 32
    # Values that fp8 holds: the interpreter rounds others to it in a way of its own.
    k, v = (torch.randn(tokens, heads, dim).mul(9.0).to(torch.float8_e4m3fn).float() for _ in range(2))
    k, v = (torch.where(x.abs() < 2.0**-6, 1.0, x) for x in (k, v))
    k[0], k[1], v[3] = 500.0, -1e5, -1e30
    k, v, slots = k.to(dtype), v.to(dtype), torch.tensor([5, 0, 20, 31, -1, 9])
    shape = (2, heads, 16, dim) if layout == "HND" else (2, 16, heads, dim)
    mine = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(4)]
    theirs = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
    cache.write(k, v, mine[0], mine[1], slots, layout)
    defined.write(k, v, theirs[0], theirs[1], slots, layout)
    # Without rotation and norm the fused kernel stores the same.
    qkv = torch.cat((k, k, v), 1).view(tokens, -1)
    rope.qkv_rope_write(qkv, torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, 0), heads, heads, dim, mine[2], mine[3], slots, layout)  # fmt: skip
    for got, expected in zip(mine, theirs * 2, strict=True):
        assert torch.equal(got.float(), expected.float())
    assert theirs[0].float().abs().max() == 448


@pytest.mark.parametrize(
    "case", [c for c in kernel_cases("rope", "qkv_rope_write") if "gate" in c.features], ids=lambda c: c.name
)
def test_gates_are_split_from_the_queries_as_the_definition_does(case):
    mine, theirs = (case.make(torch.Generator().manual_seed(6)) for _ in range(2))
    got, expected = rope.qkv_rope_write(*mine, **case.kwargs), defined_rope.qkv_rope_write(*theirs, **case.kwargs)
    for left, right in zip((*got, *mine[6:8]), (*expected, *theirs[6:8]), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(7, 2, 4, 8), (7, 3, 33), (7, 5000), (7,)])
def test_whole_pages_are_copied_and_zeroed_whatever_they_hold(dtype, shape):
    source, target, gone = torch.tensor([3, -1, 0, 5]), torch.tensor([4, 1, -1, 2]), torch.tensor([6, -1, 0])
    mine, theirs = (torch.randn(shape, generator=torch.Generator().manual_seed(7)).mul(9).to(dtype) for _ in range(2))
    for module, tensor in ((pages, mine), (defined, theirs)):
        module.copy(tensor, source, target)
        module.zero(tensor, gone)
    assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_pages_that_are_a_part_of_another_tensor_leave_the_rest_alone():
    whole = torch.arange(60.0).view(5, 12)
    part = whole[:, 3:9]
    pages.copy(part, torch.tensor([0]), torch.tensor([4]))
    pages.zero(part, torch.tensor([2]))
    assert whole[4].tolist() == [48, 49, 50, 3, 4, 5, 6, 7, 8, 57, 58, 59]
    assert whole[2].tolist() == [24, 25, 26, 0, 0, 0, 0, 0, 0, 33, 34, 35]
    with pytest.raises(ValueError, match="one contiguous block"):
        pages.zero(torch.zeros(4, 3, 5).transpose(1, 2), torch.tensor([0]))


def test_lookup_gathers_rows():
    weight = torch.randn(10, 100)
    assert torch.equal(cache.lookup(torch.tensor([9, 0, 3]), weight), weight[[9, 0, 3]])


def test_argmax_takes_the_lowest_of_equals_and_reports_nan_rows():
    logits = torch.randn(4, 5000)
    logits[1, 7] = logits[1, 4000] = logits[1].max() + 1
    logits[2, 4999] = torch.nan
    logits[3] = -torch.inf
    ids = sampling.argmax(logits)
    assert ids.tolist() == [int(logits[0].argmax()), 7, -1, 0]


@pytest.mark.parametrize(("rows", "vocab", "index"), [(1, 32, [0]), (5, 301, [4, 0, 2]), (3, 9000, [0, 2])])
def test_a_bitmask_denies_tokens_of_its_rows_and_touches_nothing_else(rows, vocab, index):
    wide = torch.randn(rows, vocab + 9)
    logits = wide[:, :vocab]
    bits = torch.randint(-(2**31), 2**31, (len(index), -(-vocab // 32))).to(torch.int32)
    bits[0, 0] = -(2**31)  # the sign bit alone
    expected = wide.clone()
    for item, row in enumerate(index):
        for token in range(vocab):
            if not int(bits[item, token // 32]) >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    sampling.apply_bitmask(logits, bits, torch.tensor(index))
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", kernel_cases("sampling", "draw"), ids=lambda case: case.name)
def test_draws_are_those_of_the_definition(case, dtype):
    logits, index, *rest = case.make(torch.Generator().manual_seed(4))
    for more in (0, 1000):
        arguments = [logits.to(dtype), index, *rest[:-1], rest[-1] + more]
        assert torch.equal(draw.draw(*arguments), reference.draw(*arguments))
