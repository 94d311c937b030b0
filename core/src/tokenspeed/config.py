"""Settings of one server, made once by the command line and never changed after construction.

Field names are the flag names (``--max-model-len`` is ``max_model_len``); values that a user left open are ``None`` and are resolved by
``engine.assembly`` into a new object.
"""

from __future__ import annotations

import msgspec

__all__ = ["EngineConfig", "ParallelConfig", "ServingConfig"]


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the parallel groups. Only what works is accepted by the command line; ``world_size`` engine processes run."""

    tensor_parallel_size: int = 1
    attn_tp_size: int | None = None
    dense_tp_size: int | None = None
    moe_tp_size: int | None = None
    world_size: int = 1


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process needs to know.

    Attributes:
        model: directory, GGUF file, hub id or ``package:NAME``, as given; ``model_path`` is what it resolved to.
        load_format: ``auto``, ``safetensors``, ``gguf`` or ``dummy``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` or a platform's ``device_type``.
        max_model_len: tokens of prompt plus output of one request.
        max_num_seqs: rows of one step.
        chunked_prefill_size: token budget of one step.
        max_total_tokens: tokens of the KV pool; ``None`` sizes it from memory.
        kv_cache_memory_bytes: memory budget of the KV pool instead of the platform's own choice.
        gpu_memory_utilization: share of device memory that weights, the largest step, graphs and KV may take together.
        block_size: tokens of a KV page; ``None`` lets the chosen backends decide.
        max_step_ms: bound on the predicted length of a step while decodes run, as many times as there are 4 prompts to compute and at least once; 0 is
            off, ``None`` lets the platform decide.
        disable_overlap_schedule: plan step N+1 only after the results of N; ``None`` lets the platform decide.
        num_threads: CPU threads of one rank; 0 lets the platform decide.
        plugins: the ``--plugins`` text; plugin_options: ``plugin.option`` to text as given with ``--set``.
        grammar_backend: ``auto`` (an installed one, if any), a name, or ``None`` for none.
        kvstore: L3 store of KV pages, or ``None`` for none.
        kvstore_ratio: host tier in multiples of the device's KV pool; kvstore_size: in bytes of one rank instead. Both ``None``: no host tier, or with a
            store one as large as the device's.
        kvstore_write_policy: when pages are copied to the host tier: ``write-through``, ``write-on-evict`` or ``selective`` (at their second use).
        kvstore_timeout_ms: the longest that one operation of the store may take.
        prefetch_threshold: tokens that the store must add to a hit to be asked for them.
        session_retain_percent: share of the device's KV pool that sessions may keep above others between their turns.
        kv_events_config: the JSON text of ``--kv-events-config``, or ``None`` for no KV events.
        kernel_overrides: ``family.mode`` to solution.
        kernel_objective: what kernels are chosen for, of ``plugins.specs.KERNEL_OBJECTIVES``; empty for what each caller asks for, latency in most places;
            backends that launch kernels of their own do not ask for it.
        kernel_times: file of ``tokenspeed kernels bench --save``, or ``None`` for no measured choice of kernels.
        seed: seeds requests that bring none.
    """

    model: str
    model_path: str = ""
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    chunked_prefill_size: int | None = None
    max_total_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size: int | None = None
    enable_prefix_caching: bool = True
    max_step_ms: float | None = None
    disable_overlap_schedule: bool | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] = ()
    num_threads: int = 0
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    grammar_backend: str | None = "auto"
    kvstore: str | None = None
    kvstore_ratio: float | None = None
    kvstore_size: int | None = None
    kvstore_write_policy: str = "write-through"
    kvstore_timeout_ms: float = 500.0
    prefetch_threshold: int = 256
    session_retain_percent: int = 50
    kv_events_config: str | None = None
    kernel_overrides: dict[str, str] = {}
    kernel_objective: str = ""
    kernel_times: str | None = None
    plugins: str = ""
    plugin_options: dict[str, str] = {}
    parallel: ParallelConfig = ParallelConfig()
    trust_remote_code: bool = False
    enable_auto_tool_choice: bool = False
    skip_tokenizer_init: bool = False
    seed: int = 0


class ServingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the server process needs besides ``EngineConfig``.

    Attributes:
        control_port: ``None`` is ``port + 1``; the control routes listen on ``control_host``.
        tool_call_parser: ``None`` switches tool parsing off, ``auto`` takes the model spec's.
        drain_timeout_s: how long SIGTERM waits for running requests.
        max_body_bytes: larger request bodies are answered 413.
        max_pending_requests: choices (prompts times ``n``) beyond this many in the server are answered 503; 0 is unlimited.
        chat_template: path of a template that replaces the model's.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int | None = None
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = "auto"
    reasoning_parser: str | None = "auto"
    renderer: str | None = "auto"
    enable_log_requests: bool = False
    enable_log_request_stats: bool = False
    log_level: str = "info"
    drain_timeout_s: float = 60.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_pending_requests: int = 16384
    max_logprobs: int = 20
    max_n: int = 128
    uvicorn_log_level: str = "warning"
