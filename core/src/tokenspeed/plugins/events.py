"""Context objects of the event hooks: frozen, plain data, extended by adding fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ConfigureContext",
    "DoctorContext",
    "DoctorFinding",
    "EngineReadyContext",
    "ModelLoadedContext",
    "ProcessInitContext",
    "ShutdownContext",
]


@dataclass(frozen=True, kw_only=True)
class ConfigureContext:
    """``options`` holds the final options of the plugin that is called; ``plan`` is the frozen plan as plain data."""

    options: Mapping[str, Any]
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ProcessInitContext:
    """``role`` is ``server``, ``engine`` or ``cli``; ``rank`` and ``world_size`` count engine processes."""

    role: str
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelLoadedContext:
    """``model`` is the loaded module; ``seconds`` is how long loading took."""

    model: Any
    model_path: str
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineReadyContext:
    """``kv_pages`` counts device pages of cache group 0; ``seconds`` is the time from process start."""

    model_name: str
    kv_pages: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ShutdownContext:
    """``reason`` is a short phrase, for example ``drained`` or the text of the error that ended the process."""

    role: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DoctorContext:
    """``options`` holds the plugin's options as they would be at start."""

    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """One line of ``plugins doctor``: ``status`` is ``ok``, ``warning`` or ``error``; ``advice`` says what to do."""

    status: str
    what: str
    advice: str = ""
