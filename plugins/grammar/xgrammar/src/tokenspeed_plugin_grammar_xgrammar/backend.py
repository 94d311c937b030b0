"""XGrammar behind the contract of ``interfaces.grammar``.

Masks are filled on the host. A grammar that compiled quickly travels between processes as what it was compiled from, since reading XGrammar's own JSON of
it takes up to ten times as long; only a slow one travels as that JSON, compressed. XGrammar leaves Python's lock while it compiles.

Special tokens have their text in the vocabulary that is compiled against, and a mask lets through only those that a structural tag writes: ``<tool_call>``
may be one token where the tag says so, and no other special token gets into a JSON string.

Where the whole text is JSON, tokens with control characters are kept out: XGrammar would let them into strings of a bounded length, and white space needs
none but the blank.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar

from tokenspeed.interfaces.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarRequest,
    mask_words,
)
from tokenspeed_plugin_grammar_xgrammar.checker import normal_form
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_WHITE_SPACE, refuse
from tokenspeed_plugin_grammar_xgrammar.patterns import Marks
from tokenspeed_plugin_grammar_xgrammar.tags import literals

__all__ = ["XGrammarBackend"]

#: How XGrammar compiles a text, and the text.
Source = tuple[str, str]
#: Seconds of compiling up to which doing it again is the quickest way to pass a grammar on.
_QUICK_S = 0.25
#: Memory of one id in a set of ids and in ``head``.
_FORBIDDEN_BYTES = 128

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
        self._control = [token for token, piece in enumerate(ctx.vocabulary) if any(byte < 0x20 for byte in piece)]
        # Tokens without text match nothing; XGrammar counts them as special and never allows them.
        self._tokenizer = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=ctx.vocab_size, stop_token_ids=sorted(set(ctx.stop_token_ids))
        )
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)

    def compile(self, request: GrammarRequest) -> XGrammarCompiled:
        form = normal_form(request.kind, request.value)
        written = literals(form["format"]) if request.kind == "structural_tag" else []
        begin = time.thread_time()
        try:
            source = self._source(request.kind, form)
            compiled = self._compile(source)
        except (RuntimeError, ValueError) as error:
            raise refuse("$", f"XGrammar does not take this grammar: {_reason(error)}") from error
        quick = time.thread_time() - begin < _QUICK_S
        return self._wrap(
            compiled,
            self._unwritten(written),
            request.kind in ("json_object", "json_schema"),
            source if quick else None,
        )

    def _source(self, kind: str, form: Any) -> Source:
        """What XGrammar compiles: its method and the text."""
        marks = Marks()
        match kind:
            case "json_object" | "json_schema":
                schema = json.dumps(marks.set(form))
                if not marks.patterns:
                    return "schema", schema
                return "ebnf", marks.resolve(
                    xgrammar.Grammar.from_json_schema(schema, strict_mode=True, max_whitespace_cnt=MAX_WHITE_SPACE)
                )
            case "structural_tag":
                tag = json.dumps({"type": "structural_tag", "format": _marked(form["format"], marks)})
                return (
                    ("ebnf", marks.resolve(xgrammar.Grammar.from_structural_tag(tag)))
                    if marks.patterns
                    else ("tag", tag)
                )
            case "ebnf":
                return "ebnf", form
        return "regex", form

    def _compile(self, source: Source) -> xgrammar.CompiledGrammar:
        method, text = source
        match method:
            case "schema":
                return self._compiler.compile_json_schema(text, strict_mode=True, max_whitespace_cnt=MAX_WHITE_SPACE)
            case "tag":
                return self._compiler.compile_structural_tag(text)
            case "ebnf":
                return self._compiler.compile_grammar(text)
        return self._compiler.compile_regex(text)

    def _wrap(
        self, grammar: xgrammar.CompiledGrammar, unwritten: list[int], only_json: bool, source: Source | None
    ) -> XGrammarCompiled:
        forbidden = frozenset(unwritten).union(self._control if only_json else ())
        return XGrammarCompiled(
            grammar, self.ctx.vocab_size, forbidden, {"unwritten": unwritten, "only_json": only_json, "source": source}
        )

    def _unwritten(self, written: Sequence[str | int]) -> list[int]:
        """Special tokens that no literal of the grammar holds, sorted."""
        texts = [item for item in written if isinstance(item, str)]
        kept = {item for item in written if isinstance(item, int)}.union(self.ctx.stop_token_ids)
        return sorted(
            token
            for text, token in self._special.items()
            if token not in kept and not any(text in literal for literal in texts)
        )

    def serialize(self, compiled: CompiledGrammar) -> bytes:
        if not isinstance(compiled, XGrammarCompiled):
            raise TypeError(f"a grammar of {type(compiled).__name__} is not this backend's")
        body = b"" if compiled.head["source"] else compiled.grammar.serialize_json().encode()
        # Such text repeats itself so much that the fastest level makes a tenth of it.
        return zlib.compress(json.dumps(compiled.head).encode() + b"\n" + body, 1)

    def deserialize(self, data: bytes) -> XGrammarCompiled:
        head, _, body = zlib.decompress(data).partition(b"\n")
        found = json.loads(head)
        if found["source"]:
            return self._wrap(self._compile(found["source"]), **found)
        return self._wrap(xgrammar.CompiledGrammar.deserialize_json(body.decode(), self._tokenizer), **found)


def _marked(format: Any, marks: Marks) -> Any:
    """``format`` with marks for the patterns of its JSON schemas."""
    if isinstance(format, list):
        return [_marked(item, marks) for item in format]
    if not isinstance(format, dict):
        return format
    return {key: marks.set(value) if key == "json_schema" else _marked(value, marks) for key, value in format.items()}


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
        head: all but ``grammar`` that another process needs to make this again, as JSON.
    """

    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocab_size: int, forbidden: frozenset[int], head: dict[str, Any]
    ) -> None:
        self.grammar, self.forbidden, self.head = grammar, forbidden, head
        self._allowed: Mask | None = None
        if forbidden:
            bits = np.ones(32 * mask_words(vocab_size), dtype=np.uint8)
            bits[sorted(forbidden)] = 0
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def nbytes(self) -> int:
        row = 0 if self._allowed is None else self._allowed.nbytes
        return int(self.grammar.memory_size_bytes) + row + _FORBIDDEN_BYTES * len(self.forbidden)

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.grammar, self.forbidden, self._allowed)


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
