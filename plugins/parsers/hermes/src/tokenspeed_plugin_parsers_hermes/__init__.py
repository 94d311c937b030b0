"""Tool-call parser for calls in hermes form."""
