"""The plugin contract: ``hookimpl`` and the specs that hooks return. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins.markers import hookimpl
from tokenspeed.plugins.specs import (
    AttentionBackendSpec,
    AttentionSupport,
    CommandSpec,
    GrammarBackendSpec,
    KernelSpec,
    KVStoreSpec,
    ModelSpec,
    OptionSpec,
    PlatformSpec,
    Priority,
    ReasoningParserSpec,
    RendererSpec,
    Spec,
    ToolParserSpec,
)

__all__ = [
    "AttentionBackendSpec",
    "AttentionSupport",
    "CommandSpec",
    "GrammarBackendSpec",
    "KVStoreSpec",
    "KernelSpec",
    "ModelSpec",
    "OptionSpec",
    "PlatformSpec",
    "Priority",
    "ReasoningParserSpec",
    "RendererSpec",
    "Spec",
    "ToolParserSpec",
    "hookimpl",
]
