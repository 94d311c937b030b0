"""The vocabulary of a model in bytes, for grammars. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers

from tokenspeed.errors import ModelError
from tokenspeed.token_pieces import piece_function
from tokenspeed.weights.toy import TOY_NAME, build_toy_tokenizer

__all__ = ["Vocabulary", "read_vocabulary"]


@dataclass(frozen=True)
class Vocabulary:
    """``pieces``: bytes by id, ``b""`` for special tokens and gaps; ``special``: ids of the special tokens by their text."""

    pieces: tuple[bytes, ...]
    special: dict[str, int]


def read_vocabulary(path: str) -> Vocabulary:
    """The vocabulary of a tokenizer.

    Args:
        path: directory with ``tokenizer.json``, GGUF file, or ``toy``.

    Raises:
        ModelError: it cannot be read, or texts are not put together from tokens one by one.
    """
    core = _read(path)
    to_bytes = piece_function(core)
    if to_bytes is None:
        raise ModelError(f"the tokenizer in {path} does not say which bytes a token stands for")
    added = core.get_added_tokens_decoder()
    special = {str(entry.content): token for token, entry in added.items() if entry.special}
    size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    hidden = set(special.values())
    return Vocabulary(tuple(b"" if token in hidden else to_bytes(token) for token in range(size)), special)


def _read(path: str) -> tokenizers.Tokenizer:
    if path == TOY_NAME:
        return build_toy_tokenizer()
    if not Path(path).is_dir():
        from tokenspeed.weights.gguf_tokenizer import build_tokenizer

        return build_tokenizer(path).tokenizer
    file = Path(path) / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ModelError(f"the tokenizer in {path} cannot be read: {error}") from error
