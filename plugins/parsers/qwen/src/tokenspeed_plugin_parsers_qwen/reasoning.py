"""Qwen reasoning: ``<think>`` .. ``</think>``."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import TagReasoningParser

__all__ = ["QwenReasoningParser"]


class QwenReasoningParser(TagReasoningParser):
    """Hybrid Qwen3 writes both tags itself, or finds an empty closed block in the prompt; the thinking models find the open tag there."""
