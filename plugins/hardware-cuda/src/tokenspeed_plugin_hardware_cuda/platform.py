"""One rank's view of an NVIDIA GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenspeed.errors import PluginError
from tokenspeed.interfaces.platform import MemoryUse, Platform, PlatformContext, PlatformDefaults
from tokenspeed_plugin_hardware_cuda.nvml import Gpu, query, visible

if TYPE_CHECKING:
    import torch

__all__ = ["CudaPlatform"]


class CudaPlatform(Platform):
    """Platform ``cuda``; ``ctx.local_rank`` is the index of its device among the visible ones."""

    name = "cuda"

    def __init__(self, ctx: PlatformContext) -> None:
        super().__init__(ctx)
        self._tags: dict[str, int] = {}
        self._graph_pool: Any = None
        self._capture_stream: torch.cuda.Stream | None = None

    @functools.cached_property
    def _gpu(self) -> Gpu:
        gpus = visible(query(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        if self.ctx.local_rank >= len(gpus):
            raise PluginError(
                f"rank {self.ctx.local_rank} of this host has no GPU: {len(gpus)} visible (CUDA_VISIBLE_DEVICES)"
            )
        return gpus[self.ctx.local_rank]

    @property
    def device(self) -> torch.device:
        """``cuda:local_rank``."""
        import torch

        return torch.device("cuda", self.ctx.local_rank)

    @property
    def capability(self) -> tuple[int, ...]:
        """Compute capability, (9, 0) for Hopper."""
        return self._gpu.capability

    @property
    def defaults(self) -> PlatformDefaults:
        """For a large GPU. docs/acceptance/gpu.md has the figures of the bound on steps."""
        return PlatformDefaults(
            chunked_prefill_size=8192, max_num_seqs=256, page_size=64, overlap=True, max_step_ms=24.0
        )

    def preferences(self, kind: str) -> tuple[str, ...]:
        """FlashInfer reads long prompts fastest; Triton's decode reads a shared prefix once."""
        return {
            "attention_backend": ("triton", "flashinfer"),
            "attention_backend.extend": ("flashinfer", "triton"),
            "attention_backend.decode": ("triton", "flashinfer"),
        }.get(kind, ())

    def init_process(self) -> None:
        """Make the device current. Raises ``PluginError`` where torch cannot use it."""
        import torch

        if torch.version.cuda is None:
            raise PluginError(
                f"torch {torch.__version__} is built without CUDA; install a CUDA build, or serve with --device cpu"
            )
        torch.cuda.set_device(self.device)
        # fp32 products stay fp32: the tensor cores' shortened mantissa is a choice for the user, not for a library default.
        torch.backends.cuda.matmul.allow_tf32 = False

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The checkpoint's own; fp32 checkpoints run in bf16."""
        import torch

        return torch.bfloat16 if model_dtype == torch.float32 else model_dtype

    def default_dtype_name(self, model_dtype: str) -> str:
        """``default_dtype`` by name."""
        return "bfloat16" if model_dtype == "float32" else model_dtype

    def kv_memory_bytes(self, utilization: float) -> int:
        """What ``utilization`` of the device leaves beside everything in use, by this process or others, and what the allocator keeps for steps."""
        use = self.memory_use()
        return max(0, int(use.free - (1.0 - utilization) * use.total))

    def memory_use(self) -> MemoryUse:
        """As the driver and torch's allocator tell."""
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        scratch = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryUse(total=total, free=free, scratch=scratch, tags=dict(self._tags))

    @contextmanager
    def allocate(self, tag: str) -> Iterator[None]:
        """Count what is taken inside, context of libraries and driver included."""
        import torch

        before, _ = torch.cuda.mem_get_info(self.device)
        try:
            yield
        finally:
            after, _ = torch.cuda.mem_get_info(self.device)
            self._tags[tag] = self._tags.get(tag, 0) + max(0, before - after)

    def settle(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """Loaded weights leave blocks of what they were made from in the allocator: give them back."""
        import torch

        if tag == "weights":
            torch.cuda.empty_cache()

    def collective_backend(self) -> str:
        """NCCL."""
        return "nccl"

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        import torch

        torch.cuda.synchronize(self.device)

    @property
    def supports_graphs(self) -> bool:
        """True."""
        return True

    @property
    def asynchronous(self) -> bool:
        """True: work is queued on the current stream."""
        return True

    def capture_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm ``run`` up, capture it and return its replay. All graphs of the rank share one memory pool and were captured on one stream."""
        import torch

        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._graph_pool = torch.cuda.graph_pool_handle()
        current, stream = torch.cuda.current_stream(self.device), self._capture_stream
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache for each capture, which takes longer than the capture.
        with torch.cuda.stream(stream):
            run()
            graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph.replay

    def describe(self) -> str:
        """Name, architecture and memory."""
        gpu = self._gpu
        return f"cuda ({gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.memory / 2**30:.0f} GiB)"
