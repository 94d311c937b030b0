"""Random texts that a grammar allows, drawn through its masks as a sampler would."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from tokenspeed.interfaces.grammar import CompiledGrammar, GrammarContext, mask_words

__all__ = ["STOP", "TINY", "allowed", "walk"]

# Every byte, so that no grammar leads to a dead end, and tokens that cross the borders of JSON's parts or cut a character in two.
_TOKENS = [bytes([byte]) for byte in range(256)]
_TOKENS += [
    b'{"',
    b'":',
    b'", "',
    b"true",
    b"null",
    b"]}",
    b'"}',
    b"ab",
    b"]]",
    b", ",
    b"</",
    b"<tag>",
    b"\xf0\x9f",
    b"\x98\x80",
    b"10",
    b"\\u",
]

STOP = len(_TOKENS)
#: A context with few tokens; ``STOP`` ends a text.
TINY = GrammarContext(vocabulary=[*_TOKENS, b""], vocab_size=STOP + 3, stop_token_ids=(STOP,))

_CLOSING = frozenset((b'"', b"}", b"]", b"]}", b'"}', b"]]"))


def allowed(mask: npt.NDArray[np.int32], vocab_size: int) -> list[int]:
    """Ids whose bits are set in one row."""
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])[0].tolist()


def walk(
    compiled: CompiledGrammar, rng: random.Random, *, ctx: GrammarContext = TINY, wind_up: int = 30, limit: int = 300
) -> str | None:
    """One text, or ``None`` where the walk did not end (or not in whole characters).

    Args:
        ctx: what ``compiled`` was compiled for.
        wind_up: tokens after which what closes a string, array or object is preferred.
        limit: tokens after which the walk is given up.
    """
    matcher = compiled.matcher()
    mask = np.zeros((1, mask_words(ctx.vocab_size)), dtype=np.int32)
    stops = set(ctx.stop_token_ids)
    text = bytearray()
    for step in range(limit):
        tokens = allowed(mask[0], ctx.vocab_size) if matcher.fill_mask(mask, 0) else list(range(ctx.vocab_size))
        if not tokens:
            raise AssertionError(f"no token may follow {bytes(text)!r}, and the text is not complete")
        more = [token for token in tokens if token not in stops]
        if len(more) < len(tokens) and (not more or step > wind_up or rng.random() < 0.3):
            try:
                return text.decode()
            except UnicodeDecodeError:
                return None
        closing = [token for token in more if ctx.vocabulary[token] in _CLOSING]
        token = rng.choice(closing if closing and rng.random() < (0.8 if step > wind_up else 0.15) else more)
        if not matcher.accept(token):
            raise AssertionError(
                f"the mask allows {ctx.vocabulary[token]!r} behind {bytes(text)!r}, and the matcher does not take it"
            )
        text += ctx.vocabulary[token]
    return None
