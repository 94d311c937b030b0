"""Llama 3 tool calls: bare JSON objects, perhaps behind ``<|python_tag|>``."""

from __future__ import annotations

from tokenspeed.interfaces.parsing import BareJsonParser

__all__ = ["LlamaJsonToolParser"]


class LlamaJsonToolParser(BareJsonParser):
    """``{"name": .., "parameters": {..}}``, separated by ``;`` or line breaks; ``arguments`` is read as well."""

    around = ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>")
    arguments_key = "parameters"
    needs_special_tokens = True
