"""Every kernel compiles for each architecture it is meant for, without a device, and no tile takes more of one than it has."""

from dataclasses import replace

import pytest
import triton
from tokenspeed_plugin_kernels_triton import activation, cache, draw, gemm, gemv, norm, pages, rope, sampling
from tokenspeed_plugin_kernels_triton.limits import shared_memory_limit
from tokenspeed_plugin_kernels_triton.tuning import load_tuning
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
CAPABILITY = {
    "sm_90": (9, 0), "sm_100": (10, 0), "sm_103": (10, 3), "sm_120": (12, 0), "gfx942": (9, 4, 2), "gfx950": (9, 5, 0),
}  # fmt: skip
BF, F32, F64, I32, I64 = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
ROWS = {"x_ptr": BF, "w_ptr": BF, "bias_ptr": BF, "out_ptr": BF, "N": "i32", "K": "i32"}
KERNELS = {
    "gemv": (
        gemv.gemv,
        {"x_ptr": BF, "w_ptr": BF, "bias_ptr": BF, "out_ptr": BF, "part_ptr": F32, "count_ptr": I32, "N": "i32", "K": "i32"},
        {"HAS_BIAS": False, "BN": 4, "BK": 4096, "SPLIT_K": 1, "EVEN": True, "GATED": False, "PDL": True, "STAGES": 1, "AHEAD": False},
    ),
    "gemv pipelined": (
        gemv.gemv,
        {"x_ptr": BF, "w_ptr": BF, "bias_ptr": BF, "out_ptr": BF, "part_ptr": F32, "count_ptr": I32, "N": "i32", "K": "i32"},
        {"HAS_BIAS": False, "BN": 16, "BK": 512, "SPLIT_K": 1, "EVEN": True, "GATED": False, "PDL": True, "STAGES": 3, "AHEAD": False},
    ),
    "gemv ahead": (
        gemv.gemv,
        {"x_ptr": BF, "w_ptr": BF, "bias_ptr": BF, "out_ptr": BF, "part_ptr": F32, "count_ptr": I32, "N": "i32", "K": "i32"},
        {"HAS_BIAS": False, "BN": 4, "BK": 1024, "SPLIT_K": 1, "EVEN": True, "GATED": False, "PDL": True, "STAGES": 1, "AHEAD": True},
    ),
    "gemv gated": (
        gemv.gemv,
        {"x_ptr": BF, "w_ptr": BF, "bias_ptr": BF, "out_ptr": BF, "part_ptr": F32, "count_ptr": I32, "N": "i32", "K": "i32"},
        {"HAS_BIAS": False, "BN": 16, "BK": 256, "SPLIT_K": 1, "EVEN": True, "GATED": True, "PDL": True, "STAGES": 1, "AHEAD": False},
    ),
    "gemv rows": (gemv.gemv_rows, ROWS, {"HAS_BIAS": True, "BN": 2, "BK": 4096, "GATED": False, "PDL": True}),
    "gemv rows gated": (gemv.gemv_rows, ROWS, {"HAS_BIAS": False, "BN": 1, "BK": 4096, "GATED": True, "PDL": True}),
    "small_m split": (
        gemm._small_m,
        {"x_ptr": BF, "w_ptr": BF, "bias_ptr": BF, "out_ptr": BF, "part_ptr": F32, "count_ptr": I32, "M": "i32", "N": "i32", "K": "i32", "stride_x": "i32"},
        {"HAS_BIAS": True, "BM": 16, "BN": 64, "BK": 64, "SPLIT_K": 4, "EVEN": False, "PDL": True, "FIRST": 2},
    ),
    "add_rms_norm": (
        norm._rms_norm,
        {"x_ptr": BF, "res_ptr": BF, "w_ptr": BF, "out_ptr": BF, "H": "i32", "stride_x": "i32", "eps": "fp32"},
        {"ADD": True, "BLOCK": 4096, "PDL": True},
    ),
    "rms_norm": (
        norm._rms_norm,
        {"x_ptr": BF, "res_ptr": BF, "w_ptr": BF, "out_ptr": BF, "H": "i32", "stride_x": "i32", "eps": "fp32"},
        {"ADD": False, "BLOCK": 4096, "PDL": True},
    ),
    "qkv_rope_write": (
        rope._qkv,
        {
            "qkv_ptr": BF, "pos_ptr": I64, "cs_ptr": F32, "q_out_ptr": BF, "gate_ptr": BF, "k_ptr": BF, "v_ptr": BF, "slot_ptr": I64,
            "qn_ptr": BF, "kn_ptr": BF,
            "q_heads": "i32", "kv_heads": "i32", "stride_qkv": "i32", "page_size": "i32", "s_page": "i32", "s_pos": "i32", "s_head": "i32", "eps": "fp32",
        },
        {"NORM": True, "INTERLEAVED": False, "D": 128, "RD": 128, "HALF": 64, "BH": 16, "GATE": False, "PDL": True},
    ),
    "silu_and_mul": (activation._gated, {"x_ptr": BF, "out_ptr": BF, "width": "i32", "total": "i32"}, {"GELU": False, "BLOCK": 1024, "PDL": True}),
    "gelu_tanh_and_mul": (activation._gated, {"x_ptr": BF, "out_ptr": BF, "width": "i32", "total": "i32"}, {"GELU": True, "BLOCK": 1024, "PDL": True}),
    "cache write": (
        cache._write,
        {
            "k_ptr": BF, "v_ptr": BF, "kc_ptr": BF, "vc_ptr": BF, "slot_ptr": I64, "heads": "i32", "s_k": "i32", "s_v": "i32", "page_size": "i32",
            "s_page": "i32", "s_pos": "i32", "s_head": "i32", "v_page": "i32", "v_pos": "i32", "v_head": "i32",
        },
        {"D": 128, "DV": 128, "BD": 128, "BH": 8},
    ),
    "copy": (
        pages._copy,
        {"pages_ptr": I32, "source_ptr": I64, "target_ptr": I64, "words": "i32", "stride": "i32"},
        {"BLOCK": 4096},
    ),
    "zero": (pages._zero, {"pages_ptr": I32, "target_ptr": I64, "words": "i32", "stride": "i32"}, {"BLOCK": 4096}),
    "lookup": (cache._lookup, {"ids_ptr": I64, "w_ptr": BF, "out_ptr": BF, "H": "i32"}, {"BLOCK": 1024}),
    "argmax": (
        sampling._partial,
        {"x_ptr": BF, "val_ptr": F32, "idx_ptr": I32, "V": "i32", "stride": "i32", "parts": "i32"},
        {"BLOCK": 4096},
    ),
    "draw, chunks": (
        draw._chunks,
        {"x_ptr": BF, "index_ptr": I64, "temperature_ptr": F64, "largest_ptr": F32, "mass_ptr": F32, "V": "i32", "stride": "i32", "chunks": "i32"},
        {"CHUNK": 32, "BLOCK": 128},
    ),
    "draw": (
        draw._draw,
        {
            "x_ptr": F32, "index_ptr": I64, "temperature_ptr": F64, "top_k_ptr": I64, "top_p_ptr": F64, "min_p_ptr": F64, "seed_ptr": I64,
            "position_ptr": I64, "largest_ptr": F32, "mass_ptr": F32, "list_ptr": I32, "out_ptr": I64, "V": "i32", "stride": "i32", "chunks": "i32",
        },
        {"CHUNK": 32, "CHUNKS": 8192, "SELECT": 128, "ROOM": 256, "STEP": 32, "BLOCK": 2048},
    ),
    "argmax final": (sampling._final, {"val_ptr": F32, "idx_ptr": I32, "out_ptr": I64, "parts": "i32"}, {"BLOCK": 64}),
    "apply_bitmask": (
        sampling._mask,
        {"x_ptr": F32, "bits_ptr": I32, "rows_ptr": I64, "V": "i32", "stride": "i32", "words": "i32"},
        {"BLOCK": 4096},
    ),
}  # fmt: skip
fn, signature, constants = KERNELS["qkv_rope_write"]
KERNELS["qkv_rope_write, gates"] = (fn, signature, {**constants, "GATE": True})
FP8 = "*fp8e4nv"
for name, stores in (("qkv_rope_write", ("k_ptr", "v_ptr")), ("cache write", ("kc_ptr", "vc_ptr"))):
    fn, signature, constants = KERNELS[name]
    KERNELS[f"{name}, fp8 pages"] = (fn, {**signature, **dict.fromkeys(stores, FP8)}, constants)


def compiled(target, fn, signature, constants, **options):
    if "PDL" in constants:  # NVIDIA's alone
        constants = {**constants, "PDL": target.startswith("sm")}
    # As the launcher does for what is aligned: other loads than without it, and other buffers.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name != "M"} if options else {}
    source = ASTSource(fn, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=aligned)
    # said outright: Triton 3.9 warns where it is left to a default that will change
    return triton.compile(source, target=TARGETS[target], options={"enable_fp_fusion": True, **options})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_compiles_without_a_device(kernel, target):
    built = compiled(target, *KERNELS[kernel])
    assert built.asm["cubin" if target.startswith("sm") else "hsaco"]
    assert built.metadata.shared <= shared_memory_limit(CAPABILITY[target])


def tiles():
    """(target, rows, gated, tile) of what is taken on the searched card, and on other targets without a search."""
    for target, capability in CAPABILITY.items():
        tuning = load_tuning("NVIDIA H200" if target == "sm_90" else "", shared_memory_limit(capability))
        chosen = {
            (tuning.gemm(m, n, 4096, gated), gated)
            for m in (1, 8, 32)
            for n in (4096, 24576)
            for gated in (False, m == 1)
        }
        yield from ((target, gated, replace(tile, split_k=1, ahead=0)) for tile, gated in chosen if tile.programs == 0)


@pytest.mark.parametrize(("target", "gated", "tile"), sorted(set(tiles()), key=str), ids=str)
def test_a_tile_takes_no_more_shared_memory_than_it_is_counted_with(target, gated, tile):
    fn, signature, constants = KERNELS["gemv" if tile.bm == 1 else "small_m split"]
    sizes = {"BN": tile.bn, "BK": tile.bk, "SPLIT_K": 1, "EVEN": True, "HAS_BIAS": False}
    more = {"GATED": gated, "STAGES": tile.stages} if tile.bm == 1 else {"BM": tile.bm, "FIRST": 0}
    options = {"num_warps": tile.warps, "num_stages": tile.stages if tile.bm > 1 else 3}
    built = compiled(target, fn, signature, {**constants, **sizes, **more}, **options)
    assert built.metadata.shared <= tile.shared_bytes <= shared_memory_limit(CAPABILITY[target])
