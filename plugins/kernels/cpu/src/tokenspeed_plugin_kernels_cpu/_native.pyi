"""The kernels. Tensors live on the CPU; floats are float32 or bfloat16, sums are always fp32.

Every method raises ``TypeError`` for what is no tensor, ``ValueError`` naming the tensors that do not fit, ``IndexError`` for a position,
slot, page, length or token id out of range. The interpreter lock is released while a kernel works.
"""

from __future__ import annotations

from typing import Any

import torch

def supported_isas() -> list[str]:
    """Instruction sets that this processor runs, best first: of ``avx512_bf16``, ``avx512``, ``avx2``, ``portable``."""

class Runtime:
    """A thread pool and the kernels of one instruction set.

    Results do not depend on the number of threads. Calls from several threads are safe: one has the pool's workers, the others run
    alone. A forked child must make a runtime of its own: threads do not survive a fork.
    """

    def __init__(self, num_threads: int, isa: str = "") -> None:
        """``num_threads`` counts the calling thread; ``isa`` empty takes the best. Both are fixed for the runtime's life."""

    @property
    def num_threads(self) -> int:
        """Threads that share a call's work, the caller included."""

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T + bias``: x (T, K), row stride allowed; weight (N, K); bias (N); out (T, N), row stride allowed.

        All of one type; ``out`` may be float32 beside bfloat16 inputs (logits). A row's result is bitwise the same for every number of rows.
        """

    def linear_silu_mul(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``silu(x @ gate.T) * (x @ up.T)``: weight (2 N, K) = [gate; up]; bias (2 N); out (T, N). Otherwise as ``linear``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x * x) + eps) * weight``: x (..., H) contiguous, weight (H) of either float type."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual += x`` in place; returns (its norm, residual). x and residual (..., H) contiguous and alike."""

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
        interleaved: bool = False,
    ) -> None:
        """Rotary embedding in place on q (T, Hq * head_dim) and k (T, Hk * head_dim), row strides allowed.

        positions (T) int32 or int64; cos_sin (max_pos, rotary_dim) float32, first half cosines, second half sines. Pairs are values i and
        i + rotary_dim / 2, or 2 i and 2 i + 1 where ``interleaved``; values from rotary_dim on stay as they are.
        """

    def qkv_rope_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        layout: str,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Split qkv (T, (Hq + 2 Hk) * D), norm heads where weights (D) are given, rotate, write k and v; returns q (T, Hq, D).

        slot_mapping (T) int64 is page * page_size + offset, -1 = not written. Caches (pages, Hk, page_size, D) for layout ``HND``,
        (pages, page_size, Hk, D) for ``NHD``, of either float type.
        """

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``: gate_up (..., 2 I) contiguous, gate first -> (..., I)."""

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` with the tanh approximation: gate_up (..., 2 I) contiguous, gate first -> (..., I)."""

    def lookup(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of weight (V, H) at ids (T) int32 or int64 -> (T, H)."""

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        layout: str,
    ) -> None:
        """Put k (T, Hk, D) and v (T, Hk, Dv), row strides allowed, at slot_mapping (T) int64; -1 = not written. Caches of either float type."""

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        width: int,
        scale: float,
        layout: str,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        prefix_intervals: Any = None,
    ) -> torch.Tensor:
        """Flash decoding: q (R * width, Hq, D) -> (R * width, Hq, Dv); the ``width`` query tokens of a row are causal.

        page_table (R, P) int32, row stride allowed; seq_lens (R) int32 with the new tokens counted; ``window`` > 0 limits a query to the
        last so many positions, its own counted; sinks (Hq) float32 join the softmax without a value; prefix_intervals (n, 4) int32 on the
        host, a tensor or an array: (row_begin, row_end, first page index, pages), outer before inner: what rows share is then read once.
        A row's result is bitwise the same in every batch, with and without intervals. A row of length 0 gives zeros.
        """

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        scale: float,
        layout: str,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of chunks over their prefix and themselves: q (T, Hq, D) -> (T, Hq, Dv).

        query_start (R + 1) int32: row r owns tokens query_start[r] to query_start[r + 1], the last of its seq_lens[r] positions. The rest
        as in ``decode``. A token's result is bitwise the same however its prompt is cut into chunks.
        """

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Index of the largest of each row of logits (R, V), row stride allowed -> (R) int64; the lowest wins a tie, a row with NaN is -1."""
