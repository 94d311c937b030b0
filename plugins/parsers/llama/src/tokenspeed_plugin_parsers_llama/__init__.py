"""Llama tool-call parsers: JSON and Python calls."""
