"""Kimi reasoning: ``◁think▷`` .. ``◁/think▷`` in K1.5 and the VL models, ``<think>`` .. ``</think>`` since K2 Thinking."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import TagReasoningParser

__all__ = ["KimiK2ReasoningParser", "KimiReasoningParser"]


class KimiReasoningParser(TagReasoningParser):
    """K1.5 and the VL models write both tags."""

    start = "◁think▷"
    end = "◁/think▷"


class KimiK2ReasoningParser(TagReasoningParser):
    """The prompt opens the block, or (K2.5 with thinking off) holds a closed one."""
