"""Flags of vLLM and upstream that have no counterpart here: each is refused by its name, with the reason, unless it asks for what is so anyway."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REFUSED", "Refusal"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag of vLLM or upstream that has no counterpart here: ``accepted`` values change nothing, every other one is refused with ``reason``.

    A flag without a value is taken where ``accepted`` is ``AS_IT_IS``.
    """

    flags: tuple[str, ...]
    reason: str
    accepted: tuple[str, ...] = ()
    takes_value: bool = True


AS_IT_IS = ("",)
_PARALLEL = "this kind of parallelism is not available; --tensor-parallel-size is"

REFUSED: tuple[Refusal, ...] = (
    Refusal(flags=("--pipeline-parallel-size", "-pp", "--pp-size"), reason=_PARALLEL, accepted=("1",)),
    Refusal(flags=("--data-parallel-size", "-dp", "--dp-size", "--attn-dp-size"), reason=_PARALLEL, accepted=("1",)),
    Refusal(flags=("--expert-parallel-size", "--ep-size", "--moe-ep-size"), reason=_PARALLEL, accepted=("1",)),
    Refusal(flags=("--enable-expert-parallel",), reason=_PARALLEL, takes_value=False),
    Refusal(
        flags=("--prefill-context-parallel-size", "--decode-context-parallel-size", "--cp-size"),
        reason=_PARALLEL,
        accepted=("1",),
    ),
    Refusal(flags=("--nnodes",), reason="one host runs all engine processes", accepted=("1",)),
    Refusal(flags=("--node-rank",), reason="one host runs all engine processes", accepted=("0",)),
    Refusal(flags=("--quantization", "-q"), reason="the format of the weights decides how they are loaded"),
    Refusal(
        flags=(
            "--enable-chunked-prefill",
            "--disable-log-requests",
            "--disable-log-stats",
            "--enable-prompt-tokens-details",
        ),
        reason="it is so without the flag",
        accepted=AS_IT_IS,
        takes_value=False,
    ),
    Refusal(flags=("--model-impl",), reason="model plugins serve the architectures they name", accepted=("auto",)),
    Refusal(
        flags=("--generation-config",),
        reason="of generation_config.json the tokens that end a text are used, and no sampling defaults",
        accepted=("vllm",),
    ),
    Refusal(flags=("--guided-decoding-backend",), reason="--grammar-backend says which"),
    Refusal(flags=("--swap-space",), reason="--kvstore-size is room for pages on the host", accepted=("0",)),
    Refusal(flags=("--hf-overrides",), reason="edit the model's config.json"),
    Refusal(flags=("--enable-lora",), reason="adapters are not served", takes_value=False),
    Refusal(flags=("--lora-modules",), reason="adapters are not served"),
    Refusal(flags=("--speculative-config", "--speculative-algorithm"), reason="speculative decoding is not served"),
    Refusal(
        flags=("--kv-transfer-config",),
        reason="disaggregation is not served; --kvstore keeps prefixes beyond the device",
    ),
    Refusal(flags=("--model", "--model-path"), reason="give the model as the first argument: tokenspeed serve MODEL"),
)
