"""Qwen3's dense models. Import ``model`` by name; ``plugin`` imports nothing heavy."""
