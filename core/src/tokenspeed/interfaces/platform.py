"""Contract of an accelerator target (``PlatformSpec``, API 1). What a vendor would have to patch core for is a method here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryUse", "Platform", "PlatformContext", "PlatformDefaults"]


@dataclass(frozen=True, kw_only=True)
class PlatformContext:
    """``local_rank`` counts engine ranks on this host; ``threads`` is the CPU threads that this rank may use (0: decide)."""

    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlatformDefaults:
    """Defaults of flags that depend on the device.

    Attributes:
        chunked_prefill_size: tokens of one step.
        max_num_seqs: rows of one step.
        page_size: tokens of a KV page unless the chosen backends want another.
        overlap: whether the next plan is made while a step runs.
        max_step_ms: bound on the predicted length of a step while decodes run, in milliseconds; many waiting prompts widen it; 0 is none.
    """

    chunked_prefill_size: int
    max_num_seqs: int
    page_size: int
    overlap: bool
    max_step_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """A device's memory at one moment, in bytes.

    Attributes:
        total: all of it, in use or not.
        free: what nobody has, whoever asks.
        scratch: what the rank's allocator keeps for steps while no tensor is in it; after a step as large as any, the most that steps take.
        tags: what was taken under each tag of ``Platform.allocate``.
    """

    total: int
    free: int
    scratch: int = 0
    tags: Mapping[str, int] = field(default_factory=dict)


class Platform(ABC):
    """One rank's view of its device. Streams and events are torch's own (``torch.Stream``, ``torch.Event``), which name their device: every accelerator that
    torch knows has them.

    Assembly runs in processes that have no torch: importing the class, constructing it, and reading ``capability``, ``defaults``, ``preferences``,
    ``default_dtype_name``, ``supports_graphs`` and ``describe`` must not import torch and must not create a device context.
    """

    name: str = ""

    def __init__(self, ctx: PlatformContext) -> None:
        self.ctx = ctx

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that tensors of this rank live on."""

    @property
    @abstractmethod
    def capability(self) -> tuple[int, ...]:
        """Comparable capability, for example ``(9, 0)``; ``()`` where the notion does not apply."""

    @property
    @abstractmethod
    def defaults(self) -> PlatformDefaults:
        """Defaults of device-dependent flags."""

    @abstractmethod
    def preferences(self, kind: str) -> tuple[str, ...]:
        """Names of kind ``kind`` in this platform's order; unlisted ones follow by priority.

        Asked for every slot that is filled without a flag: ``attention_backend`` (by phase first: ``attention_backend.extend``, ``attention_backend.decode``),
        ``model`` and ``grammar_backend``. Kernels go by objective and priority alone.
        """

    @abstractmethod
    def init_process(self) -> None:
        """Bind this process to the device (threads, current device). Called once, first."""

    @abstractmethod
    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """What ``--dtype auto`` means for a checkpoint of ``model_dtype``."""

    def default_dtype_name(self, model_dtype: str) -> str:
        """``default_dtype`` by name (``float32``, ``bfloat16``, ``float16``), for assembly."""
        return model_dtype

    @abstractmethod
    def kv_memory_bytes(self, utilization: float) -> int:
        """Bytes that the KV pool may take now, so that no more than the share ``utilization`` of the device is in use.

        On platforms that are ``asynchronous`` the weights are in place and the largest step has run: what steps need besides is in use, or kept for them.
        """

    @abstractmethod
    def collective_backend(self) -> str:
        """Name for ``torch.distributed.init_process_group``, for example ``gloo``."""

    def allocate(self, tag: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Device allocations made inside belong to ``tag`` (``weights``, ``kv``, ``graphs``): a platform may count them (``MemoryUse.tags``) or place them
        apart. Default: tags are not told apart."""
        return nullcontext()

    def memory_use(self) -> MemoryUse | None:
        """The device's memory now; ``None`` (the default) where it is the host's, or cannot be told."""
        return None

    def settle(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """``tensors`` of ``tag`` stay where they are as long as the engine lives: ``weights`` are loaded, ``kv`` is reserved and not written yet. A platform
        may arrange their memory for fast reading. Default: nothing."""
        return

    def synchronize(self) -> None:
        """Wait for the device. Nothing to do where execution is synchronous."""

    @property
    def supports_graphs(self) -> bool:
        """Whether ``capture_graph`` works."""
        return False

    def capture_graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record the device work of ``run``, which must always do the same on the same memory, and return a function that queues it again. ``run`` is called
        more than once. Graphs share their scratch memory: of what a replay computes, only
        what ``run`` wrote to memory from outside survives the next replay."""
        raise NotImplementedError(f"platform {self.name} captures no graphs")

    @property
    def asynchronous(self) -> bool:
        """Whether work is queued on a stream, so that overlap needs tokens to stay on the device."""
        return False

    def describe(self) -> str:
        """One line for the start-up block, for example ``cpu (AVX2, 2 threads)``."""
        return self.name
