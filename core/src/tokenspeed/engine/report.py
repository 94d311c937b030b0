"""The start-up block: what every slot chose and why, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenspeed import __version__

if TYPE_CHECKING:
    from tokenspeed.engine.assembly import Assembly

__all__ = ["explain_text", "to_json"]


def explain_text(assembly: Assembly, *, verbose: bool = False) -> str:
    """The block as lines of ``slot  choice  why``; ``verbose`` adds why each other candidate lost."""
    config = assembly.config
    lines = [f"TokenSpeed {__version__}"]
    for slot, choice in assembly.choices.items():
        version = assembly.host.records[choice.winner.plugin].version
        extra = f" on {assembly.platform.describe()}" if slot == "platform" else ""
        if slot == "model":
            extra = f" for {assembly.model.architecture}"
        lines.append(f"  {slot:<17} {choice.winner.name} {version}{extra} ({choice.why})")
        if verbose:
            by_reason: dict[str, list[str]] = {}
            for loser in choice.losers:
                by_reason.setdefault(loser.reason, []).append(loser.name)
            lines += [f"  {'':<17}   not {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    for slot in ("tool_parser", "reasoning_parser", "renderer", "grammar_backend"):
        if slot not in assembly.choices:
            lines.append(f"  {slot:<17} none")
    lines.append(
        f"  {'kv cache':<17} {config.kv_cache_dtype}, layout {assembly.kv_layout.value}, page {assembly.page_size} tokens"
    )
    lines.append(
        f"  {'limits':<17} {config.dtype}, {config.max_model_len} tokens a request, {config.max_num_seqs} rows and "
        f"{config.chunked_prefill_size} tokens a step, overlap {'off' if config.disable_overlap_schedule else 'on'}"
    )
    if config.parallel.world_size > 1:
        lines.append(f"  {'parallel':<17} tensor parallel over {config.parallel.world_size} processes")
    for operation, solution in sorted(config.kernel_overrides.items()):
        lines.append(f"  {'kernel':<17} {operation} = {solution} (--kernel)")
    for name, values in assembly.plan.options.items():
        lines.append(
            f"  {'options':<17} {name}: {', '.join(f'{key}={value}' for key, value in sorted(values.items()))}"
        )
    plugins = ", ".join(f"{plugin.name} {plugin.version}" for plugin in assembly.plan.plugins)
    lines.append(f"  {'plugins':<17} {plugins}")
    lines += [f"  {'broken plugin':<17} {name}: {_first_line(cause)}" for name, cause in assembly.host.broken]
    lines += [f"  {'warning':<17} {warning}" for warning in assembly.warnings]
    return "\n".join(lines)


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
        "warnings": list(assembly.warnings),
        "failed_events": assembly.events.failed,
    }


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
