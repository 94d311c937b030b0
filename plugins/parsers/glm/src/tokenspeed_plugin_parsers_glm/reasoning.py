"""GLM reasoning: ``<think>`` .. ``</think>``."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import TagReasoningParser

__all__ = ["GlmReasoningParser"]


class GlmReasoningParser(TagReasoningParser):
    """GLM-4.5 and 4.6 write both tags; from 4.7 on the prompt may open the block."""
