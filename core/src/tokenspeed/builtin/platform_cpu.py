"""The platform ``cpu``: threads, memory and defaults of the host processor. Importing this module imports no torch."""

from __future__ import annotations

import platform as host
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenspeed.builtin.host import available_memory, cpu_features, usable_cpus
from tokenspeed.builtin.huge_pages import collapse, prefer
from tokenspeed.interfaces.platform import Platform, PlatformDefaults

if TYPE_CHECKING:
    import torch

__all__ = ["CpuPlatform", "detect"]

# Of the memory that is free once the weights are in place. The pool's pages are touched only when used; a host also has to serve.
_KV_SHARE = 0.25
_KV_LIMIT = 4 << 30
_PREFERENCES = {"attention_backend": ("sdpa",)}


def detect() -> str:
    """One line on the processor; a host always has one."""
    return f"{host.machine()} ({len(usable_cpus())} CPUs)"


class CpuPlatform(Platform):
    """Synchronous execution on the host's processor."""

    name = "cpu"

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def capability(self) -> tuple[int, ...]:
        return ()

    @property
    def defaults(self) -> PlatformDefaults:
        return PlatformDefaults(chunked_prefill_size=256, max_num_seqs=64, page_size=16, overlap=False)

    @property
    def threads(self) -> int:
        """CPU threads of this rank: what was asked for, otherwise an equal share of the CPUs that this process may use."""
        return self.ctx.threads or max(1, len(usable_cpus()) // self.ctx.local_world_size)

    def preferences(self, kind: str) -> tuple[str, ...]:
        return _PREFERENCES.get(kind, ())

    def init_process(self) -> None:
        import torch

        torch.set_num_threads(self.threads)
        # Denormals stay as the process has them: flushing is a state of the calling thread, and with `LLM` that thread is the user's.

    def default_dtype_name(self, model_dtype: str) -> str:
        """bfloat16 stays where the processor multiplies it; otherwise, and for float16, float32."""
        return "bfloat16" if model_dtype == "bfloat16" and _multiplies_bf16() else "float32"

    def default_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        import torch

        keeps = self.default_dtype_name(str(model_dtype).removeprefix("torch.")) == "bfloat16"
        return torch.bfloat16 if keeps else torch.float32

    def kv_memory_bytes(self, utilization: float) -> int:
        return (
            int(min(available_memory() * _KV_SHARE * min(1.0, utilization / 0.9), _KV_LIMIT))
            // self.ctx.local_world_size
        )

    def settle(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Into huge pages: a step reads all weights, and finds keys and values all over the pool."""
        blocks = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        (collapse if tag == "weights" else prefer)(blocks)

    def collective_backend(self) -> str:
        return "gloo"

    def describe(self) -> str:
        features = cpu_features()
        best = next((text for flag, text in _INSTRUCTION_SETS if flag in features), host.machine())
        return f"cpu ({best}, {self.threads} thread{'s' if self.threads > 1 else ''})"


_INSTRUCTION_SETS = (
    ("amx_bf16", "AMX"),
    ("avx512_bf16", "AVX-512 BF16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("bf16", "NEON BF16"),
    ("asimd", "NEON"),
)


def _multiplies_bf16() -> bool:
    return bool(cpu_features() & {"amx_bf16", "avx512_bf16", "bf16"})
