"""Factories of the kernels (``KernelSpec.target``): each is a method of the rank's one native runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tokenspeed_plugin_kernels_cpu._native import Runtime, supported_isas

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext

__all__ = [
    "Runtime",
    "make_activation_gelu_tanh_and_mul",
    "make_activation_silu_and_mul",
    "make_attention_decode",
    "make_attention_extend",
    "make_cache_write",
    "make_embedding_lookup",
    "make_gemm_linear",
    "make_gemm_linear_silu_mul",
    "make_norm_add_rms_norm",
    "make_norm_rms_norm",
    "make_rope_qkv_rope_write",
    "make_rope_rotate",
    "make_sampling_argmax",
    "runtime_of",
    "supported_isas",
]

Kernel = Callable[..., Any]

_SHARED_KEY = "kernels-cpu"


def runtime_of(context: KernelContext) -> Runtime:
    """The rank's runtime: made for the first kernel that asks, shared by all; its threads end with ``context.shared``.

    Torch is left with one thread: OpenMP's workers spin for milliseconds after each of its operations and would take the processors from the runtime's.
    """
    runtime = context.shared.get(_SHARED_KEY)
    if not isinstance(runtime, Runtime):
        threads = int(context.options.get("threads", 0)) or max(1, context.threads)
        torch.set_num_threads(1)
        runtime = Runtime(threads, str(context.options.get("isa", "")))
        context.shared[_SHARED_KEY] = runtime
    return runtime


def make_gemm_linear(context: KernelContext) -> Kernel:
    """``gemm.linear``."""
    return runtime_of(context).linear


def make_gemm_linear_silu_mul(context: KernelContext) -> Kernel:
    """``gemm.linear_silu_mul``."""
    return runtime_of(context).linear_silu_mul


def make_norm_rms_norm(context: KernelContext) -> Kernel:
    """``norm.rms_norm``."""
    return runtime_of(context).rms_norm


def make_norm_add_rms_norm(context: KernelContext) -> Kernel:
    """``norm.add_rms_norm``."""
    return runtime_of(context).add_rms_norm


def make_rope_rotate(context: KernelContext) -> Kernel:
    """``rope.rotate``."""
    return runtime_of(context).rotate


def make_rope_qkv_rope_write(context: KernelContext) -> Kernel:
    """``rope.qkv_rope_write``."""
    return runtime_of(context).qkv_rope_write


def make_activation_silu_and_mul(context: KernelContext) -> Kernel:
    """``activation.silu_and_mul``."""
    return runtime_of(context).silu_and_mul


def make_activation_gelu_tanh_and_mul(context: KernelContext) -> Kernel:
    """``activation.gelu_tanh_and_mul``."""
    return runtime_of(context).gelu_tanh_and_mul


def make_embedding_lookup(context: KernelContext) -> Kernel:
    """``embedding.lookup``."""
    return runtime_of(context).lookup


def make_cache_write(context: KernelContext) -> Kernel:
    """``cache.write``."""
    return runtime_of(context).write


def make_attention_decode(context: KernelContext) -> Kernel:
    """``attention.decode``."""
    return runtime_of(context).decode


def make_attention_extend(context: KernelContext) -> Kernel:
    """``attention.extend``."""
    return runtime_of(context).extend


def make_sampling_argmax(context: KernelContext) -> Kernel:
    """``sampling.argmax``."""
    return runtime_of(context).argmax
