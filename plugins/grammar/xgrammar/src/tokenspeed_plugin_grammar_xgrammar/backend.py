"""XGrammar behind the contract of ``interfaces.grammar``.

A compiled grammar travels as compressed JSON of XGrammar's own; masks are filled on the host. Special tokens have their text in the vocabulary that is
compiled against, and a mask lets through only those that a structural tag writes: ``<tool_call>`` may be one token where the tag says so, and no other
special token gets into a JSON string.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar
from tokenspeed.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, GrammarMatcher, GrammarRequest, mask_words
from tokenspeed_plugin_grammar_xgrammar.checker import normal_form
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_WHITE_SPACE, refuse
from tokenspeed_plugin_grammar_xgrammar.tags import literals

__all__ = ["XGrammarBackend"]

Mask = npt.NDArray[np.int32]


class XGrammarBackend(GrammarBackend):
    """Compiles on the calling thread, caches nothing: core does both where it wants them."""

    def __init__(self, ctx: GrammarContext) -> None:
        super().__init__(ctx)
        pieces = list(ctx.vocabulary) + [b""] * (ctx.vocab_size - len(ctx.vocabulary))
        for text, token in ctx.special_token_ids.items():
            if token < len(pieces) and token not in ctx.stop_token_ids:
                pieces[token] = text.encode()
        self._special = {text: token for text, token in ctx.special_token_ids.items() if token < ctx.vocab_size}
        # Tokens without text match nothing; XGrammar counts them as special and never allows them.
        self._tokenizer = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=ctx.vocab_size, stop_token_ids=sorted(set(ctx.stop_token_ids))
        )
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)

    def compile(self, request: GrammarRequest) -> XGrammarCompiled:
        form = normal_form(request.kind, request.value)
        written = literals(form["format"]) if request.kind == "structural_tag" else []
        try:
            compiled = self._compile(request.kind, form)
        except (RuntimeError, ValueError) as error:
            raise refuse("$", f"XGrammar does not take this grammar: {_reason(error)}") from error
        return XGrammarCompiled(compiled, self.ctx.vocab_size, self._forbidden(written))

    def _compile(self, kind: str, form: Any) -> xgrammar.CompiledGrammar:
        match kind:
            case "json_object" | "json_schema":
                return self._compiler.compile_json_schema(json.dumps(form), strict_mode=True, max_whitespace_cnt=MAX_WHITE_SPACE)
            case "ebnf":
                return self._compiler.compile_grammar(form)
            case "structural_tag":
                return self._compiler.compile_structural_tag(json.dumps(form))
        return self._compiler.compile_regex(form)

    def _forbidden(self, written: Iterable[str]) -> list[int]:
        """Special tokens that no literal of the grammar holds, sorted."""
        texts = list(written)
        stops = set(self.ctx.stop_token_ids)
        return sorted(token for text, token in self._special.items() if token not in stops and not any(text in literal for literal in texts))

    def serialize(self, compiled: CompiledGrammar) -> bytes:
        if not isinstance(compiled, XGrammarCompiled):
            raise TypeError(f"a grammar of {type(compiled).__name__} is not this backend's")
        head = json.dumps(compiled.forbidden).encode()
        # The text repeats itself so much that the fastest level makes a tenth of it.
        return head + b"\n" + zlib.compress(compiled.grammar.serialize_json().encode(), 1)

    def deserialize(self, data: bytes) -> XGrammarCompiled:
        head, _, body = data.partition(b"\n")
        grammar = xgrammar.CompiledGrammar.deserialize_json(zlib.decompress(body).decode(), self._tokenizer)
        return XGrammarCompiled(grammar, self.ctx.vocab_size, json.loads(head))


def _reason(error: Exception) -> str:
    """An error of XGrammar without its place in its source."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    _, found, rest = line.partition(".cc:")
    return rest.partition(": ")[2] if found else line


class XGrammarCompiled(CompiledGrammar):
    """A compiled grammar.

    Args:
        grammar: XGrammar's own.
        vocab_size: width of masks.
        forbidden: tokens that are not allowed though their text fits.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int, forbidden: list[int]) -> None:
        self.grammar, self.vocab_size, self.forbidden = grammar, vocab_size, forbidden
        self._allowed: Mask | None = None
        if forbidden:
            bits = np.ones(32 * mask_words(vocab_size), dtype=np.uint8)
            bits[forbidden] = 0
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.grammar, frozenset(self.forbidden), self._allowed)


class XGrammarMatcher(GrammarMatcher):
    """One request's place in a grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, forbidden: frozenset[int], allowed: Mask | None) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._forbidden, self._allowed = forbidden, allowed

    @property
    def terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        # XGrammar prints a warning for a token behind the end.
        return token not in self._forbidden and not self.terminated and bool(self._matcher.accept_token(token))

    def fill_mask(self, mask: Mask, row: int) -> bool:
        masked = bool(self._matcher.fill_next_token_bitmask(mask, row))
        if self._allowed is None:
            return masked
        if masked:
            mask[row] &= self._allowed
        else:
            mask[row] = self._allowed
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
