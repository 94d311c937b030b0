"""Tool-call parser for bare JSON calls."""
