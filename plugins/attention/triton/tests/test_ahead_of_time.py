"""Decode, merge and extend compile for each architecture they are meant for, without a device."""

import pytest
import triton
from tokenspeed_plugin_attention_triton import decode, extend
from tokenspeed_plugin_attention_triton.kernels import fitting_stages
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
STRIDES = dict.fromkeys(("table_stride", "s_page", "s_pos", "s_head", "v_page", "v_pos", "v_head"), "i32")
SHAPE = {"G": 4, "D": 128, "DV": 128, "PAGE": 64, "BN": 64, "BD": 128, "BDV": 128, "SOFTCAP": False}
DECODE = (
    decode.decode_items,
    {
        "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "table_ptr": "*i32", "seq_ptr": "*i32", "item_ptr": "*i32", "count_ptr": "*i32",
        "parts_ptr": "*i32", "out_ptr": "*bf16", "acc_ptr": "*fp32", "ml_ptr": "*fp32", "sink_ptr": "*fp32",
        "q_heads": "i32", "kv_heads": "i32", **STRIDES, "scale": "fp32", "softcap": "fp32", "window": "i32",
    },
)  # fmt: skip
FP8_PAGES = {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv"}
KERNELS = {
    "own": (*DECODE, {**SHAPE, "W": 1, "BM": 16, "SINKS": False, "WINDOW": False, "IN_PAGE": True}),
    "shared": (*DECODE, {**SHAPE, "W": 1, "BM": 64, "SINKS": False, "WINDOW": False, "IN_PAGE": True}),
    "window and sinks": (*DECODE, {**SHAPE, "W": 2, "BM": 16, "SINKS": True, "WINDOW": True, "IN_PAGE": False}),
    "merge": (
        decode.merge_parts,
        {
            "acc_ptr": "*fp32", "ml_ptr": "*fp32", "parts_ptr": "*i32", "part_table_ptr": "*i32", "out_ptr": "*bf16", "sink_ptr": "*fp32",
            "q_heads": "i32", "table_stride": "i32",
        },
        {"W": 1, "DV": 128, "BDV": 128, "BP": 16, "SINKS": False, "PDL": True},
    ),
    "extend": (
        extend.extend_blocks,
        {
            "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "table_ptr": "*i32", "seq_ptr": "*i32", "start_ptr": "*i32", "block_ptr": "*i32",
            "out_ptr": "*bf16", "sink_ptr": "*fp32", "q_heads": "i32", **STRIDES, "scale": "fp32", "softcap": "fp32", "window": "i32",
        },
        {**SHAPE, "BM": 64, "SINKS": False, "WINDOW": False, "IN_PAGE": True},
    ),
}  # fmt: skip
KERNELS |= {
    f"{name}, fp8 pages": (KERNELS[name][0], {**KERNELS[name][1], **FP8_PAGES}, KERNELS[name][2])
    for name in ("own", "shared", "window and sinks", "extend")
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_compiles_without_a_device(kernel, target):
    fn, signature, constants = KERNELS[kernel]
    if "PDL" in constants:  # NVIDIA's alone
        constants = {**constants, "PDL": target.startswith("sm")}
    source = ASTSource(fn, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    # said outright: Triton 3.9 warns where it is left to a default that will change
    built = triton.compile(source, target=TARGETS[target], options={"enable_fp_fusion": True})
    assert built.asm["cubin" if target.startswith("sm") else "hsaco"]


@pytest.mark.parametrize(("kernel", "tile", "wanted"), [("own", 16, 3), ("shared", 64, 2), ("extend", 64, 3)])
def test_wide_heads_fit_into_the_shared_memory_of_a_small_gpu(kernel, tile, wanted):
    """sm_120 has 99 KiB, where three blocks of heads of 256 would take 138 to 168."""
    limit = 99 * 1024
    stages = fitting_stages(wanted, tile=tile, block=64, dim=256, v_dim=256, itemsize=2, limit=limit)
    fn, signature, constants = KERNELS[kernel]
    constants = {**constants, "D": 256, "DV": 256, "BD": 256, "BDV": 256}
    source = ASTSource(fn, {**signature, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
    options = {"enable_fp_fusion": True, "num_warps": 4, "num_stages": stages}
    built = triton.compile(source, target=GPUTarget("cuda", 120, 32), options=options)
    assert built.metadata.shared <= limit


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("tile", "wanted"), [(16, 3), (64, 2), (64, 3)])
def test_a_large_gpu_keeps_its_stages(dim, tile, wanted):
    fitted = fitting_stages(wanted, tile=tile, block=64, dim=dim, v_dim=dim, itemsize=2, limit=227 * 1024)
    assert fitted == wanted
