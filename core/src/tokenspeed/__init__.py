"""TokenSpeed: an inference engine for agent traffic, built as a plugin framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.llm import LLM
    from tokenspeed.messages import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Resolve ``LLM`` and ``SamplingParams`` on first use, so that importing the package costs nothing."""
    if name == "LLM":
        from tokenspeed.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tokenspeed.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
