"""DeepSeek reasoning and tool-call parsers: R1, V3, V3.1, V3.2 and V4."""
