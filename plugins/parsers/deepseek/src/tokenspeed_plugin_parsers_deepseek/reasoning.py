"""DeepSeek reasoning: ``<think>`` .. ``</think>``, opened by the prompt."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import TagReasoningParser

__all__ = ["DeepSeekReasoningParser"]


class DeepSeekReasoningParser(TagReasoningParser):
    """R1's template always opens the block; those of V3.1 and later open or close it by the request's ``thinking``. The prompt says which."""
