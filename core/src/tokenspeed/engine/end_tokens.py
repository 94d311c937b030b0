"""The ids that end a text of a model: from ``generation_config.json``, ``config.json`` and the tokenizer, or what a file's own metadata says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenspeed.engine.assembly import Assembly

__all__ = ["end_ids_of", "end_token_ids", "tokenizer_end_ids"]


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


def tokenizer_end_ids(directory: Path) -> frozenset[int]:
    """The id of the ``eos_token`` that a tokenizer's files name: checkpoints exist whose configuration names another one, and whose texts end with either.
    Empty where none is named."""
    try:
        config = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes(), type=_TokenizerConfig)
        added = msgspec.json.decode((directory / "tokenizer.json").read_bytes(), type=_AddedTokens)
    except (OSError, msgspec.DecodeError):  # whoever needs the tokenizer says what is wrong with it
        return frozenset()
    text = config.eos_token.get("content") if isinstance(config.eos_token, dict) else config.eos_token
    return frozenset(token.id for token in added.added_tokens if token.content == text)


def end_ids_of(assembly: Assembly, *, vocab_size: int) -> frozenset[int]:
    """All of them, for the model and tokenizer of a start."""
    config = assembly.config
    named = end_token_ids(assembly.model.config, assembly.model.generation)
    path = None if config.skip_tokenizer_init else config.tokenizer or assembly.model.tokenizer_path
    if path is not None:
        named |= tokenizer_end_ids(Path(path))
    return frozenset(token for token in named if token < vocab_size)


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | dict[str, Any] | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _ids(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [entry for entry in value if isinstance(entry, int)] if isinstance(value, list) else []
