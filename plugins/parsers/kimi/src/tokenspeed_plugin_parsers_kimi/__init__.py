"""Kimi reasoning and tool-call parsers: K1.5, K2, K2 Thinking, K2.5."""
