"""Every kernel compiles for each architecture it is meant for, without a device; NVIDIA's tilings fit a multiprocessor."""

import re

import pytest
import triton
import triton.language as tl
from tokenspeed_plugin_attention_mla import attend, pack, ragged
from tokenspeed_plugin_attention_mla.hopper import HOPPER_TILES
from tokenspeed_plugin_attention_mla.hopper_narrow import attend_narrow
from tokenspeed_plugin_attention_mla.hopper_wide import attend_wide
from tokenspeed_plugin_attention_mla.tiling import HEADS_FP32, TILES, TILES_FP8, TILES_FP32, TILES_ROCM, Tiling
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
BF, F32, I32 = "*bf16", "*fp32", "*i32"
ATTEND = {
    "q_ptr": BF, "c_ptr": BF, "table_ptr": I32, "seq_ptr": I32, "start_ptr": I32, "item_ptr": I32, "range_ptr": I32, "out_ptr": BF, "acc_ptr": F32,
    "ml_ptr": F32, "heads": "i32", "part_stride": "i32", "table_stride": "i32", "s_page": "i32", "scale": "fp32", "out_scale": "fp32",
}  # fmt: skip
ALIGNED = (
    "q_ptr", "c_ptr", "out_ptr", "acc_ptr", "ml_ptr", "heads", "part_stride", "s_page", "kn_ptr", "kr_ptr", "v_ptr", "s_q", "s_kn", "s_kr", "s_v", "s_out",
)  # fmt: skip


def attend_case(tiling, page, fp8):
    constants = {
        "BLOCKS": 2, "RANK": 512, "ROPE": 64, "PAGE": page, "BM": tiling.queries, "BN": tiling.latents, "STEP": 576, "SWAP": tiling.swap,
        "IN_PAGE": page % tiling.latents == 0, "COMPUTE": tl.float16 if fp8 else tl.bfloat16,
    }  # fmt: skip
    return attend.attend_items, {**ATTEND, "c_ptr": "*fp8e4nv" if fp8 else BF}, constants, tiling


def attend_cases(prefix, wide, narrow):
    return {
        f"{prefix} {tiling.queries} queries, page {page}{', fp8' if fp8 else ''}": attend_case(tiling, page, fp8)
        for tiles, page, fp8 in ((wide, 64, False), (wide, 16, False), (narrow, 64, True))
        for tiling in tiles
    }


def wide_case():
    fn, signature, constants, tiling = attend_case(TILES_FP32[0], 64, False)
    types = {name: F32 if of == BF else of for name, of in signature.items()}
    return fn, types, constants | {"COMPUTE": tl.float32}, tiling


NVIDIA, AMD = attend_cases("NVIDIA's", TILES, TILES_FP8), attend_cases("AMD's", TILES_ROCM, TILES_ROCM)
NVIDIA["NVIDIA's fp32"] = wide_case()
OTHERS = {
    "merge": (
        attend.merge_parts,
        {"acc_ptr": F32, "ml_ptr": F32, "part_ptr": I32, "out_ptr": BF, "out_scale": "fp32"},
        {"QUERIES": 16, "RANK": 512, "BP": 8, "PDL": True},
        None,
    )
} | {
    f"pack to {to}": (
        pack.pack_rows,
        {
            "c_ptr": BF, "r_ptr": BF, "cache_ptr": to, "slot_ptr": "*i64", "tokens": "i32", "s_c": "i32", "s_r": "i32", "s_page": "i32", "s_pos": "i32",
            "page_size": "i32", "scale": "fp32",
        },
        {"RANK": 512, "ROPE": 64, "BR": 512, "BE": 64, "BT": 4, "SCALED": True, "PDL": True},
        None,
    )
    for to in (BF, "*fp8e4nv")
} | {
    f"gather of {of}": (
        ragged.gather_latents,
        {
            "c_ptr": of, "table_ptr": I32, "kv_start_ptr": I32, "out_ptr": BF, "table_stride": "i32", "s_page": "i32", "page_size": "i32",
            "scale": "fp32",
        },
        {"DIM": 576, "BD": 1024, "BT": 16, "SCALED": True},
        None,
    )
    for of in (BF, "*fp8e4nv")
} | {
    f"heads of {tile} tokens": (
        ragged.attend_heads,
        {
            "q_ptr": BF, "kn_ptr": BF, "kr_ptr": BF, "v_ptr": BF, "start_ptr": I32, "kv_start_ptr": I32, "item_ptr": I32, "out_ptr": BF,
            **dict.fromkeys(("s_q", "s_kn", "s_kr", "s_v", "s_out"), "i32"), "scale": "fp32",
        },
        {"NOPE": 128, "ROPE": 64, "DV": 128, "BM": tile, "BN": 64},
        None,
    )
    for tile in (64, 128)
}  # fmt: skip


def fp32_heads():
    fn, signature, constants, _ = OTHERS["heads of 128 tokens"]
    types = {name: F32 if of == BF else of for name, of in signature.items()}
    tokens, keys, warps = HEADS_FP32
    return (
        fn,
        types,
        constants | {"BM": tokens, "BN": keys},
        Tiling(queries=tokens, latents=keys, warps=warps, stages=1),
    )


FP32 = {"over latents": wide_case, "over expanded latents": fp32_heads}
KERNELS = {**NVIDIA, **AMD, **OTHERS}
CASES = [
    (kernel, target)
    for target in TARGETS
    for kernel in ((NVIDIA if target.startswith("sm") else AMD) | OTHERS)
    if kernel != ("heads of 64 tokens" if target.startswith("sm") else "heads of 128 tokens")
]


@pytest.mark.parametrize(("kernel", "target"), CASES)
def test_kernel_compiles_without_a_device(kernel, target):
    fn, signature, constants, tiling = KERNELS[kernel]
    nvidia = target.startswith("sm")
    if "PDL" in constants:  # NVIDIA's alone
        constants = {**constants, "PDL": nvidia}
    aligned = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in signature}
    source = ASTSource(fn, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=aligned)
    # said outright: Triton 3.9 warns where it is left to a default that will change
    options = {"enable_fp_fusion": True}
    if "NOPE" in constants:
        options |= {"num_warps": 8 if constants["BM"] == 128 else 4}
    if tiling:
        options |= {
            "num_warps": tiling.warps,
            "num_stages": tiling.stages if constants["IN_PAGE"] else tiling.scattered,
        }
    built = triton.compile(source, target=TARGETS[target], options=options)
    assert built.asm["cubin" if nvidia else "hsaco"]
    if tiling and nvidia:
        assert built.metadata.shared * tiling.residency <= 227 * 1024


@pytest.mark.parametrize("of", FP32)
def test_kernel_in_fp32_compiles_while_an_engine_starts(of):
    """Its products are unrolled into multiplications, some thousands of which compile in seconds; 20,000 took 15 and, on a busy machine, 97."""
    fn, signature, constants, tiling = FP32[of]()
    aligned = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in signature}
    source = ASTSource(fn, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": True, "num_warps": tiling.warps, "num_stages": tiling.stages}
    built = triton.compile(source, target=TARGETS["sm_90"], options=options)
    assert built.asm["ptx"].count("fma.rn.f32") < 4000
    assert built.metadata.shared <= 99 * 1024  # of the smallest multiprocessors


def local_accesses(sass):
    """Loads of local memory among the 20 instructions before each product, and every access of it."""
    code = [line for line in sass.splitlines() if line.rstrip().endswith(";")]
    products = [at for at, line in enumerate(code) if "HGMMA" in line]
    assert products
    near = sorted({n for at in products for n in range(max(0, at - 20), at) if re.search(r"\bLDL\b", code[n])})
    return [code[n] for n in near], [line for line in code if re.search(r"\b(LDL|STL)\b", line)]


@pytest.mark.parametrize("tiling", HOPPER_TILES, ids=lambda tiling: f"{tiling.kernel} {tiling.queries}")
def test_kernel_for_hopper_compiles_without_a_device_and_fits(tiling):
    """Its shared memory fits, the copying warp and the others have the registers that they ask for, and products wait for nothing that was spilled: loads
    of spilled descriptors cost the kernel for many queries a quarter of its time."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

    def boxes(rows, columns):
        return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"

    narrow = tiling.kernel == "narrow"
    fn = attend_narrow if narrow else attend_wide
    constants = {}
    signature = {"q_desc": boxes(tiling.queries, 256), "c_desc": boxes(64, 256 if narrow else 64)}
    if narrow:
        signature["r_desc"] = boxes(64, 64)
        weights = gl.NVMMASharedLayout(swizzle_byte_width=2 * tiling.queries, element_bitwidth=16, rank=2)
        constants = {"QUERIES": tiling.queries, "STAGES": 2, "P_LAYOUT": weights}
        signature["qe_desc"] = boxes(tiling.queries, 64)
    for name in fn.arg_names:
        if name in ("table_ptr", "seq_ptr", "start_ptr", "item_ptr", "range_ptr"):
            signature[name] = I32
        elif name in ("acc_ptr", "ml_ptr"):
            signature[name] = F32
        elif name in ("q_ptr", "out_ptr"):
            signature[name] = BF
        elif name in ("scale", "out_scale"):
            signature[name] = "fp32"
        elif name not in signature:
            signature[name] = "constexpr" if name in constants else "i32"
    aligned = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in signature}
    source = GluonASTSource(fn, {name: signature[name] for name in fn.arg_names}, constants, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": 232 if narrow else 168}
    built = triton.compile(source, target=TARGETS["sm_90"], options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in built.asm["ptx"]
    before, everywhere = local_accesses(built.asm["sass"])
    assert not before, f"{len(before)} loads from local memory before products, the first {before[0]}"
    # With the release that torch 2.11 brings; later ones spill a little outside of the loop.
    if triton.__version__.startswith("3.6.") and not narrow:
        assert not everywhere, f"{len(everywhere)} accesses of local memory, the first {everywhere[0]}"
