"""Everything that active plugins contribute, by kind. Open while plugins are loaded, then frozen for the life of the process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from tokenspeed.errors import PluginError
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.specs import (
    ATTENTION_WORDS,
    KERNEL_FAMILIES,
    KERNEL_OBJECTIVES,
    KERNEL_WORDS,
    AttentionBackendSpec,
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

__all__ = ["REGISTRATION_HOOKS", "AnySpec", "Contribution", "Registry", "check_spec", "spec_key"]

AnySpec = Spec | OptionSpec | CommandSpec
S = TypeVar("S", bound=AnySpec, covariant=True)

#: What each registration hook returns a list of.
REGISTRATION_HOOKS: dict[str, type[AnySpec]] = {
    "tokenspeed_models": ModelSpec,
    "tokenspeed_platforms": PlatformSpec,
    "tokenspeed_attention_backends": AttentionBackendSpec,
    "tokenspeed_tool_parsers": ToolParserSpec,
    "tokenspeed_reasoning_parsers": ReasoningParserSpec,
    "tokenspeed_renderers": RendererSpec,
    "tokenspeed_grammar_backends": GrammarBackendSpec,
    "tokenspeed_kernels": KernelSpec,
    "tokenspeed_kv_stores": KVStoreSpec,
    "tokenspeed_options": OptionSpec,
    "tokenspeed_commands": CommandSpec,
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = re.compile(rf"{_MODULE}:{_MODULE}")


@dataclass(frozen=True)
class Contribution(Generic[S]):
    """A spec and the plugin that brought it.

    Attributes:
        plugin: name of the plugin.
        spec: what it contributes.
        automatic: automatic choice may take it without being forced to: it is first-party, named in ``--plugins``, or needed by one that is.
        named: its plugin is named in ``--plugins``; it ranks as ``Priority.PLUGIN`` and its ``opt_in`` does not hold it back.
        off: why it is turned off whatever is chosen, or empty.
        first_party: its plugin is of this project; a name that such a one has stays its own, whatever is installed beside it.
    """

    plugin: str
    spec: S
    automatic: bool = True
    named: bool = False
    off: str = ""
    first_party: bool = True

    @property
    def name(self) -> str:
        """``plugin:name``, unique within the kind (for kernels, within family and mode)."""
        return f"{self.plugin}:{self.spec.name}"

    @property
    def priority(self) -> Priority:
        """Rank of the contribution; ``REFERENCE`` for kinds that have none."""
        if self.named:
            return Priority.PLUGIN
        return self.spec.priority if isinstance(self.spec, Spec) else Priority.REFERENCE


def spec_key(spec: AnySpec) -> str:
    """The name of a spec within its kind: kernels of different modes may share theirs."""
    return f"{spec.family}.{spec.mode}={spec.name}" if isinstance(spec, KernelSpec) else spec.name


def check_spec(spec: AnySpec) -> str:
    """What is wrong with a spec's fields, or an empty string. Types are compared where a wrong one would go unnoticed until much later."""
    name: object = spec.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"name {name!r} is not made of letters, digits, '.', '_' and '-'"
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        declared = str(field.type)
        for prefix, expected in (("tuple[", tuple), ("frozenset[", frozenset)):
            if declared.startswith(prefix) and "None" not in declared and not isinstance(value, expected):
                return f"{field.name} of {spec.name!r} is {value!r}; it must be a {expected.__name__}"
    if isinstance(spec, Spec):
        target: object = spec.target
        priority: object = spec.priority
        if not isinstance(target, str) or not _TARGET.fullmatch(target):
            return f"target of {spec.name!r} is {target!r}; it must be 'package.module:attribute'"
        if not isinstance(priority, Priority):
            return f"priority of {spec.name!r} is {priority!r}; it must be a tokenspeed.plugins.Priority"
    if isinstance(spec, CommandSpec) and not re.fullmatch(_MODULE, spec.target):
        return f"target of command {spec.name!r} is {spec.target!r}; it must be a module, 'package.module'"
    if isinstance(spec, PlatformSpec) and not _TARGET.fullmatch(spec.detect):
        return f"detect of {spec.name!r} is {spec.detect!r}; it must be 'package.module:function'"
    optional = isinstance(spec, KVStoreSpec) and not spec.checker
    if isinstance(spec, (GrammarBackendSpec, KVStoreSpec)) and not optional and not _TARGET.fullmatch(spec.checker):
        return f"checker of {spec.name!r} is {spec.checker!r}; it must be 'package.module:function'"
    if isinstance(spec, ModelSpec) and not (spec.architectures or spec.gguf_architectures):
        return f"model {spec.name!r} names no architecture"
    if isinstance(spec, AttentionBackendSpec):
        return _check_words(f"attention backend {spec.name!r}", spec.supports, ATTENTION_WORDS)
    if isinstance(spec, KernelSpec):
        if spec.tells and not _TARGET.fullmatch(spec.tells):
            return f"tells of {spec.name!r} is {spec.tells!r}; it must be 'package.module:function'"
        return _check_kernel(spec) or _check_words(f"kernel {spec.name!r}", spec, KERNEL_WORDS)
    return ""


def _check_words(what: str, value: object, allowed: Mapping[str, Sequence[str]]) -> str:
    """A misspelt word would only make the contribution never fit, with no one told why."""
    for field, words in allowed.items():
        for word in getattr(value, field):
            if word not in words:
                return (
                    f"{field} of {what} holds {word!r}{did_you_mean(str(word), words)}; it may hold {', '.join(words)}"
                )
    return ""


def _check_kernel(spec: KernelSpec) -> str:
    if spec.family not in KERNEL_FAMILIES:
        return f"kernel {spec.name!r} is of family {spec.family!r}; families are {', '.join(KERNEL_FAMILIES)}"
    unknown = [objective for objective in spec.objectives if objective not in KERNEL_OBJECTIVES]
    if unknown:
        return f"kernel {spec.name!r} has objective {unknown[0]!r}; objectives are {', '.join(KERNEL_OBJECTIVES)}"
    for trait in spec.traits:
        if len(trait) != 3 or trait[1] > trait[2]:
            return f"trait {trait!r} of kernel {spec.name!r} must be (name, low, high) with low <= high"
    return ""


class Registry:
    """Specs by kind. ``add`` works until ``freeze``; everything else until the process ends.

    Not thread safe while open: one process assembles itself in one thread.
    """

    def __init__(self) -> None:
        self._by_kind: dict[str, list[Contribution[Any]]] = {cls.KIND: [] for cls in REGISTRATION_HOOKS.values()}
        self._frozen = False

    @property
    def frozen(self) -> bool:
        """Whether assembly is over."""
        return self._frozen

    def freeze(self) -> None:
        """No contribution can be added from now on."""
        self._frozen = True

    def add(self, contributions: Iterable[Contribution[Any]]) -> None:
        """Take the contributions of one plugin.

        Raises:
            PluginError: the registry is frozen, or a plugin brings one name of one kind twice.
        """
        for contribution in contributions:
            kind = contribution.spec.KIND
            if self._frozen:
                raise PluginError(
                    f"plugin {contribution.plugin!r} registers {kind} {contribution.spec.name!r} after the plan was frozen; "
                    "return it from its tokenspeed_... hook instead"
                )
            key = spec_key(contribution.spec)
            for other in self._by_kind[kind]:
                if other.plugin == contribution.plugin and spec_key(other.spec) == key:
                    raise PluginError(f"plugin {contribution.plugin!r} contributes {kind} {key!r} twice")
            self._by_kind[kind].append(contribution)

    @overload
    def specs(self, kind: Literal["model"]) -> list[Contribution[ModelSpec]]: ...
    @overload
    def specs(self, kind: Literal["platform"]) -> list[Contribution[PlatformSpec]]: ...
    @overload
    def specs(self, kind: Literal["attention_backend"]) -> list[Contribution[AttentionBackendSpec]]: ...
    @overload
    def specs(self, kind: Literal["tool_parser"]) -> list[Contribution[ToolParserSpec]]: ...
    @overload
    def specs(self, kind: Literal["reasoning_parser"]) -> list[Contribution[ReasoningParserSpec]]: ...
    @overload
    def specs(self, kind: Literal["renderer"]) -> list[Contribution[RendererSpec]]: ...
    @overload
    def specs(self, kind: Literal["grammar_backend"]) -> list[Contribution[GrammarBackendSpec]]: ...
    @overload
    def specs(self, kind: Literal["kernel"]) -> list[Contribution[KernelSpec]]: ...
    @overload
    def specs(self, kind: Literal["kv_store"]) -> list[Contribution[KVStoreSpec]]: ...
    @overload
    def specs(self, kind: Literal["option"]) -> list[Contribution[OptionSpec]]: ...
    @overload
    def specs(self, kind: Literal["command"]) -> list[Contribution[CommandSpec]]: ...
    def specs(self, kind: str) -> list[Any]:
        """All contributions of a kind, by plugin and name. Raises ``PluginError`` for an unknown kind."""
        if kind not in self._by_kind:
            raise PluginError(f"no kind of contribution is named {kind!r}; kinds are {', '.join(self._by_kind)}")
        return sorted(self._by_kind[kind], key=lambda c: (c.plugin, spec_key(c.spec)))
