"""What the flags that were left open become, from the model's configuration and the platform. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from tokenspeed.interfaces.platform import Platform
    from tokenspeed.weights.describe import ModelDescription

__all__ = [
    "DTYPES",
    "KV_DTYPES",
    "AttentionShape",
    "attention_shape",
    "attention_shapes",
    "resolve_dtype",
    "resolve_limits",
    "resolve_parallel",
    "resolved",
    "tier_size",
]

#: Values of ``--kvstore-write-policy``.
_WRITE_POLICIES = ("write-through", "write-on-evict", "selective")

#: Names of ``--dtype`` and the short names that specs use.
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

#: Names of ``--kv-cache-dtype`` likewise; ``fp8`` is e4m3 without scales, which ``fp8_e4m3`` names too.
KV_DTYPES = {**DTYPES, "fp8": "fp8"}
_LONG = {short: name for name, short in DTYPES.items()} | {"half": "float16", "float": "float32"}
_KV_ALIASES = {**_LONG, "fp8_e4m3": "fp8"}

# What the scheduler can hold; checked here so that a wrong flag ends the start before any weight is read.
_BOUNDS = {
    "max_model_len": (2, 1 << 30),  # a prompt token and a generated one
    "max_num_seqs": (1, 65_536),
    "chunked_prefill_size": (1, 1 << 30),
    "max_total_tokens": (1, 1_000_000_000),
    "kv_cache_memory_bytes": (1, 1 << 62),
    "block_size": (1, 65_536),
    "max_step_ms": (0, 3_600_000),
    "kvstore_ratio": (0, 1_000_000),
    "kvstore_size": (1, 1 << 62),
    "kvstore_timeout_ms": (1, 86_400_000),
    "prefetch_threshold": (1, 1 << 30),
}


_UNSET = EngineConfig(model="")

#: Kinds of attention layers, the main one of a model first.
_KINDS = ("full", "window", "mla")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the model asks of attention: ``kind``, and ``window`` as one more, as in ``AttentionSupport.kinds``."""

    kind: str
    head_dim: int
    q_heads: int
    kv_heads: int
    window: bool = False
    softcap: bool = False


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def attention_shape(config: Mapping[str, Any]) -> AttentionShape:
    """Read the attention of ``config.json``. Raises ``ConfigError`` naming a key that is missing.

    A window counts as on where a size is given and ``use_sliding_window`` does not switch it off. What a class adds by itself (sinks) shows when its layers
    are bound to their backends, before the first request.
    """
    text = text_config(config)
    shape = _shape_of_heads(text)
    return _shape_of_latents(text, shape) if text.get("kv_lora_rank") else shape


def attention_shapes(config: Mapping[str, Any], kinds: Sequence[str] = ()) -> dict[str, AttentionShape]:
    """What each kind of the model's attention layers asks, by ``full``, ``window`` and ``mla``; the first one is the main kind.

    ``config.json`` tells windows and full attention apart by ``layer_types``. Where it does not, there is one kind, and whatever serves it must be able to do
    all that the configuration speaks of.

    Args:
        kinds: of ``ModelSpec.attention_kinds``; they come before what the configuration says.

    Raises:
        ConfigError: a key is missing.
        PluginError: ``kinds`` holds something else.
    """
    text = text_config(config)
    main = attention_shape(config)
    types = text.get("layer_types")
    if kinds:
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise PluginError(
                f"the model's spec lists attention_kinds {', '.join(unknown)}; there are {', '.join(_KINDS)}"
            )
        heads = _shape_of_heads(text)
        shapes = {
            "full": lambda: replace(heads, window=False),
            "window": lambda: replace(heads, window=True),
            "mla": lambda: replace(_shape_of_latents(text, heads), window=False),
        }
        return {kind: shapes[kind]() for kind in _KINDS if kind in kinds}
    told = {str(kind) for kind in types} if isinstance(types, (list, tuple)) else set()
    if main.window and main.kind != "mla" and {"full_attention", "sliding_attention"} <= told:
        return {"full": replace(main, window=False), "window": main}
    return {"mla" if main.kind == "mla" else "window" if main.window else "full": main}


def _shape_of_heads(text: Mapping[str, Any]) -> AttentionShape:
    try:
        q_heads = int(text["num_attention_heads"])
        kv_heads = int(text.get("num_key_value_heads") or q_heads)
        head_dim = int(text.get("head_dim") or text["hidden_size"] // q_heads)
    except KeyError as error:
        raise ConfigError(f"the model's configuration has no {error.args[0]!r}, which attention is chosen by") from None
    return AttentionShape(
        kind="mha" if kv_heads == q_heads else "gqa",
        head_dim=head_dim,
        q_heads=q_heads,
        kv_heads=kv_heads,
        window=bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False,
        softcap=bool(text.get("attn_logit_softcapping")),
    )


def _shape_of_latents(text: Mapping[str, Any], heads: AttentionShape) -> AttentionShape:
    try:
        size = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    except KeyError as error:
        raise ConfigError(f"the model's configuration has no {error.args[0]!r}, which attention is chosen by") from None
    return replace(heads, kind="mla", kv_heads=1, head_dim=size)


def resolve_parallel(parallel: ParallelConfig, shape: AttentionShape) -> ParallelConfig:
    """Fill in group sizes; refuse by name what does not work.

    Raises:
        ConfigError: a group size that differs from the tensor parallel size, a wrong world size, or heads that cannot be divided.
    """
    size = parallel.tensor_parallel_size
    if size < 1:
        raise ConfigError(f"--tensor-parallel-size {size}: it must be at least 1")
    for name in ("attn_tp_size", "dense_tp_size", "moe_tp_size"):
        value = getattr(parallel, name)
        if value is not None and value != size:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} with --tensor-parallel-size {size} is not supported; "
                f"leave it out or give {size}"
            )
    if parallel.world_size not in (1, size):
        raise ConfigError(f"--world-size {parallel.world_size}: it must be the tensor parallel size, {size}")
    if not _heads_fit(shape, size):
        works = [str(ranks) for ranks in range(1, max(shape.q_heads, shape.kv_heads) + 1) if _heads_fit(shape, ranks)]
        raise ConfigError(
            f"--tensor-parallel-size {size}: the model's {shape.q_heads} query heads over {shape.kv_heads} KV heads cannot be dealt out to {size} ranks, "
            f"since more ranks than KV heads must be a multiple of these and divide the query heads; sizes that work: {', '.join(works)}"
        )
    return ParallelConfig(
        tensor_parallel_size=size, attn_tp_size=size, dense_tp_size=size, moe_tp_size=size, world_size=size
    )


def _heads_fit(shape: AttentionShape, ranks: int) -> bool:
    """As ``layers.parallel.shard_heads`` deals heads out: whole KV groups (the last rank may be padded), or with fewer KV heads than ranks, copies of them."""
    return shape.kv_heads >= ranks or not (ranks % shape.kv_heads or shape.q_heads % ranks)


def resolve_dtype(config: EngineConfig, model: ModelDescription, platform: Platform) -> tuple[str, str]:
    """(dtype, KV cache dtype) by their long names; short ones and vLLM's are taken too. Raises ``ConfigError`` for a name that is none."""
    dtype = _LONG.get(config.dtype, config.dtype)
    if dtype == "auto":
        dtype = platform.default_dtype_name(model.dtype if model.dtype in DTYPES else "float32")
    asked = config.kv_cache_dtype
    kv_dtype = dtype if asked == "auto" else _KV_ALIASES.get(asked, asked)
    for flag, name, names in (("--dtype", dtype, DTYPES), ("--kv-cache-dtype", kv_dtype, KV_DTYPES)):
        if name not in names:
            raise ConfigError(f"{flag} {name}: choose from auto, {', '.join(names)}")
    return dtype, kv_dtype


def resolve_limits(config: EngineConfig, model: ModelDescription, platform: Platform) -> EngineConfig:
    """Lengths and row counts, from the model and the platform where the user left them open.

    Raises:
        ConfigError: a value outside its bounds, or longer than the model can take.
    """
    for name, (low, high) in _BOUNDS.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            need = f"at most {high}" if value > high else f"at least {low}"
            raise ConfigError(f"--{name.replace('_', '-')} {value}: it must be {need} (accepted: {low} to {high})")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization:g}: it must be above 0 and at most 1"
        )
    if config.max_total_tokens is not None and config.kv_cache_memory_bytes is not None:
        raise ConfigError("--max-total-tokens and --kv-cache-memory-bytes both size the KV pool; give one of them")
    _check_tiers(config)
    longest = text_config(model.config).get("max_position_embeddings")
    max_model_len = config.max_model_len or longest
    if max_model_len is None:
        raise ConfigError("the model's configuration states no max_position_embeddings; give --max-model-len")
    if longest is not None and max_model_len > longest:
        raise ConfigError(f"--max-model-len {max_model_len}: the model was made for {longest} positions at most")
    if config.cudagraph_capture_sizes and not platform.supports_graphs:
        raise ConfigError(f"--cudagraph-capture-sizes: platform {platform.name} captures no graphs")
    defaults = platform.defaults
    overlap_off = config.disable_overlap_schedule
    return msgspec.structs.replace(
        config,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or defaults.max_num_seqs,
        chunked_prefill_size=config.chunked_prefill_size or defaults.chunked_prefill_size,
        disable_overlap_schedule=not defaults.overlap if overlap_off is None else overlap_off,
        max_step_ms=defaults.max_step_ms if config.max_step_ms is None else config.max_step_ms,
    )


def tier_size(config: EngineConfig) -> tuple[float, int | None]:
    """The host tier: ratio to the device's pages, and bytes, of which the second one counts where it is given; 0 and ``None`` for no host tier."""
    default = 1.0 if config.kvstore is not None and config.kvstore_size is None else 0.0
    return default if config.kvstore_ratio is None else config.kvstore_ratio, config.kvstore_size


def _check_effect(config: EngineConfig) -> None:
    """Refuse what only a host tier or a store would read, where there is none. A default that was given cannot be told from one that was not."""
    ratio, size = tier_size(config)
    tier = "a host tier, which --kvstore-ratio, --kvstore-size or --kvstore gives"
    store = "a KV store, which --kvstore names"
    for name, there, what in (
        ("kvstore_write_policy", ratio > 0 or size is not None, tier),
        ("kvstore_timeout_ms", config.kvstore is not None, store),
        ("prefetch_threshold", config.kvstore is not None, store),
    ):
        value, default = getattr(config, name), getattr(_UNSET, name)
        if not there and value != default:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"--{name.replace('_', '-')} {shown}: it has no effect without {what}")


def _check_tiers(config: EngineConfig) -> None:
    if config.kvstore_ratio is not None and config.kvstore_size is not None:
        raise ConfigError("--kvstore-ratio and --kvstore-size both size the host tier; give one of them")
    if config.kvstore_write_policy not in _WRITE_POLICIES:
        raise ConfigError(
            f"--kvstore-write-policy {config.kvstore_write_policy}: choose from {', '.join(_WRITE_POLICIES)}"
        )
    _check_effect(config)
    if not config.enable_prefix_caching:
        for name in ("kvstore", "kvstore_ratio", "kvstore_size"):
            if value := getattr(config, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} {value}: --no-enable-prefix-caching leaves nothing to keep there; leave one out"
                )
    if not 0 <= config.session_retain_percent <= 100:
        raise ConfigError(f"--session-retain-percent {config.session_retain_percent}: it must lie in 0..100")


def resolved(value: int | None) -> int:
    """A setting that assembly has resolved."""
    assert value is not None, "assembly resolves every limit"
    return value
