"""A module in place of ``flashinfer`` that computes what its documentation says, in plain torch on any device: the backends' own arithmetic is then tested
without a GPU. Only what they use is there, and wrong types or places of arguments are refused as the compiled code would."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import pytest
import torch


def attend(q, keys, values, *, causal, sm_scale, soft_cap=None, window_left=-1):
    """q (n, H, D), keys (m, Hk, D), values (m, Hk, Dv): query i is the token m - n + i."""
    n, m = q.shape[0], keys.shape[0]
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys.float().repeat_interleave(group, 1)) * sm_scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at, position = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    if causal:
        scores = scores.masked_fill(position > at, -torch.inf)
    if window_left >= 0:
        scores = scores.masked_fill(position < at - window_left, -torch.inf)
    out = torch.einsum("hnm,mhd->nhd", torch.softmax(scores, -1), values.float().repeat_interleave(group, 1))
    return out.to(q.dtype)


def on_host(*tensors):
    for tensor in tensors:
        assert tensor.device.type == "cpu"
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


class Wrapper:
    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace, layout="NHD", **options):
        assert workspace.dtype == torch.uint8
        self.layout, self.options, self.plans = layout, options, 0
        Wrapper.made.append(self)

    def remember(self, *, sm_scale, window_left, logits_soft_cap, causal, num_qo_heads, num_kv_heads, **_):
        self.plans += 1
        self.heads = num_qo_heads, num_kv_heads
        self.rules = {
            "sm_scale": sm_scale,
            "soft_cap": logits_soft_cap,
            "window_left": window_left,
            "causal": causal,
        }

    def paged(self, q, cache):
        k, v = cache
        out = []
        for row in range(len(self.start) - 1):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            count = (len(pages) - 1) * self.page_size + int(self.last[row])
            keys, values = (part[pages] if self.layout == "NHD" else part[pages].transpose(1, 2) for part in (k, v))
            keys, values = (part.reshape(-1, *part.shape[2:])[:count] for part in (keys, values))
            assert (q.shape[1], keys.shape[1]) == self.heads
            out.append(attend(q[self.start[row] : self.start[row + 1]], keys, values, **self.rules))
        return torch.cat(out)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(self, qo_indptr, indptr, indices, last, *, head_dim_qk, head_dim_vo, page_size, **rest):
        on_host(qo_indptr, indptr, last)
        self.start, self.indptr, self.indices, self.last, self.page_size = qo_indptr, indptr, indices, last, page_size
        self.remember(**rest)

    def run(self, q, cache):
        return self.paged(q, cache)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(self, indptr, indices, last, *, head_dim, page_size, **rest):
        on_host(indptr, last)
        self.start = torch.arange(len(indptr))
        self.indptr, self.indices, self.last, self.page_size = indptr, indices, last, page_size
        self.remember(causal=False, **rest)

    def run(self, q, cache):
        return self.paged(q, cache)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def plan(self, qo_indptr, kv_indptr, *, head_dim_qk, head_dim_vo, **rest):
        on_host(qo_indptr, kv_indptr)
        self.start, self.kv_start = qo_indptr, kv_indptr
        self.remember(**rest)

    def run(self, q, k, v):
        pieces = zip(self.start, self.start[1:], self.kv_start, self.kv_start[1:], strict=False)
        return torch.cat([attend(q[a:b], k[c:d], v[c:d], **self.rules) for a, b, c, d in pieces])


class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, backend="auto"):
        assert workspace.dtype == torch.uint8

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type
    ):  # fmt: skip
        on_host(qo_indptr, kv_indptr, kv_len_arr)
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        self.start, self.lists, self.lengths, self.indices = qo_indptr, kv_indptr, kv_len_arr, kv_indices
        self.heads, self.page_size, self.causal, self.scale = num_heads, page_size, causal, sm_scale

    def run(self, q_nope, q_pe, ckv, kpe, out):
        assert q_nope.shape[1:] == (self.heads, 512)
        assert ckv.stride(-1) == kpe.stride(-1) == q_nope.stride(-1) == q_pe.stride(-1) == 1
        assert out.shape == q_nope.shape
        q = torch.cat((q_nope, q_pe), -1)
        for row, length in enumerate(self.lengths.tolist()):
            first = int(self.lists[row])
            pages = self.indices[first : first + -(-length // self.page_size)].long()
            keys = torch.cat((ckv[pages], kpe[pages]), -1).reshape(-1, 1, 576)[:length]
            at = slice(int(self.start[row]), int(self.start[row + 1]))
            out[at] = attend(q[at], keys, keys[..., :512], causal=self.causal, sm_scale=self.scale)
        return out


def module() -> ModuleType:
    """The module, with ``flashinfer.mla`` as its attribute."""
    made, latent = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    latent.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    for wrapper in (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    ):
        setattr(made, wrapper.__name__, wrapper)
    made.mla = latent
    return made


@pytest.fixture
def stand_in(monkeypatch):
    """``import flashinfer`` finds the stand-in; the list of its wrappers, in the order that they were made."""
    monkeypatch.setitem(sys.modules, "flashinfer", module())
    monkeypatch.setattr(Wrapper, "made", [])
    return Wrapper.made
