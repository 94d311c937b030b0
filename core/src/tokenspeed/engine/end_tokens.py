"""The ids that end a text of a model: from ``generation_config.json`` and ``config.json``, or what a file's own metadata says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["end_token_ids"]


def end_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end generation; empty where the model names none.

    Chat models often end a turn with another token (named in ``generation_config.json``) than a document (``config.json``): both end a text. Each
    place may hold one id or a list.

    Args:
        config: the parsed ``config.json``, or what stands for it; the language model's part may be nested in ``text_config``.
        generation: the parsed ``generation_config.json``, or empty.
    """
    text_config = config.get("text_config")
    places = [generation, config, text_config if isinstance(text_config, Mapping) else {}]
    return frozenset(token for place in places for token in _ids(place.get("eos_token_id")))


def _ids(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [entry for entry in value if isinstance(entry, int)] if isinstance(value, list) else []
