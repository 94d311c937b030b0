"""Runs a model class without an engine: reference kernels, reference attention, a ``PagedCache``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.builtin.kernels.catalog import REFERENCE_KERNELS
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.kernel import KernelContext
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.layers import check_complete
from tokenspeed.layers.attention import PagedLayer, bind_kv
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.parallel import ParallelGroup, ParallelGroups
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.specs import KernelSpec
from tokenspeed.testing.paged import PagedCache, Session
from tokenspeed.types import CacheGroup, KVLayout
from tokenspeed.weights.describe import ModelDescription
from tokenspeed.weights.stream import iterate_weights

__all__ = ["ModelHarness", "attention_context", "kernel_registry", "run_ranks"]


def kernel_registry(
    *extra: KernelSpec, platform: str = "cpu", capability: tuple[int, ...] = (), threads: int = 1, device: str = "cpu"
) -> KernelRegistry:
    """The reference kernels and ``extra``, chosen among as in an engine."""
    shared: dict[str, Any] = {}

    def context(plugin: str) -> KernelContext:  # noqa: ARG001
        return KernelContext(device=torch.device(device), threads=threads, shared=shared)

    contributions = [Contribution("builtin", spec) for spec in REFERENCE_KERNELS]
    contributions += [Contribution("under-test", spec) for spec in extra]
    return KernelRegistry(contributions, platform_name=platform, capability=capability, context_factory=context)


def attention_context(
    group: CacheGroup,
    q_heads: int,
    *,
    page_size: int = 4,
    layout: KVLayout = KVLayout.NHD,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    kernels: KernelRegistry | None = None,
    max_rows: int = 64,
    max_tokens: int = 1024,
    max_model_len: int = 4096,
    max_width: int = 8,
) -> AttentionContext:
    """Context of a backend under test."""
    return AttentionContext(
        q_heads=q_heads,
        group=group,
        group_index=0,
        layout=layout,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        device=device or torch.device("cpu"),
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        max_width=max_width,
        select_kernel=(kernels or kernel_registry()).select,
    )


class ModelHarness:
    """One rank of a model with loaded weights and a cache of its own.

    Args:
        model_class: the ``CausalLM`` class.
        description: the checkpoint.
        backend: attention backend class.
        group: the rank's parallel group, used for every group name.
    """

    def __init__(
        self,
        model_class: type[CausalLM],
        description: ModelDescription,
        *,
        backend: Callable[[AttentionContext], AttentionBackend] = TorchAttention,
        kernels: KernelRegistry | None = None,
        dtype: torch.dtype = torch.float32,
        layout: KVLayout = KVLayout.NHD,
        page_size: int = 4,
        num_pages: int = 128,
        group: ParallelGroup | None = None,
        seed: int = 0,
    ) -> None:
        registry = kernels or kernel_registry()
        config = description.hf_config
        groups = ParallelGroups(dict.fromkeys(("attn", "dense", "moe"), group)) if group else ParallelGroups()
        context = LayerContext(
            dtype=dtype, device=torch.device("cpu"), select_kernel=registry.select, groups=groups, kv_layout=layout
        )
        self.description = description
        self.model: CausalLM = model_class(config, context)
        check_complete(self.model, self.model.load_weights(iterate_weights(description, model=self.model)))
        self.groups = model_class.cache_groups(config, group.size if group else 1)
        self.cache = PagedCache(
            self.groups, page_size=page_size, num_pages=num_pages, layout=layout, dtype=dtype, seed=seed
        )
        layers = [module for module in self.model.modules() if isinstance(module, PagedLayer)]
        made = backend(
            attention_context(
                self.groups[0], layers[0].q_heads, page_size=page_size, layout=layout, dtype=dtype, kernels=registry
            )
        )
        self.backend = made
        bind_kv(self.model, self.cache, [(made, made)])

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the rows that ``batch`` asks for, fp32."""
        self.backend.init_forward_metadata(batch)
        hidden = self.model(batch)
        if batch.output_index is not None:
            hidden = hidden[batch.output_index]
        return self.model.logits(hidden).float()

    def prefill(self, tokens: Sequence[int], chunk: int = 0) -> tuple[Session, torch.Tensor]:
        """A new session that has computed ``tokens`` in chunks, and the logits of every position."""
        session = Session()
        step = chunk or len(tokens)
        parts = [
            self.run(self.cache.batch([(session, tokens[at : at + step])], all_logits=True))
            for at in range(0, len(tokens), step)
        ]
        return session, torch.cat(parts)

    def decode(self, sessions: Sequence[Session], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits after the last of the tokens that each session is given."""
        return self.run(self.cache.batch(decode=list(zip(sessions, tokens, strict=True))))

    def greedy(self, prompt: Sequence[int], count: int, chunk: int = 0) -> list[int]:
        """``count`` tokens after ``prompt``, the likeliest each time."""
        session, logits = self.prefill(prompt, chunk)
        out = [int(logits[-1].argmax())]
        while len(out) < count:
            out.append(int(self.decode([session], [[out[-1]]])[0].argmax()))
        self.cache.close(session)
        return out


class _ThreadGroup(ParallelGroup):
    """A parallel group whose ranks are threads of this process."""

    def __init__(self, size: int, rank: int, barrier: threading.Barrier, slots: list[torch.Tensor | None]) -> None:
        super().__init__(size, rank)
        self._barrier, self._slots = barrier, slots

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait(timeout=60)
        seen = [slot for slot in self._slots if slot is not None]
        self._barrier.wait(timeout=60)
        return seen

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(dim=0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)


def run_ranks(size: int, work: Callable[[ParallelGroup], Any]) -> list[Any]:
    """Call ``work`` once for every rank, each in a thread with its own ``ParallelGroup``; returns the results in rank order, raises the first error."""
    barrier = threading.Barrier(size)
    slots: list[torch.Tensor | None] = [None] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(_ThreadGroup(size, rank, barrier, slots))
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if broken or errors:
        raise (broken or errors)[0]
    return results
