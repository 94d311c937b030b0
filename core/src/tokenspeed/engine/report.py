"""The start-up block: what every slot chose and why, as text and as JSON; and what the engine made of it once it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenspeed import __version__
from tokenspeed.config import EngineConfig
from tokenspeed.engine.attention_choice import LAYERS
from tokenspeed.engine.kv_events.config import LOOPBACK, binds, kv_events_of
from tokenspeed.engine.memory import size_text
from tokenspeed.engine.settings import tier_size
from tokenspeed.plugins.discovery import BUILTIN

if TYPE_CHECKING:
    from tokenspeed.engine.assembly import Assembly
    from tokenspeed.messages import EngineInfo, GroupInfo

__all__ = ["capacity_text", "explain_text", "to_json"]


def explain_text(assembly: Assembly, *, verbose: bool = False) -> str:
    """The block as lines of ``slot  choice  why``; ``verbose`` adds why each other candidate lost."""
    config = assembly.config
    lines = [f"TokenSpeed {__version__}"]
    for slot, choice in assembly.choices.items():
        version = assembly.host.records[choice.winner.plugin].version
        extra = f" on {assembly.platform.describe()}" if slot == "platform" else ""
        if slot == "model":
            extra = f" for {assembly.model.architecture}"
        if slot.startswith("attention.") and len(assembly.attention_kinds) > 1:
            extra = f" for {_layers_of(slot, assembly.attention_kinds)}"
        if slot == "kv_store":
            extra = f", {config.kvstore_timeout_ms:g} ms a call, asked for {config.prefetch_threshold} tokens and more"
        lines.append(f"  {slot:<17} {choice.winner.name} {version}{extra} ({choice.why})")
        if verbose:
            by_reason: dict[str, list[str]] = {}
            for loser in choice.losers:
                by_reason.setdefault(loser.reason, []).append(loser.name)
            lines += [f"  {'':<17}   not {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    for slot in ("tool_parser", "reasoning_parser", "renderer", "grammar_backend"):
        if slot not in assembly.choices:
            why = f" ({assembly.absent[slot]})" if slot in assembly.absent else ""
            lines.append(f"  {slot:<17} none{why}")
    lines.append(
        f"  {'kv cache':<17} {config.kv_cache_dtype}, layout {assembly.kv_layout.value}, page {assembly.page_size} tokens"
    )
    lines += [f"  {name:<17} {text}" for name, text in _cache_lines(config, assembly.page_size)]
    lines.append(
        f"  {'limits':<17} {config.dtype}, {config.max_model_len} tokens a request, {config.max_num_seqs} rows and "
        f"{config.chunked_prefill_size} tokens a step, overlap {'off' if config.disable_overlap_schedule else 'on'}"
    )
    if config.parallel.world_size > 1:
        lines.append(f"  {'parallel':<17} tensor parallel over {config.parallel.world_size} processes")
    if config.kernel_objective:
        lines.append(f"  {'kernels for':<17} {config.kernel_objective} (--kernel-objective)")
    for operation, solution in sorted(config.kernel_overrides.items()):
        lines.append(f"  {'kernel':<17} {operation} = {solution} (--kernel)")
    store = assembly.choices.get("kv_store")
    for name, values in assembly.plan.options.items():
        if name == BUILTIN and (store is None or store.winner.plugin != BUILTIN):
            continue  # its options are those of its KV store
        lines.append(
            f"  {'options':<17} {name}: {', '.join(f'{key}={value}' for key, value in sorted(values.items()))}"
        )
    if verbose:
        lines.append(f"  {'kernels':<17} one for each operation: tokenspeed kernels explain FAMILY.MODE")
    plugins = ", ".join(f"{plugin.name} {plugin.version}" for plugin in assembly.plan.plugins)
    lines.append(f"  {'plugins':<17} {plugins}")
    lines += [f"  {'broken plugin':<17} {name}: {_first_line(cause)}" for name, cause in assembly.host.broken]
    lines += [f"  {'warning':<17} {warning}" for warning in assembly.warnings]
    return "\n".join(lines)


def _layers_of(slot: str, kinds: Sequence[str]) -> str:
    """In words, what the slots of attention serve where a model has several kinds of layers."""
    _, *kind, _ = slot.split(".")
    return LAYERS[kind[0] if kind else kinds[0]]


def _cache_lines(config: EngineConfig, page_size: int) -> list[tuple[str, str]]:
    """(name, text) of what surrounds the KV cache, where it is on, as far as flags decide it."""
    if config.max_total_tokens is not None:
        pool = (
            f"{config.max_total_tokens} tokens, {-(-config.max_total_tokens // page_size)} pages (--max-total-tokens)"
        )
    elif config.kv_cache_memory_bytes is not None:
        pool = f"{size_text(config.kv_cache_memory_bytes)} (--kv-cache-memory-bytes)"
    else:
        pool = "sized from memory when the engine starts"
    lines = [("kv pool", pool)]
    if not config.enable_prefix_caching:
        lines.append(("prefix caching", "off"))
    ratio, size = tier_size(config)
    if size is not None or ratio:
        room = f"{size_text(size)} a process" if size is not None else f"{ratio:g} times the KV pool"
        lines.append(("host tier", f"{room}, {config.kvstore_write_policy}"))
    if (events := kv_events_of(config)) is not None:
        verb = "bound" if events.endpoint is None or binds(events.endpoint) else "connected to"
        replay = f", replay {events.replay_endpoint}" if events.replay_endpoint is not None else ""
        lines.append(("kv events", f"{verb} {events.endpoint or LOOPBACK}{replay}"))
    if config.enable_prefix_caching and config.session_retain_percent:
        lines.append(("sessions", f"keep at most {config.session_retain_percent} % of the KV pool between their turns"))
    return lines


def capacity_text(config: EngineConfig, info: EngineInfo) -> str:
    """What the running engine has: how fast its weights came, its KV pool and the tier below it, with the pages that sessions may keep, its captured graphs
    and what takes the device's memory.

    Args:
        config: the settings as assembly resolved them.
        info: what the engine says of itself; sizes are those of one rank.
    """
    ranks = config.parallel.world_size
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    tokens = info.kv_pages * info.page_size
    lines = []
    if info.weight_bytes and info.load_seconds:
        seconds = f"{info.load_seconds:.1f}" if info.load_seconds >= 1 else f"{info.load_seconds:.2f}"
        rate = f"{size_text(int(info.weight_bytes / info.load_seconds))}/s"
        lines.append(("weights", f"{size_text(info.weight_bytes)}{each} in {seconds} s, {rate}"))
    lines.append(
        (
            "kv pool",
            f"{info.kv_pages} pages of {info.page_size} tokens: {tokens} tokens, {size_text(info.kv_bytes)}{each}",
        )
    )
    if info.host_pages:
        text = f"{info.host_pages} pages, {size_text(info.host_bytes)}{each}, {config.kvstore_write_policy}"
        lines.append(("host tier", text))
    lines += [("cache group", _group_text(index, group)) for index, group in enumerate(info.groups)]
    if config.enable_prefix_caching and config.session_retain_percent:
        kept = info.kv_pages * config.session_retain_percent // 100
        lines.append(("sessions", f"keep at most {kept} pages between their turns ({config.session_retain_percent} %)"))
    if info.graphs:
        lines.append(("graphs", info.graphs))
    if info.memory:
        parts = [f"{name} {size_text(size)}" for name, size in info.memory.items() if name != "total" and size]
        lines.append(("memory", f"{', '.join(parts)} of {size_text(info.memory['total'])}"))
    return "\n".join(f"  {name:<17} {text}" for name, text in lines)


def _group_text(index: int, group: GroupInfo) -> str:
    """One of several cache groups."""
    kind = {"window": f"window of {group.span} tokens", "recurrent": f"states, kept every {group.span} tokens"}
    unit = "states" if group.kind == "recurrent" else "pages"
    host = f", {group.host_pages} on the host" if group.host_pages else ""
    return f"{index} {kind.get(group.kind, 'full')}: {group.pages} {unit} of {size_text(group.page_bytes)}{host}"


def to_json(assembly: Assembly) -> dict[str, Any]:
    """Plan, reasons, and what is installed but not used."""
    return {
        "version": __version__,
        "plan": assembly.plan.to_json(),
        "choices": {
            slot: {
                "winner": choice.winner.name,
                "why": choice.why,
                "losers": [{"name": loser.name, "reason": loser.reason} for loser in choice.losers],
            }
            for slot, choice in assembly.choices.items()
        },
        "plugins": [
            {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "status": record.status,
                "named": record.named,
                "first_party": record.first_party,
                "in_plan": any(plugin.name == record.name for plugin in assembly.plan.plugins),
                "cause": record.cause,
            }
            for record in sorted(assembly.host.records.values(), key=lambda record: record.name)
        ],
        "absent": dict(assembly.absent),
        "warnings": list(assembly.warnings),
        "failed_events": assembly.events.failed,
    }


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
