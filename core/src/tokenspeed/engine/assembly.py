"""Assembly: settings and plugins in, one frozen decision out. The only caller of registration hooks besides the command line.

Runs in the command line, the server and every engine process, and therefore imports no torch: targets stay strings, but for the platform, whose class
promises the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tokenspeed import __version__
from tokenspeed.config import EngineConfig
from tokenspeed.engine import choices
from tokenspeed.engine.accelerators import Accelerator, present_accelerators
from tokenspeed.engine.attention_choice import PHASES, AttentionChoice, AttentionUse, attention_slot, choose_attention
from tokenspeed.engine.grammar_choice import choose_grammar_backend
from tokenspeed.engine.kv_events.config import check_kv_events
from tokenspeed.engine.option_use import unread_options
from tokenspeed.engine.report import explain_text, to_json
from tokenspeed.engine.settings import DTYPES, attention_shapes, resolve_dtype, resolve_limits, resolve_parallel
from tokenspeed.plugins.dispatch import EventCalls
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.kernel_times import KernelTimes, device_key
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.plugins.options import hide_values, resolve_options
from tokenspeed.plugins.plan import PlanPlugin, PlanSlot, PluginPlan
from tokenspeed.plugins.registry import Registry
from tokenspeed.plugins.selection import Choice

if TYPE_CHECKING:
    from tokenspeed.interfaces.kernel import KernelContext
    from tokenspeed.interfaces.platform import Platform
    from tokenspeed.plugins.specs import (
        AttentionBackendSpec,
        GrammarBackendSpec,
        KVStoreSpec,
        ModelSpec,
        PlatformSpec,
        ReasoningParserSpec,
        RendererSpec,
        ToolParserSpec,
    )
    from tokenspeed.types import KVLayout
    from tokenspeed.weights.describe import ModelDescription

__all__ = ["Assembly", "assemble"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """One start's decisions.

    Attributes:
        config: the settings with what was left open filled in (sizes of the KV pool stay ``None`` where memory decides them). Assembling this object
            again gives the same plan.
        model: the description it was made for.
        host: plugins as they were loaded; ``registry`` is its frozen registry.
        platform: the platform object of local rank 0, for what assembly may read of it.
        choices: slot to choice, with every loser's reason.
        attention_kinds: kinds of attention layers that have backends of their own, of ``full``, ``window`` and ``mla``, the main one first.
        kv_layout, page_size: what core lays out the KV pool by.
        options: final option values by plugin.
        events: calls the event hooks of the plugins in the plan.
        warnings: what a user should know.
        absent: slot to a clause that says why nothing fills it and what to do about that, where there is more to say than that nobody asked.
    """

    config: EngineConfig
    model: ModelDescription
    plan: PluginPlan
    host: PluginHost
    platform: Platform
    choices: Mapping[str, Choice[Any]]
    attention_kinds: tuple[str, ...]
    kv_layout: KVLayout
    page_size: int
    options: Mapping[str, Mapping[str, Any]]
    events: EventCalls
    warnings: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> Registry:
        """Every contribution of every active plugin; registering raises."""
        return self.host.registry

    @property
    def platform_spec(self) -> PlatformSpec:
        """The chosen platform."""
        return self.choices["platform"].spec  # type: ignore[no-any-return]

    @property
    def model_spec(self) -> ModelSpec:
        """The chosen model class."""
        return self.choices["model"].spec  # type: ignore[no-any-return]

    @property
    def attention(self) -> dict[str, AttentionBackendSpec]:
        """Backend of each phase, ``extend`` and ``decode``, of the main kind of layers."""
        return {phase: self.choices[f"attention.{phase}"].spec for phase in PHASES}

    def attention_slots(self, kind: str) -> dict[str, str]:
        """Slot of each phase for layers of ``kind``; a kind that was not told apart is served by the main one."""
        return {phase: attention_slot(self.attention_kinds, kind, phase) for phase in PHASES}

    @property
    def tool_parser(self) -> ToolParserSpec | None:
        """The tool parser, or ``None`` when tool calls stay text."""
        choice = self.choices.get("tool_parser")
        return choice.spec if choice else None

    @property
    def reasoning_parser(self) -> ReasoningParserSpec | None:
        """The reasoning parser, or ``None`` when thinking stays in the text."""
        choice = self.choices.get("reasoning_parser")
        return choice.spec if choice else None

    @property
    def renderer(self) -> RendererSpec | None:
        """The renderer, or ``None`` when conversations are written by the tokenizer's chat template."""
        choice = self.choices.get("renderer")
        return choice.spec if choice else None

    @property
    def grammar_backend(self) -> GrammarBackendSpec | None:
        """The grammar backend, or ``None`` when requests with a grammar are refused."""
        choice = self.choices.get("grammar_backend")
        return choice.spec if choice else None

    @property
    def kv_store(self) -> KVStoreSpec | None:
        """The L3 store, or ``None``."""
        choice = self.choices.get("kv_store")
        return choice.spec if choice else None

    def options_of(self, slot: str) -> Mapping[str, Any]:
        """Options of the plugin that fills a slot."""
        return self.options.get(self.choices[slot].winner.plugin, {})

    def kernel_registry(
        self,
        context_factory: Callable[[str], KernelContext] | None = None,
        *,
        capability: tuple[int, ...] | None = None,
    ) -> KernelRegistry:
        """A kernel registry of one rank; ``capability`` is the device's own where ranks may differ."""
        return KernelRegistry(
            self.registry.specs("kernel"),
            platform_name=self.platform_spec.name,
            capability=self.platform.capability if capability is None else capability,
            overrides=self.config.kernel_overrides,
            objective=self.config.kernel_objective,
            context_factory=context_factory,
            active=self.host.active,
            times=_kernel_times(self.config.kernel_times, self.platform),
        )

    def explain(self, *, verbose: bool = False) -> str:
        """The start-up block: each slot, what fills it and why; ``verbose`` adds why every other candidate lost."""
        return explain_text(self, verbose=verbose)

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON, for ``GET /plugins``."""
        return to_json(self)


@dataclass(kw_only=True)
class _Slots:
    """Choices while they are made."""

    choices: dict[str, Choice[Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def take(self, slot: str, choice: Choice[Any] | None) -> None:
        if choice is not None:
            self.choices[slot] = choice
            if choice.warning and choice.warning not in self.warnings:
                self.warnings.append(choice.warning)


def assemble(
    config: EngineConfig,
    model: ModelDescription,
    *,
    tool_call_parser: str | None = "auto",
    reasoning_parser: str | None = "auto",
    renderer: str | None = "auto",
    host: PluginHost | None = None,
    accelerators: Callable[[], list[Accelerator]] = present_accelerators,
    announce: bool = True,
) -> Assembly:
    """Decide what fills every slot.

    Args:
        tool_call_parser, reasoning_parser, renderer: ``auto`` (the model spec's), a name, or ``None`` for none.
        host: plugins that are already loaded according to ``config.plugins``; loaded here unless given. It is frozen.
        announce: log broken plugins and warnings; off where another process of the server has done so.
        accelerators: finds accelerators that must not be left idle unnoticed.

    Raises:
        ConfigError: a setting is wrong; PluginError: a slot cannot be filled, with every candidate's reason.
    """
    host = PluginHost.load(config.plugins) if host is None else host
    host.registry.freeze()
    inactive = [name for name in host.discovery.names() if name not in host.active]
    options = resolve_options(host.registry.specs("option"), config.plugin_options, [*inactive, *host.active])
    slots = _Slots()

    platform_choice = choices.choose_platform(host, config.device, accelerators)
    slots.take("platform", platform_choice)
    platform = choices.make_platform(platform_choice, config, options)
    model_choice = choices.choose_model(host, model, platform_choice.spec.name, platform.preferences("model"))
    slots.take("model", model_choice)

    shapes = attention_shapes(model.config, model_choice.spec.attention_kinds)
    dtype, kv_dtype = resolve_dtype(config, model, platform)
    resolved = msgspec.structs.replace(
        resolve_limits(config, model, platform),
        model_path=str(model.path),
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        parallel=resolve_parallel(config.parallel, next(iter(shapes.values()))),
        device=choices.device_name(host, platform_choice),
    )
    uses = {
        kind: AttentionUse(shape=shape, dtype=dtype, kv_dtype=kv_dtype, page_size=config.block_size)
        for kind, shape in shapes.items()
    }
    attention = choose_attention(host, resolved, uses, model_choice, platform_choice.spec.name, platform)
    for slot, choice in attention.slots.items():
        slots.take(slot, choice)
    _take_parsers(slots, host, model_choice, tool_call_parser, reasoning_parser)
    renderer_choice, renderer_warning = choices.choose_renderer(host, renderer, model_choice)
    slots.take("renderer", renderer_choice)
    slots.warnings += [renderer_warning] if renderer_warning else []
    grammar, no_grammar, grammar_warning = choose_grammar_backend(
        host,
        config.grammar_backend,
        platform_choice.spec.name,
        skip_tokenizer=config.skip_tokenizer_init,
        preferences=platform.preferences("grammar_backend"),
    )
    slots.take("grammar_backend", grammar)
    slots.warnings += [grammar_warning] if grammar_warning else []
    if config.kv_events_config is not None:
        check_kv_events(config.kv_events_config, prefix_caching=config.enable_prefix_caching)
    store = choices.choose_kv_store(host, config.kvstore, platform_choice.spec.name)
    slots.take("kv_store", store)
    if store is not None:
        choices.check_kv_store(store, options)
    kernels = KernelRegistry(
        host.registry.specs("kernel"),
        platform_name=platform_choice.spec.name,
        capability=platform.capability if config.kernel_overrides else (),
        overrides=config.kernel_overrides,
        objective=config.kernel_objective,
        active=host.active,
    )
    for operation in config.kernel_overrides:
        kernels.check_override(operation, DTYPES[dtype])
    _kernel_times(config.kernel_times, platform)

    resolved = msgspec.structs.replace(
        resolved,
        block_size=attention.page_size,
        **attention.asked(config),
        grammar_backend=grammar.winner.name if grammar is not None else None,
        kvstore=slots.choices["kv_store"].winner.name if config.kvstore is not None else None,
    )
    shown = hide_values(host.registry.specs("option"), options)
    plan = _make_plan(host, slots.choices, resolved, attention, shown)
    filling = {choice.winner.plugin for choice in slots.choices.values()}
    names = [plugin.name for plugin in plan.plugins]
    chosen_store = store.winner.plugin if store is not None else None
    slots.warnings += unread_options(host, config.plugin_options, store=chosen_store, planned=names)
    if announce:
        for name, cause in host.broken:
            _log.warning("plugin %r is broken and not used: %s", name, cause.splitlines()[0])
        for warning in slots.warnings:
            _log.warning("%s", warning)
    return Assembly(
        config=resolved,
        model=model,
        plan=plan,
        host=host,
        platform=platform,
        choices=slots.choices,
        attention_kinds=tuple(shapes),
        kv_layout=attention.layout,
        page_size=attention.page_size,
        options=options,
        events=EventCalls(host.manager, names, required=filling | set(host.selection.named), options=options),
        warnings=tuple(slots.warnings),
        absent={"grammar_backend": no_grammar} if no_grammar else {},
    )


def _take_parsers(
    slots: _Slots,
    host: PluginHost,
    model: Choice[ModelSpec],
    tool_call_parser: str | None,
    reasoning_parser: str | None,
) -> None:
    tool, tool_warning = choices.choose_parser(
        host,
        host.registry.specs("tool_parser"),
        what="tool parser",
        flag_name="--tool-call-parser",
        asked=tool_call_parser,
        wanted=model.spec.tool_parser,
        model=model,
    )
    reasoning, reasoning_warning = choices.choose_parser(
        host,
        host.registry.specs("reasoning_parser"),
        what="reasoning parser",
        flag_name="--reasoning-parser",
        asked=reasoning_parser,
        wanted=model.spec.reasoning_parser,
        model=model,
    )
    slots.take("tool_parser", tool)
    slots.take("reasoning_parser", reasoning)
    slots.warnings += [warning for warning in (tool_warning, reasoning_warning) if warning]


def _kernel_times(path: str | None, platform: Platform) -> KernelTimes | None:
    return None if path is None else KernelTimes.load(path, device_key(platform.describe()))


def _make_plan(
    host: PluginHost,
    chosen: Mapping[str, Choice[Any]],
    config: EngineConfig,
    attention: AttentionChoice,
    options: Mapping[str, dict[str, Any]],
) -> PluginPlan:
    kernels = choices.usable_kernels(host, chosen["platform"].spec.name, config.kernel_overrides)
    contributing = (
        {choice.winner.plugin for choice in chosen.values()} | {c.plugin for c in kernels} | set(host.selection.named)
    )
    needed = [n for choice in chosen.values() for n in choice.spec.needs] + [n for c in kernels for n in c.spec.needs]
    names = [name for name in host.active if name in contributing or name in needed]
    return PluginPlan(
        core=__version__,
        plugins=tuple(
            PlanPlugin(
                name=name,
                distribution=host.records[name].distribution,
                version=host.records[name].version,
                named=host.records[name].named,
            )
            for name in names
        ),
        slots={
            slot: PlanSlot(plugin=choice.winner.plugin, name=choice.spec.name, target=choice.spec.target)
            for slot, choice in chosen.items()
        },
        kernels={f"{c.spec.family}.{c.spec.mode}/{c.name}": c.spec.target for c in kernels},
        options={name: dict(options[name]) for name in names if name in options},
        settings={
            "kv_layout": attention.layout.value,
            "page_size": attention.page_size,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
        },
    )
