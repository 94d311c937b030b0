"""Conformance suite of grammar backends: what core relies on, whatever compiles the grammars.

::

    class TestMine(GrammarBackendSuite):
        spec = GrammarBackendSpec(name="mine", target="my_package.backend:Backend", checker="my_package.check:check")
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import (
    GRAMMAR_KINDS,
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarRequest,
    mask_words,
)
from tokenspeed.plugins.selection import load_target
from tokenspeed.plugins.specs import GrammarBackendSpec

__all__ = ["GrammarBackendSuite", "allowed_tokens", "suite_vocabulary"]

_WORDS = (
    b"true",
    b"false",
    b"null",
    b'{"',
    b'":',
    b'",',
    b"123",
    b"yes",
    b"no",
    b"maybe",
    b"}}",
    b"[]",
    b"ab",
    "é".encode(),
)
_WIDTH = 500  # logits are wider than the vocabulary, and no multiple of 32


def suite_vocabulary() -> list[bytes]:
    """Ids 0 to 255 are bytes, some longer tokens follow, then unused and special ones."""
    return [*(bytes((byte,)) for byte in range(256)), *_WORDS, b"", b"", b""]


def allowed_tokens(matcher: GrammarMatcher, vocab_size: int = _WIDTH) -> set[int] | None:
    """Ids that may follow; ``None`` where all may."""
    mask = np.full((3, mask_words(vocab_size)), 0x55555555, dtype=np.int32)
    before = mask.copy()
    if not matcher.fill_mask(mask, 1):
        return None
    assert np.array_equal(mask[[0, 2]], before[[0, 2]]), "other rows are left alone"
    bits = np.unpackbits(mask[1].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:vocab_size]).tolist())


class GrammarBackendSuite:
    """Subclass it, name the ``spec``, and pytest collects the inherited tests.

    Attributes:
        spec: the backend.
        options: plugin options that it is made with.
        samples: by kind a grammar, texts that it accepts, and texts that it does not. Kinds that are left out must be refused by ``compile``.
        malformed: grammars that are refused, (kind, value).
    """

    spec: ClassVar[GrammarBackendSpec]
    options: ClassVar[dict[str, Any]] = {}
    samples: ClassVar[dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
        "choice": (json.dumps(["yes", "no", "maybe", "é"]), ("yes", "no", "maybe", "é"), ("", "ye", "yess", "yesno")),
        "regex": ("[a-c]+(x|yz)?[0-9]*", ("a", "abcx12", "cyz"), ("", "x", "ay", "a1x")),
        "json_object": ("", ('{"a":1}', "{}"), ("[]", '{"a":', "1", "")),
    }
    malformed: ClassVar[tuple[tuple[str, str], ...]] = (("regex", "(a"), ("regex", "[a"), ("no such kind", "a"))

    stop: ClassVar[tuple[int, ...]] = (len(suite_vocabulary()) - 1,)

    @classmethod
    def context(cls) -> GrammarContext:
        """The context of the backend under test."""
        vocabulary = suite_vocabulary()
        special = {"<|end|>": cls.stop[0], "<|other|>": cls.stop[0] - 1}
        return GrammarContext(
            vocabulary=vocabulary,
            vocab_size=_WIDTH,
            stop_token_ids=cls.stop,
            special_token_ids=special,
            options=cls.options,
        )

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls) -> GrammarBackend:
        """The backend."""
        backend: GrammarBackend = load_target(cls.spec.target)(cls.context())
        return backend

    def matchers(self, backend: GrammarBackend, kind: str) -> list[GrammarMatcher]:
        """One of the grammar as it was compiled, one of what came through bytes."""
        compiled = backend.compile(GrammarRequest(kind=kind, value=self.samples[kind][0]))
        again: GrammarBackend = load_target(self.spec.target)(self.context())
        return [compiled.matcher(), again.deserialize(backend.serialize(compiled)).matcher()]

    def accepts(self, matcher: GrammarMatcher, tokens: list[int]) -> bool:
        """Feed tokens and an end, and take all of it back."""
        count = 0
        for token in [*tokens, self.stop[0]]:
            allowed = allowed_tokens(matcher)
            taken = matcher.accept(token)
            assert allowed is None or (token in allowed) == taken, "mask and accept agree"
            if not taken:
                break
            count += 1
        ended = matcher.terminated
        assert ended == (count == len(tokens) + 1)
        matcher.rollback(count)
        return ended

    def test_samples_are_accepted_and_refused(self, backend: GrammarBackend) -> None:
        """Byte by byte; masks and ``accept`` agree, also after serialising."""
        for kind, (_, good, bad) in self.samples.items():
            for matcher in self.matchers(backend, kind):
                for text in good:
                    assert self.accepts(matcher, list(text.encode())), (kind, text)
                for text in bad:
                    assert not self.accepts(matcher, list(text.encode())), (kind, text)

    def test_tokens_of_several_bytes_count_as_their_bytes(self, backend: GrammarBackend) -> None:
        """``yes`` is one token or three, and nothing longer than the grammar is allowed."""
        vocabulary = suite_vocabulary()
        matcher = self.matchers(backend, "choice")[0]
        allowed = allowed_tokens(matcher)
        assert allowed is not None
        assert {vocabulary[token] for token in allowed} == {
            b"y", b"n", b"m", b"\xc3", b"yes", b"no", b"maybe", "é".encode()
        }  # fmt: skip
        assert self.accepts(matcher, [vocabulary.index(b"yes")])
        assert self.accepts(matcher, [ord("y"), ord("e"), ord("s")])

    def test_unused_special_and_missing_ids_are_never_allowed(self, backend: GrammarBackend) -> None:
        """Neither ids without bytes nor those that only the logits know; stop tokens where the text may end, and nothing after them."""
        vocabulary = suite_vocabulary()
        forbidden = {token for token in range(_WIDTH) if token >= len(vocabulary) or not vocabulary[token]}
        forbidden -= set(self.stop)
        for kind, (_, good, _) in self.samples.items():
            matcher = self.matchers(backend, kind)[0]
            for token in good[0].encode():
                allowed = allowed_tokens(matcher)
                assert allowed is not None
                assert not allowed & forbidden
                assert not matcher.accept(_WIDTH - 1)
                assert not matcher.accept(self.stop[0] - 1)
                assert matcher.accept(token)
            assert set(self.stop) <= (allowed_tokens(matcher) or set(self.stop))
            assert matcher.accept(self.stop[0])
            assert matcher.terminated
            assert not matcher.accept(ord("a"))

    def test_a_walk_can_be_taken_back(self, backend: GrammarBackend) -> None:
        """Random walks of up to 64 tokens, undone in pieces: the masks on the way back are those of the way there."""
        rng = random.Random(7)
        for kind in self.samples:
            for matcher in self.matchers(backend, kind):
                self._walk_back(matcher, rng)

    def _walk_back(self, matcher: GrammarMatcher, rng: random.Random) -> None:
        masks = [allowed_tokens(matcher)]
        while len(masks) <= 64 and not matcher.terminated:
            allowed = masks[-1]
            token = rng.choice(sorted(allowed)) if allowed is not None else rng.randrange(256)
            assert matcher.accept(token)
            masks.append(None if matcher.terminated else allowed_tokens(matcher))
        while len(masks) > 1:
            count = rng.randint(1, len(masks) - 1)
            matcher.rollback(count)
            del masks[-count:]
            assert not matcher.terminated
            assert allowed_tokens(matcher) == masks[-1]
        matcher.rollback(0)
        assert allowed_tokens(matcher) == masks[0]

    def test_matchers_of_one_grammar_do_not_know_of_each_other(self, backend: GrammarBackend) -> None:
        """A compiled grammar is shared; where a request stands in it is not."""
        compiled = backend.compile(GrammarRequest(kind="choice", value=self.samples["choice"][0]))
        one, other = compiled.matcher(), compiled.matcher()
        before = allowed_tokens(other)
        assert one.accept(ord("y"))
        assert allowed_tokens(other) == before
        assert allowed_tokens(one) != before

    def test_what_is_malformed_or_unknown_is_refused_with_a_reason(self, backend: GrammarBackend) -> None:
        """``GrammarError`` and nothing else, from ``compile`` and, where it sees it, from the checker; what is left out of ``samples`` is malformed too."""
        checker: Callable[[str, str], None] = load_target(self.spec.checker)
        for kind, value in self.malformed:
            with pytest.raises(GrammarError) as caught:
                backend.compile(GrammarRequest(kind=kind, value=value))
            assert caught.value.message
            with pytest.raises(GrammarError):
                checker(kind, value)
        for kind, (value, _, _) in self.samples.items():
            assert kind in GRAMMAR_KINDS
            checker(kind, value)

    def test_the_checker_imports_no_torch(self) -> None:
        """The server calls it, and has none."""
        module = self.spec.checker.partition(":")[0]
        text = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
