"""Flags of vLLM and upstream that have no counterpart here: each is refused by its name, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REFUSED", "Refusal"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag of vLLM or upstream that has no counterpart here: ``accepted`` values change nothing, every other one is refused with ``reason``."""

    flags: tuple[str, ...]
    reason: str
    accepted: tuple[str, ...] = ()
    takes_value: bool = True


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
    Refusal(flags=("--model", "--model-path"), reason="give the model as the first argument: tokenspeed serve MODEL"),
)
