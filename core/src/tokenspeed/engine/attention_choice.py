"""Which attention backend serves which layers: one for each kind of them and each phase, over pages that all of them can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.config import EngineConfig
from tokenspeed.engine.settings import DTYPES, KV_DTYPES, AttentionShape
from tokenspeed.errors import NothingFitsError
from tokenspeed.interfaces.platform import Platform
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.selection import Choice, Need, select
from tokenspeed.plugins.specs import AttentionBackendSpec, ModelSpec
from tokenspeed.types import CacheGroup, KVLayout

__all__ = [
    "LAYERS",
    "PHASES",
    "AttentionChoice",
    "AttentionUse",
    "attention_slot",
    "choose_attention",
    "choose_backends",
    "missing_kind",
]

PHASES = ("extend", "decode")
#: Kinds of layers, in words for messages.
LAYERS = {"full": "full-attention layers", "window": "sliding-window layers", "mla": "layers of latents"}
_PHASE_FLAGS = {"extend": "prefill_attention_backend", "decode": "decode_attention_backend"}


@dataclass(frozen=True, kw_only=True)
class AttentionUse:
    """What attention will be used for; ``page_size`` is the user's, or ``None``."""

    shape: AttentionShape
    dtype: str
    kv_dtype: str
    page_size: int | None


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A backend for each kind of layers and each phase, and the KV layout and page size that all of them share. The first kind is the main one."""

    by_kind: Mapping[str, Mapping[str, Choice[AttentionBackendSpec]]]
    layout: KVLayout
    page_size: int

    @property
    def slots(self) -> dict[str, Choice[AttentionBackendSpec]]:
        """Every choice by the name of its slot."""
        kinds = tuple(self.by_kind)
        return {attention_slot(kinds, kind, phase): self.by_kind[kind][phase] for kind in kinds for phase in PHASES}

    def asked(self, config: EngineConfig) -> dict[str, str | None]:
        """The two flags by their fields, such that they lead here again: the winner of each phase, or where kinds differ what was asked for."""
        fields: dict[str, str | None] = {}
        for phase, field in _PHASE_FLAGS.items():
            names = {choices[phase].winner.name for choices in self.by_kind.values()}
            fields[field] = names.pop() if len(names) == 1 else getattr(config, field)
        return fields


def attention_slot(kinds: Sequence[str], kind: str, phase: str) -> str:
    """``attention.decode`` for the main kind, ``attention.window.decode`` for another. A kind that ``kinds`` lacks is served by the main one."""
    return f"attention.{phase}" if kind not in kinds[1:] else f"attention.{kind}.{phase}"


def choose_attention(
    host: PluginHost,
    config: EngineConfig,
    uses: Mapping[str, AttentionUse],
    model: Choice[ModelSpec],
    platform_name: str,
    platform: Platform,
) -> AttentionChoice:
    """Backends for each kind of layers and both phases. A phase that was set by a flag goes first, so that the other one can be chosen to share its pages; a
    flag speaks for all kinds.

    Args:
        uses: what each kind of layers asks, the main one first; all have one ``page_size``.

    Raises:
        ConfigError: a flag names nothing; PluginError: nothing fits, or what was set cannot serve a kind or shares no layout or page size.
    """
    need = Need(model.spec.attention_backend, f"model {model.winner.name}") if model.spec.attention_backend else None
    flags: dict[str, tuple[str, str]] = {}
    for phase in PHASES:
        own = getattr(config, _PHASE_FLAGS[phase])
        if name := own or config.attention_backend:
            flags[phase] = (name, f"--{_PHASE_FLAGS[phase].replace('_', '-')}" if own else "--attention-backend")

    def choose(kinds: Sequence[str]) -> dict[str, dict[str, Choice[AttentionBackendSpec]]]:
        made: dict[str, dict[str, Choice[AttentionBackendSpec]]] = {}
        for kind in kinds:
            made[kind] = choose_backends(
                host,
                uses[kind],
                platform_name,
                platform.preferences,
                flags=flags,
                need=need,
                others=[choice for choices in made.values() for choice in choices.values()],
                layers=LAYERS[kind] if len(uses) > 1 else "",
            )
        return {kind: made[kind] for kind in uses}

    try:
        by_kind = choose(tuple(uses))
    except NothingFitsError as nothing:
        # What is best for the main kind may leave nothing that reads its pages for another one, which then goes first.
        try:
            by_kind = choose(tuple(reversed(tuple(uses))))
        except NothingFitsError:
            raise nothing from None
    layouts, sizes = _pages(choice.spec for choices in by_kind.values() for choice in choices.values())
    page_size = next(iter(uses.values())).page_size or (sizes[0] if sizes else platform.defaults.page_size)
    return AttentionChoice(by_kind=by_kind, layout=KVLayout(layouts[0]), page_size=page_size)


def choose_backends(
    host: PluginHost,
    use: AttentionUse,
    platform_name: str,
    preferences: Callable[[str], Sequence[str]],
    *,
    flags: Mapping[str, tuple[str, str]] | None = None,
    need: Need | None = None,
    also: Callable[[AttentionBackendSpec], str] = lambda _: "",
    others: Sequence[Choice[AttentionBackendSpec]] = (),
    layers: str = "",
) -> dict[str, Choice[AttentionBackendSpec]]:
    """A backend for each of ``PHASES``; the second shares the pages of the first.

    Args:
        preferences: of ``Platform``.
        flags: by phase, the name that was asked for and the flag that did.
        also: a further gate, for what only the caller knows.
        others: what was chosen for other layers, whose pages these share.
        layers: which layers, in words; empty for all of the model.

    Raises:
        ConfigError: a flag names nothing; PluginError: nothing fits a phase.
    """
    asked = flags or {}
    chosen: dict[str, Choice[AttentionBackendSpec]] = {}
    for phase in sorted(PHASES, key=lambda phase: phase not in asked):
        name, flag_name = asked.get(phase, (None, ""))
        sharing = [*others, *chosen.values()]

        def fits(
            spec: AttentionBackendSpec,
            phase: str = phase,
            sharing: Sequence[Choice[AttentionBackendSpec]] = sharing,
        ) -> str:
            return _attention_gate(spec, phase, use) or also(spec) or _sharing_gate(spec, sharing, use)

        chosen[phase] = select(
            f"attention backend ({phase}{layers and f', {layers}'})",
            host.registry.specs("attention_backend"),
            flag=name,
            flag_name=flag_name,
            need=need,
            preferences=preferences(f"attention_backend.{phase}") or preferences("attention_backend"),
            platform=platform_name,
            active=host.active,
            fits=fits,
            excluded=host.broken,
        )
    return {phase: chosen[phase] for phase in PHASES}


def missing_kind(spec: AttentionBackendSpec, group: CacheGroup, *, windows: bool) -> str:
    """What ``spec`` lacks for a cache group as its model declared it, which may be more than ``config.json`` told; an empty string for nothing."""
    kinds = spec.supports.kinds
    what = f"the cache group of layers {', '.join(map(str, group.layers))}"
    if not set(kinds) & ({"mla"} if group.kind == "mla" else {"mha", "gqa"}):
        return f"{what} is of kind {group.kind}, and it supports {', '.join(kinds)}"
    if windows and "window" not in kinds:
        return f"{what} has a window, and it supports {', '.join(kinds)}"
    return ""


def _attention_gate(spec: AttentionBackendSpec, phase: str, use: AttentionUse) -> str:
    supports = spec.supports
    dtype, kv_dtype = DTYPES[use.dtype], KV_DTYPES[use.kv_dtype]
    if phase not in supports.phases:
        return f"does not run {phase}"
    if use.shape.kind not in supports.kinds:
        return f"supports {', '.join(supports.kinds)}, not {use.shape.kind}"
    if use.shape.window and "window" not in supports.kinds:
        return "supports no sliding window, which the model has"
    if use.shape.softcap and not supports.softcap:
        return "supports no soft cap of attention logits, which the model has"
    if supports.dtypes and dtype not in supports.dtypes:
        return f"takes {', '.join(supports.dtypes)}, not {dtype}"
    if supports.kv_dtypes and kv_dtype not in supports.kv_dtypes:
        return f"takes a KV cache of {', '.join(supports.kv_dtypes)}, not {kv_dtype}"
    if supports.head_dims and use.shape.head_dim not in supports.head_dims:
        return f"takes head sizes {', '.join(map(str, supports.head_dims))}, not {use.shape.head_dim}"
    if use.page_size and supports.page_sizes and use.page_size not in supports.page_sizes:
        return f"takes page sizes {', '.join(map(str, supports.page_sizes))}, not {use.page_size}"
    return ""


def _sharing_gate(spec: AttentionBackendSpec, others: Sequence[Choice[AttentionBackendSpec]], use: AttentionUse) -> str:
    """All phases and kinds read pages of one layout and size."""
    layouts: Sequence[Any] = spec.supports.layouts
    sizes: Sequence[Any] = spec.supports.page_sizes
    for other in others:
        theirs = other.spec.supports
        shared = _shared(layouts, theirs.layouts)
        if not shared and layouts:
            return f"shares no KV layout with {other.winner.name} ({other.slot})"
        layouts, shared = shared, _shared(sizes, theirs.page_sizes)
        if not shared and sizes and not use.page_size:
            return f"shares no page size with {other.winner.name} ({other.slot})"
        sizes = shared
    return ""


def _pages(specs: Iterator[AttentionBackendSpec]) -> tuple[list[str], list[int]]:
    """KV layouts and page sizes that all take, in the order of the first that cares; no page size means any."""
    layouts: list[str] = []
    sizes: list[int] = []
    for spec in specs:
        layouts, sizes = _shared(layouts, spec.supports.layouts), _shared(sizes, spec.supports.page_sizes)
    return layouts, sizes


def _shared(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """What both list, in the order of ``first``; an empty list means any, so that the other one decides."""
    if not first or not second:
        return list(first or second)
    return [value for value in first if value in second]
