"""Mistral reasoning and tool-call parsers: tokenizers v2 to v13."""
