"""GLM reasoning and tool-call parsers: 4.5, 4.6, 4.7 and 5."""
