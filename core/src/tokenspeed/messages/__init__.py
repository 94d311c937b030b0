"""What crosses processes: msgspec structs and their codec. No pickle, no torch."""

from __future__ import annotations

from tokenspeed.messages.codec import as_named, decode_from_engine, decode_to_engine, encode
from tokenspeed.messages.from_engine import (
    HIT_CUTS,
    ControlReply,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    GroupInfo,
    GroupStats,
    Outputs,
    RequestStats,
    TierStats,
    TokenLogprobs,
    TokenOutput,
)
from tokenspeed.messages.to_engine import (
    DEFAULT_NEW_TOKENS,
    AbortRequest,
    ControlRequest,
    GenerateRequest,
    Grammar,
    SamplingParams,
    StopRequest,
    ToEngine,
)

__all__ = [
    "DEFAULT_NEW_TOKENS",
    "HIT_CUTS",
    "AbortRequest",
    "ControlReply",
    "ControlRequest",
    "EngineFailed",
    "EngineInfo",
    "EngineReady",
    "EngineStats",
    "FromEngine",
    "GenerateRequest",
    "Grammar",
    "GroupInfo",
    "GroupStats",
    "Outputs",
    "RequestStats",
    "SamplingParams",
    "StopRequest",
    "TierStats",
    "ToEngine",
    "TokenLogprobs",
    "TokenOutput",
    "as_named",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
]
