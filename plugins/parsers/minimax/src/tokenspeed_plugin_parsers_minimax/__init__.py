"""MiniMax M2 reasoning and tool-call parsers."""
