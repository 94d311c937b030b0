"""What core contributes: a toy model, the CPU platform, the reference attention backend, the reference kernels and a KV store in memory."""

from __future__ import annotations

from tokenspeed.builtin.kernels.catalog import REFERENCE_KERNELS
from tokenspeed.plugins import (
    AttentionBackendSpec,
    AttentionSupport,
    KernelSpec,
    KVStoreSpec,
    ModelSpec,
    OptionSpec,
    PlatformSpec,
    Priority,
    hookimpl,
)

_REFERENCE = Priority.REFERENCE


@hookimpl
def tokenspeed_models() -> list[ModelSpec]:
    """The model behind ``tokenspeed serve toy``."""
    target, text = "tokenspeed.builtin.toy:ToyForCausalLM", "two layers of random weights over bytes"
    return [
        ModelSpec(name="toy", target=target, priority=_REFERENCE, architectures=("ToyForCausalLM",), description=text)
    ]


@hookimpl
def tokenspeed_platforms() -> list[PlatformSpec]:
    """The host's processor."""
    module = "tokenspeed.builtin.platform_cpu"
    return [
        PlatformSpec(
            name="cpu",
            target=f"{module}:CpuPlatform",
            detect=f"{module}:detect",
            device_type="cpu",
            priority=_REFERENCE,
        )
    ]


@hookimpl
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:
    """The definition of attention."""
    target = "tokenspeed.builtin.attention.torch_backend:TorchAttention"
    supports = AttentionSupport(kinds=("mha", "gqa", "mla", "window"), sinks=True, softcap=True)
    return [
        AttentionBackendSpec(
            name="torch", target=target, priority=_REFERENCE, supports=supports, description="reference"
        )
    ]


@hookimpl
def tokenspeed_kernels() -> list[KernelSpec]:
    """The definition of every kernel."""
    return list(REFERENCE_KERNELS)


@hookimpl
def tokenspeed_kv_stores() -> list[KVStoreSpec]:
    """A store that ends with the process: for tests, and to see what an L3 would hit."""
    target, text = "tokenspeed.builtin.memory_store:MemoryStore", "in this process, gone with it"
    return [KVStoreSpec(name="memory", target=target, priority=_REFERENCE, durable=False, description=text)]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Options of the built-ins."""
    return [
        OptionSpec(
            name="memory_store_mb",
            type=int,
            default=1024,
            minimum=1,
            maximum=1 << 30,
            help="cap of the KV store memory",
        )
    ]
