"""gpt-oss (harmony) reasoning and tool-call parsers."""
