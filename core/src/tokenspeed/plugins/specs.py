"""What a plugin contributes: frozen dataclasses of plain data.

A spec names the thing itself by a ``target`` string, ``"package.module:attribute"``, which is imported on first use, so that
registering costs nothing. Every kind of spec carries ``api``, the version of the contract in ``tokenspeed.interfaces`` that it was written
for; a mismatch turns that one contribution off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

__all__ = [
    "ATTENTION_WORDS",
    "ELEMENT_TYPES",
    "KERNEL_FAMILIES",
    "KERNEL_OBJECTIVES",
    "KERNEL_WORDS",
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
]


KERNEL_FAMILIES: tuple[str, ...] = (
    "attention",
    "gemm",
    "moe",
    "recurrent",
    "norm",
    "rope",
    "activation",
    "embedding",
    "sampling",
    "cache",
    "comm",
)

#: Short names of element types.
ELEMENT_TYPES: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8", "fp4", "int64", "int32", "int8", "int4")

#: Words that fields of ``AttentionSupport`` and ``KernelSpec`` may hold; features are free.
ATTENTION_WORDS: dict[str, tuple[str, ...]] = {
    "kinds": ("mha", "gqa", "mla", "window", "recurrent"),
    "dtypes": ELEMENT_TYPES,
    "kv_dtypes": ELEMENT_TYPES,
    "layouts": ("NHD", "HND"),
    "phases": ("extend", "decode"),
}
KERNEL_WORDS: dict[str, tuple[str, ...]] = {"dtypes": ELEMENT_TYPES, "layouts": ("NHD", "HND")}

KERNEL_OBJECTIVES: tuple[str, ...] = ("latency", "throughput", "portability", "determinism", "debug")


class Priority(IntEnum):
    """Rank of a contribution when nothing else decides; plugins named in ``--plugins`` are raised to ``PLUGIN``.

    Flags, what the model says it needs, the more specific model class, and a platform's own order go before it.
    """

    REFERENCE = 0
    PORTABLE = 10
    PERFORMANT = 20
    SPECIALIZED = 30
    PLUGIN = 40


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Common part of everything selectable.

    Attributes:
        name: what a user types to select it, unique within its kind (``plugin:name`` where another plugin has it too; the short form means a first-party one).
        target: ``"package.module:attribute"`` of the class or function.
        api: version of the kind's contract that the target was written for.
        priority: rank among candidates that fit.
        platforms: platform names it runs on; empty means any.
        requires: requirement strings (PEP 508) that must be installed, or ``import:MODULE of DISTRIBUTIONS``: a top-level module that several bring.
        needs: names of plugins that must be active with it.
        probe: ``"package.module:function"`` of a function ``() -> str`` that says in a phrase what this machine lacks for it beyond ``requires`` (a compiler, a
            driver), or nothing; empty for none. It imports nothing heavy. Asked on the platforms that it runs on.
        opt_in: considered only when named by a flag or when its plugin is named in ``--plugins``.
        description: one line for ``tokenspeed plugins show``.
    """

    KIND: ClassVar[str] = ""
    API: ClassVar[int] = 1

    name: str
    target: str
    api: int = 1
    priority: Priority = Priority.PORTABLE
    platforms: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    probe: str = ""
    opt_in: bool = False
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A model class (``interfaces.model.CausalLM``) and the checkpoints it serves.

    Attributes:
        architectures: ``architectures[0]`` values of ``config.json`` it accepts.
        model_type: narrows the match to one ``model_type``; the more specific spec wins, then one whose plugin ``--plugins`` names.
        attention_backend: name of the backend the model needs, or empty for any that supports its kind.
        attention_kinds: which kinds of attention layers the class makes, of ``full``, ``window`` and ``mla``, where ``config.json`` alone does not tell:
            each gets backends of its own. Empty: what ``config.json`` says.
        tool_parser: parser that ``--tool-call-parser auto`` takes for this model.
        reasoning_parser: parser that ``--reasoning-parser auto`` takes.
        renderer: renderer that ``--renderer auto`` takes; empty for the tokenizer's chat template.
        gguf_architectures: ``general.architecture`` values of GGUF files it accepts.
    """

    KIND: ClassVar[str] = "model"

    architectures: tuple[str, ...]
    model_type: str | None = None
    attention_backend: str = ""
    attention_kinds: tuple[str, ...] = ()
    tool_parser: str = ""
    reasoning_parser: str = ""
    renderer: str = ""
    gguf_architectures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlatformSpec(Spec):
    """An accelerator target (``interfaces.platform.Platform``).

    Attributes:
        detect: ``"package.module:function"`` of a function ``() -> str | None`` that imports nothing heavy, creates no device context, and returns a
            one-line description of the device it found, or ``None``.
        device_type: the ``--device`` name it serves, for example ``cpu``, ``cuda``.
    """

    KIND: ClassVar[str] = "platform"

    detect: str
    device_type: str


@dataclass(frozen=True, kw_only=True)
class AttentionSupport:
    """What an attention backend can run; empty tuples mean any.

    Attributes:
        kinds: of ``mha``, ``gqa``, ``mla``, ``window``, ``recurrent``.
        dtypes: short names of activations: ``fp32``, ``bf16``, ``fp16``.
        kv_dtypes: short names of the KV cache's element type.
        head_dims: head sizes.
        layouts: KV layouts in order of preference, of ``NHD``, ``HND``.
        page_sizes: page sizes in order of preference.
        phases: of ``extend``, ``decode``.
        sinks: accepts attention sinks.
        softcap: accepts a soft cap of attention logits.
        shared_prefix: reads the plan's shared-prefix intervals once per step.
    """

    kinds: tuple[str, ...] = ("mha", "gqa")
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ("NHD", "HND")
    page_sizes: tuple[int, ...] = ()
    phases: tuple[str, ...] = ("extend", "decode")
    sinks: bool = False
    softcap: bool = False
    shared_prefix: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionBackendSpec(Spec):
    """An attention backend (``interfaces.attention.AttentionBackend``).

    Attributes:
        asks: operations (``attention.decode``) that it asks the kernel registry for; every other kernel that it launches is its own.
    """

    KIND: ClassVar[str] = "attention_backend"

    supports: AttentionSupport = field(default_factory=AttentionSupport)
    asks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ToolParserSpec(Spec):
    """A tool-call parser (``interfaces.parser.ToolParser``); ``aliases`` are further names for the flag."""

    KIND: ClassVar[str] = "tool_parser"

    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReasoningParserSpec(Spec):
    """A reasoning parser (``interfaces.reasoning.ReasoningParser``); ``aliases`` are further names for the flag."""

    KIND: ClassVar[str] = "reasoning_parser"

    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RendererSpec(Spec):
    """A renderer (``interfaces.renderer.Renderer``); ``aliases`` are further names for the flag."""

    KIND: ClassVar[str] = "renderer"

    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GrammarBackendSpec(Spec):
    """A grammar backend (``interfaces.grammar.GrammarBackend``) for constrained decoding.

    Attributes:
        checker: ``"package.module:function"`` of a function ``(kind, value) -> None`` that raises ``GrammarError`` for a grammar that the backend would refuse,
            not enforce to the letter, or take long over. It imports neither torch nor the grammar library: the server calls it before it asks the engine.
    """

    KIND: ClassVar[str] = "grammar_backend"

    checker: str


@dataclass(frozen=True, kw_only=True)
class KVStoreSpec(Spec):
    """An L3 store of KV pages (``interfaces.kvstore.KVStore``).

    Attributes:
        durable: what was put outlives the engine process.
        checker: ``"package.module:function"`` of a function ``(options) -> None`` that raises ``ConfigError`` for options of its plugin that the store
            could not work with, or empty. It imports nothing heavy, changes nothing and waits for nobody: it is called before anything is loaded.
    """

    KIND: ClassVar[str] = "kv_store"

    durable: bool = True
    checker: str = ""


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """One kernel: a function with the signature that ``interfaces.kernel`` gives for its family and mode.

    ``name`` is ``solution``'s unique name within family and mode, for example ``torch`` or ``cpu``.

    Attributes:
        family: of ``interfaces.kernel.FAMILIES``.
        mode: operation within the family, for example ``rms_norm``.
        features: optional abilities, for example ``shared_prefix``, ``sinks``, ``window``.
        dtypes: short names of the element types it takes; empty means any.
        layouts: KV layouts it takes; empty means any or not applicable.
        capability: inclusive range of the platform's capability, for example ``((9, 0), (9, 0))``; ``None`` means any.
        traits: shape limits by name, each ``(low, high)`` inclusive, for example ``{"m": (1, 32)}``.
        objectives: objectives it is meant for, of ``latency``, ``throughput``, ``portability``, ``determinism``, ``debug``; empty means all.
        factory: the target is a callable ``(KernelContext) -> kernel`` instead of the kernel itself (a thread pool, a workspace).
        tells: ``"package.module:function"`` of a function ``(capability, device, shape, options) -> str`` that says in a line or some what the kernel does
            inside for such a request (tiles, and which were refused); it imports nothing heavy. ``capability`` and ``device`` (a name) may be empty.
    """

    KIND: ClassVar[str] = "kernel"

    family: str
    mode: str
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    capability: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    traits: tuple[tuple[str, int, int], ...] = ()
    objectives: tuple[str, ...] = ()
    factory: bool = False
    tells: str = ""


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """One option of a plugin, set with ``--set PLUGIN.NAME=VALUE`` or in the config file's ``plugin_options``.

    ``type`` is ``int``, ``float``, ``str`` or ``bool``; ``choices`` limits the values; ``default`` must pass the same checks. The value of one that is
    ``secret`` (a password, an address that may hold one) is shown as ``***`` in plans, reports and server information.
    """

    KIND: ClassVar[str] = "option"

    name: str
    type: type
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False


@dataclass(frozen=True, kw_only=True)
class CommandSpec:
    """A sub-command ``tokenspeed NAME``: ``target`` is a module with ``add_arguments(parser)`` and ``run(args) -> int``."""

    KIND: ClassVar[str] = "command"

    name: str
    target: str
    help: str
