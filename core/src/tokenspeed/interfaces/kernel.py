"""Families, modes and signatures of kernels (``KernelSpec``, API 1).

The torch reference of each mode in ``tokenspeed.builtin.kernels`` defines correctness; every other kernel is compared with it.
Tensors are contiguous unless noted. ``layout`` is the text of a ``KVLayout``. Signatures by family and mode:

gemm
    ``linear(x, weight, bias=None) -> out``: x (T, K), row stride allowed; weight (N, K); bias (N); out (T, N).
    ``linear_silu_mul(x, weight, bias=None) -> out``: weight (2 I, K), gate rows before up rows; out (T, I) is ``silu(gate) * up``. Layers use it only where a
    kernel is meant for the objective asked for; its reference serves ``debug`` alone.
norm
    ``rms_norm(x, weight, eps) -> out``: x (T, H), weight (H); computed in fp32.
    ``add_rms_norm(x, residual, weight, eps) -> (out, residual)``: ``residual += x`` in place, out is its norm.
rope
    ``rotate(q, k, positions, cos_sin, head_dim, interleaved=False)``: in place on q (T, Hq * head_dim) and k (T, Hk * head_dim); positions (T) int64;
    cos_sin (max_pos, rotary_dim) fp32, first half cosines, second half sines; rotary_dim <= head_dim, even,
    0 leaves q and k as they are. The first rotary_dim elements of a head are rotated; pairs are (i, i + rotary_dim / 2), or (2 i, 2 i + 1) when
    ``interleaved``.
    ``qkv_rope_write(qkv, positions, cos_sin, q_heads, kv_heads, head_dim, k_cache, v_cache, slot_mapping, layout, q_norm=None, k_norm=None,
    eps=1e-6, interleaved=False, gate=False) -> q``: splits fused rows qkv (T, (Hq + 2 Hk) * head_dim), normalises q and k heads where weights
    (head_dim) are given, rotates them, writes k and v to the pages of ``slot_mapping`` (T) int64 (-1: not written) and returns q (T, Hq, head_dim). With
    ``gate`` (feature ``gate``) each query head is followed by its gate, qkv (T, (2 Hq + 2 Hk) * head_dim), and q and the gates (T, Hq, head_dim) return.
activation
    ``silu_and_mul(gate_up) -> out``: gate_up (T, 2 I), out (T, I).
    ``gelu_tanh_and_mul(gate_up) -> out``.
embedding
    ``lookup(ids, weight) -> out``: ids (T) int64, weight (V, H), out (T, H).
cache
    ``write(k, v, k_cache, v_cache, slot_mapping, layout)``: k (T, Hk, D), v (T, Hk, Dv).
    ``write_latent(latent, rope, cache, slot_mapping, layout, scale=1.0)``: one row a token, latent (T, R) then rope (T, E), row strides
    allowed, each divided by ``scale``, to the pages of a group of kind ``mla`` (one head of R + E).
    ``copy(pages, source, target)``: pages (P, ...), one contiguous block each; page ``target[i]`` becomes page ``source[i]``; both (n) int64, targets
    distinct and no source, -1: nothing happens.
    ``zero(pages, target)``: pages ``target`` (n) int64 become zeros, -1: none.
moe
    ``route(logits, top_k, scoring="softmax", renormalize=True, bias=None, groups=1, kept_groups=1, group_best=1) -> (weights, experts)``: logits (T, E);
    weights (T, top_k) fp32 of the softmax
    over all experts, or of each one's sigmoid (feature ``sigmoid``), made to sum to one with ``renormalize``; experts (T, top_k) int64, highest score
    first, the lower index of equals; bias (E) fp32 moves the choice and not the weights (feature ``bias``). With ``groups`` above 1 (feature ``groups``) the
    experts are that many equal blocks, and a row chooses among those of its ``kept_groups`` best, by the sum of the ``group_best`` best biased scores of each.
    ``experts(x, gate_up, down, weights, chosen) -> out``: x (T, H); gate_up (E, 2 I, H), gate rows before up rows; down (E, H, I); weights (T, k) fp32;
    chosen (T, k) int64, -1: none; out (T, H), the sum of ``silu(gate) * up`` through ``down`` of each row's experts by its weights, in fp32.
    Feature ``captures``: the host waits for nothing, so that a graph can hold the call.
recurrent
    ``copy(states, source, target)``: ``cache.copy`` over states (N, ...); the KV pool asks for it and for ``zero``, before a step, never captured.
    ``zero(states, target)``: ``cache.zero`` over states (N, ...).
    ``gated_linear(q, k, v, decay, states, slots, query_start, scale) -> out``: q, k (T, H, K); decay (T, H, K) or (T, H, 1) fp32; v (T, H, V); states
    (N, H, K, V) fp32, in place at slots (R) int64; query_start (R + 1) int32; of each head S = decay S + k v', out (T, H, V) = scale S' q.
comm
    ``all_reduce(x, group) -> x``: the sum of every rank's x, in place; group a process group of torch, ``None`` of one rank.
    ``all_gather(x, group) -> out``: x (T, N) of every rank side by side in rank order, out (T, size * N).
    ``reduce_scatter(x, group) -> out``: x (size * T, N); out (T, N), this rank's rows of the sum; x is left alone.
attention
    ``decode(q, k_cache, v_cache, page_table, seq_lens, width, scale, layout, window=0, softcap=0.0, sinks=None, prefix_intervals=None) -> out``:
    q (R * width, Hq, D); page_table (R, P) int32, row stride allowed; seq_lens (R) int32 with the new tokens counted; the ``width`` query tokens of a row
    are causal;
    prefix_intervals (n, 4) int32 host array with row numbers relative to the first decode row.
    ``extend(q, k_cache, v_cache, page_table, seq_lens, query_start, scale, layout, window=0, softcap=0.0, sinks=None) -> out``:
    q (T, Hq, D); query_start (R + 1) int32. In both modes out has q's shape with D of the value heads; a query token with no key to read yields zeros.
sampling
    ``argmax(logits) -> ids``: logits (R, V), ids (R) int64; lowest index wins; a row with NaN yields -1.
    ``draw(logits, index, temperature, top_k, top_p, min_p, seeds, positions) -> ids``: one token for each of the rows ``index`` (n) int64 of logits (R, V), row
    stride allowed; temperature > 0, top_p and min_p (n) fp64, the rest (n) int64; ids (n) int64. What is drawn: see ``builtin.kernels.draw``; a row with
    NaN or without a finite maximum yields any id in range.
    ``apply_bitmask(logits, bits, rows)``: logits (R, V), row stride allowed, changed in place: token i of row ``rows[j]`` becomes -inf where bit i % 32 of
    ``bits[j, i // 32]`` is 0; bits (n, ceil(V / 32)) int32; rows (n) int64, distinct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenspeed.plugins.specs import KERNEL_FAMILIES, KERNEL_OBJECTIVES

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "OBJECTIVES", "KernelContext", "KernelRequest"]

FAMILIES = KERNEL_FAMILIES
OBJECTIVES = KERNEL_OBJECTIVES


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """What a layer or backend asks ``select()`` for.

    Attributes:
        dtype: short name of the element type (``fp32``, ``bf16``, ``fp16``).
        layout: KV layout, or empty where none is involved.
        features: abilities the caller cannot do without.
        shape: known sizes by trait name, for example ``{"head_dim": 64}``.
        objective: one of ``OBJECTIVES``.
    """

    family: str
    mode: str
    dtype: str
    layout: str = ""
    features: frozenset[str] = frozenset()
    shape: Mapping[str, int] = field(default_factory=dict)
    objective: str = "latency"


@dataclass(frozen=True, kw_only=True)
class KernelContext:
    """What the factory of a kernel (``KernelSpec.factory``) is given; ``threads`` is the CPU thread count of this rank.

    ``shared`` lives as long as the rank's kernel registry: factories of one plugin keep common resources there (a thread pool) under their plugin's name.
    """

    device: torch.device
    threads: int
    shared: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
