"""Qwen reasoning parsers and the Qwen3-Coder tool-call parser."""
