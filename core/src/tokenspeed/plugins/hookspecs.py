"""The whole plugin contract: registration hooks collect specs, event hooks announce moments.

Registration hooks are called while a process assembles itself, never in the step loop. Each returns a list of specs. Event hooks take one
context object, so that fields can be added without breaking authors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed.plugins.markers import hookspec

if TYPE_CHECKING:
    from tokenspeed.plugins.events import (
        ConfigureContext,
        DoctorContext,
        DoctorFinding,
        EngineReadyContext,
        ModelLoadedContext,
        ProcessInitContext,
        ShutdownContext,
    )
    from tokenspeed.plugins.specs import (
        AttentionBackendSpec,
        CommandSpec,
        GrammarBackendSpec,
        KernelSpec,
        KVStoreSpec,
        ModelSpec,
        OptionSpec,
        PlatformSpec,
        ReasoningParserSpec,
        RendererSpec,
        ToolParserSpec,
    )


@hookspec
def tokenspeed_models() -> list[ModelSpec]:  # type: ignore[empty-body]
    """Model classes and the architectures they serve."""


@hookspec
def tokenspeed_platforms() -> list[PlatformSpec]:  # type: ignore[empty-body]
    """Accelerator targets."""


@hookspec
def tokenspeed_attention_backends() -> list[AttentionBackendSpec]:  # type: ignore[empty-body]
    """Attention backends, selected by ``--attention-backend``."""


@hookspec
def tokenspeed_tool_parsers() -> list[ToolParserSpec]:  # type: ignore[empty-body]
    """Tool-call parsers, selected by ``--tool-call-parser``."""


@hookspec
def tokenspeed_reasoning_parsers() -> list[ReasoningParserSpec]:  # type: ignore[empty-body]
    """Reasoning parsers, selected by ``--reasoning-parser``."""


@hookspec
def tokenspeed_renderers() -> list[RendererSpec]:  # type: ignore[empty-body]
    """Renderers of conversations, selected by ``--renderer``; most models have a chat template instead."""


@hookspec
def tokenspeed_grammar_backends() -> list[GrammarBackendSpec]:  # type: ignore[empty-body]
    """Grammar backends for constrained decoding, selected by ``--grammar-backend``."""


@hookspec
def tokenspeed_kernels() -> list[KernelSpec]:  # type: ignore[empty-body]
    """Kernels that layers and backends launch."""


@hookspec
def tokenspeed_kv_stores() -> list[KVStoreSpec]:  # type: ignore[empty-body]
    """L3 stores of KV pages, selected by ``--kvstore``."""


@hookspec
def tokenspeed_options() -> list[OptionSpec]:  # type: ignore[empty-body]
    """The plugin's own options, set with ``--set PLUGIN.NAME=VALUE``."""


@hookspec
def tokenspeed_commands() -> list[CommandSpec]:  # type: ignore[empty-body]
    """Sub-commands of the ``tokenspeed`` command line."""


@hookspec
def tokenspeed_configure(context: ConfigureContext) -> None:
    """The plan is frozen; the plugin's options are final. Called once in every process."""


@hookspec
def tokenspeed_process_init(context: ProcessInitContext) -> None:
    """A process has loaded its part of the plan and is about to begin its work."""


@hookspec
def tokenspeed_model_loaded(context: ModelLoadedContext) -> None:
    """Weights are in place on this rank; nothing has run yet."""


@hookspec
def tokenspeed_engine_ready(context: EngineReadyContext) -> None:
    """The engine takes requests from now on."""


@hookspec
def tokenspeed_shutdown(context: ShutdownContext) -> None:
    """The process ends in good order; give back what lives outside it."""


@hookspec
def tokenspeed_doctor(context: DoctorContext) -> list[DoctorFinding]:  # type: ignore[empty-body]
    """Checks of the plugin's surroundings for ``tokenspeed plugins doctor``."""
