"""The table of flags: every setting of ``EngineConfig``, ``ServingConfig`` and ``ParallelConfig`` under the names that vLLM and upstream use.

A flag's text is read by the same function whether it comes from the command line or a config file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenspeed.cli.readers import DTYPES, INT64_MAX, KV_DTYPES, count, dtype, held_size, number, or_none, size_in_bytes
from tokenspeed.plugins.specs import KERNEL_OBJECTIVES

__all__ = ["ENGINE_FLAGS", "SERVING_FLAGS", "Flag"]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One setting.

    Attributes:
        name: without the dashes; the field of the config has the same name with underscores.
        aliases: further spellings, with their dashes.
        read: turns text into the value, or raises ``ValueError`` with a phrase.
        default: what happens when it is left out, where the field's default does not say it.
        boolean: ``--name`` and ``--no-name``; many: takes several values; parallel: a field of ``ParallelConfig``.
    """

    name: str
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    metavar: str = "NAME"
    default: str = ""
    boolean: bool = False
    many: bool = False
    parallel: bool = False

    @property
    def field(self) -> str:
        """Name of the config's field."""
        return self.name.replace("-", "_")


_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

ENGINE_FLAGS: tuple[Flag, ...] = (
    Flag(
        name="tokenizer",
        group="model",
        help="directory or file of the tokenizer",
        metavar="PATH",
        default="the model's own",
    ),
    Flag(
        name="load-format",
        group="model",
        help="format of the weights; dummy makes random ones",
        choices=("auto", "safetensors", "gguf", "dummy"),
    ),
    Flag(name="dtype", group="model", help="element type of weights and activations", choices=DTYPES, read=dtype),
    Flag(name="kv-cache-dtype", group="model", help="element type of the KV cache", choices=KV_DTYPES, read=dtype),
    Flag(
        name="max-model-len",
        group="model",
        help="tokens of prompt plus output of one request",
        read=count(1),
        metavar="N",
        default="the model's own",
    ),
    Flag(
        name="trust-remote-code",
        group="model",
        help="accepted for compatibility: no code from a checkpoint is ever run",
        boolean=True,
    ),
    Flag(
        name="enable-auto-tool-choice",
        group="model",
        help="accepted for compatibility: tool calls are found whenever a tool parser is chosen",
        boolean=True,
    ),
    Flag(
        name="skip-tokenizer-init",
        group="model",
        help="take and return token ids only; no tokenizer is loaded",
        boolean=True,
    ),
    Flag(name="seed", group="model", help="seeds requests that bring none", read=count(0, INT64_MAX), metavar="N"),
    Flag(name="device", group="device", help="device type, for example cpu or cuda", metavar="TYPE"),
    Flag(
        name="num-threads",
        group="device",
        help="CPU threads of one engine process",
        read=count(0, 1024),
        metavar="N",
        default="0, the platform decides",
    ),
    Flag(
        name="enforce-eager",
        group="device",
        help="run without captured graphs, on platforms that have them",
        boolean=True,
    ),
    Flag(
        name="cudagraph-capture-sizes",
        group="device",
        help="numbers of rows to capture graphs for",
        read=count(1),
        metavar="N",
        many=True,
        default="the platform decides",
    ),
    Flag(
        name="gpu-memory-utilization",
        group="memory",
        help="share of device memory for weights, the largest step, graphs and KV together",
        read=number(0, 1, above=True),
        metavar="SHARE",
    ),
    Flag(
        name="max-total-tokens",
        group="memory",
        help="tokens of the KV pool",
        read=count(1),
        metavar="N",
        default="sized from memory",
    ),
    Flag(
        name="kv-cache-memory-bytes",
        group="memory",
        help="memory of the KV pool of each process, for example 4G",
        read=size_in_bytes,
        metavar="BYTES",
        default="the platform decides",
    ),
    Flag(
        name="block-size",
        group="memory",
        aliases=("--page-size",),
        help="tokens of a KV page",
        read=count(1),
        metavar="N",
        default="the attention backend decides",
    ),
    Flag(name="enable-prefix-caching", group="memory", help="reuse KV of shared prefixes", boolean=True),
    Flag(
        name="kvstore",
        group="memory",
        help="L3 store of KV pages, for example file; none is off",
        read=or_none,
        default="none",
    ),
    Flag(
        name="kvstore-ratio",
        group="memory",
        help="host tier of the KV cache, in multiples of the device's pool",
        read=number(0),
        metavar="N",
        default="0, or 1 with --kvstore",
    ),
    Flag(
        name="kvstore-size",
        group="memory",
        help="host tier of the KV cache of each process, for example 8G",
        read=size_in_bytes,
        metavar="BYTES",
        default="as --kvstore-ratio",
    ),
    Flag(
        name="kvstore-write-policy",
        group="memory",
        help="when pages are copied to the host tier: as they fill, when the device evicts them, or at their second use",
        choices=("write-through", "write-on-evict", "selective"),
    ),
    Flag(
        name="kvstore-timeout-ms",
        group="memory",
        help="the longest that one operation of the store may take",
        read=number(0, above=True),
        metavar="MS",
    ),
    Flag(
        name="prefetch-threshold",
        group="memory",
        help="tokens that the store must add to a hit to be asked for them",
        read=count(1),
        metavar="N",
    ),
    Flag(
        name="session-retain-percent",
        group="memory",
        help="share of the device's KV pool that sessions (session_id, retain_s) may keep between their turns",
        read=count(0, 100),
        metavar="PERCENT",
    ),
    Flag(
        name="kv-events-config",
        group="memory",
        help="publish what enters and leaves the KV cache, for routers: a JSON object with vLLM's fields, see docs/kv-events.md",
        metavar="JSON",
        default="none",
    ),
    Flag(
        name="max-num-seqs",
        group="scheduling",
        help="rows of one step",
        read=count(1),
        metavar="N",
        default="the platform decides",
    ),
    Flag(
        name="chunked-prefill-size",
        group="scheduling",
        aliases=("--max-num-batched-tokens",),
        help="token budget of one step",
        read=count(1),
        metavar="N",
        default="the platform decides",
    ),
    Flag(
        name="kernel-objective",
        group="plugins",
        help="what kernels are chosen for: latency and throughput take the fastest, portability those that run on any platform, determinism leaves out "
        "those that may answer one call in two ways, debug takes the references; portability and debug on a GPU need --enforce-eager "
        "(see tokenspeed kernels explain --objective)",
        choices=KERNEL_OBJECTIVES,
        default="latency, where a caller does not ask for another",
    ),
    Flag(
        name="kernel-times",
        group="plugins",
        help="what `tokenspeed kernels bench --save` measured on this device: the fastest kernels are taken",
        metavar="FILE",
        default="none",
    ),
    Flag(
        name="max-step-ms",
        group="scheduling",
        help="bound on the predicted length of a step while decodes run; more than 4 waiting prompts widen it; 0 is off",
        read=number(0),
        metavar="MS",
        default="the platform decides",
    ),
    Flag(
        name="disable-overlap-schedule",
        group="scheduling",
        help="plan a step only after the results of the one before; --no-disable-overlap-schedule switches overlap on",
        boolean=True,
        default="the platform decides",
    ),
    Flag(
        name="attention-backend",
        group="plugins",
        help="attention backend of both phases",
        default="chosen automatically",
    ),
    Flag(
        name="prefill-attention-backend",
        group="plugins",
        help="attention backend of prefill",
        default="as --attention-backend",
    ),
    Flag(
        name="decode-attention-backend",
        group="plugins",
        help="attention backend of decode",
        default="as --attention-backend",
    ),
    Flag(
        name="grammar-backend",
        group="plugins",
        help="grammar backend of constrained decoding; auto takes an installed one, none refuses requests that need one",
        read=or_none,
    ),
    Flag(
        name="tensor-parallel-size",
        group="parallel",
        aliases=("-tp", "--tp-size"),
        help="engine processes that share each layer",
        read=count(1),
        metavar="N",
        parallel=True,
    ),
    Flag(
        name="attn-tp-size",
        group="parallel",
        help="processes that share attention; only the tensor parallel size works",
        read=count(1),
        metavar="N",
        default="--tensor-parallel-size",
        parallel=True,
    ),
    Flag(
        name="dense-tp-size",
        group="parallel",
        help="processes that share dense layers; only the tensor parallel size works",
        read=count(1),
        metavar="N",
        default="--tensor-parallel-size",
        parallel=True,
    ),
    Flag(
        name="moe-tp-size",
        group="parallel",
        help="processes that share experts; only the tensor parallel size works",
        read=count(1),
        metavar="N",
        default="--tensor-parallel-size",
        parallel=True,
    ),
    Flag(
        name="world-size",
        group="parallel",
        help="engine processes in all; only the tensor parallel size works",
        read=count(1),
        metavar="N",
        default="--tensor-parallel-size",
        parallel=True,
    ),
)

SERVING_FLAGS: tuple[Flag, ...] = (
    Flag(name="host", group="server", help="address to listen on", metavar="ADDRESS"),
    Flag(name="port", group="server", help="port of the API; 0 takes a free one", read=count(0, 65535), metavar="N"),
    Flag(name="control-host", group="server", help="address of the control routes", metavar="ADDRESS"),
    Flag(
        name="control-port",
        group="server",
        help="port of the control routes",
        read=count(0, 65535),
        metavar="N",
        default="--port + 1",
    ),
    Flag(
        name="api-key",
        group="server",
        help="keys, one of which every request must carry; also TOKENSPEED_API_KEY",
        metavar="KEY",
        many=True,
        default="no key",
    ),
    Flag(
        name="chat-template",
        group="server",
        help="file of a chat template that replaces the model's",
        metavar="FILE",
        default="the model's own",
    ),
    Flag(
        name="tool-call-parser",
        group="plugins",
        help="tool-call parser; auto takes the model's, none leaves calls in the text",
        read=or_none,
    ),
    Flag(
        name="reasoning-parser",
        group="plugins",
        help="reasoning parser; auto takes the model's, none leaves thinking in the text",
        read=or_none,
    ),
    Flag(
        name="renderer",
        group="plugins",
        help="renderer of conversations; auto takes the model's, none the tokenizer's chat template",
        read=or_none,
    ),
    Flag(name="enable-log-requests", group="logging", help="log each request as it arrives", boolean=True),
    Flag(
        name="enable-log-request-stats", group="logging", help="log what each request cost when it ends", boolean=True
    ),
    Flag(name="log-level", group="logging", help="level of the server's log", choices=_LOG_LEVELS),
    Flag(name="uvicorn-log-level", group="logging", help="level of the HTTP server's log", choices=_LOG_LEVELS),
    Flag(
        name="drain-timeout-s",
        group="server",
        help="seconds that SIGTERM waits for running requests",
        read=number(0, 604800),
        metavar="S",
    ),
    Flag(
        name="max-body-bytes",
        group="server",
        help="larger request bodies are answered 413",
        read=held_size,
        metavar="BYTES",
    ),
    Flag(
        name="max-pending-requests",
        group="server",
        help="choices (prompts times n) beyond this many are answered 503; 0 is unlimited",
        read=count(0, INT64_MAX),
        metavar="N",
    ),
    Flag(
        name="max-logprobs",
        group="server",
        help="most top logprobs a request may ask for",
        read=count(0, INT64_MAX),
        metavar="N",
    ),
    Flag(
        name="max-n", group="server", help="most choices a request may ask for", read=count(1, INT64_MAX), metavar="N"
    ),
)
