"""Magistral reasoning: ``[THINK]`` .. ``[/THINK]``."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import TagReasoningParser

__all__ = ["MistralReasoningParser"]


class MistralReasoningParser(TagReasoningParser):
    """The model writes both tags, which are special tokens; no start tag means no reasoning."""

    start = "[THINK]"
    end = "[/THINK]"
    needs_special_tokens = True
