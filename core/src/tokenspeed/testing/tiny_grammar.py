"""A grammar backend in a few lines of Python, so that what stands around one can be tested without a library: choices, a small language of regular
expressions, and JSON objects of digits.

States are sets of positions in a program, as in Thompson's simulation of regular expressions (1968); a token is allowed where its bytes lead to any.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarRequest,
    Mask,
)

__all__ = ["TinyGrammarBackend", "check"]

#: What a state does: take one of these bytes, or go on at two places, or be the end.
_Node = tuple[frozenset[int], int] | tuple[None, tuple[int, ...]]
_States = frozenset[int]
_JSON_OBJECT = r"{}|{\"[a-z]+\":[0-9]+(,\"[a-z]+\":[0-9]+)*}"


def check(kind: str, value: str) -> None:
    """The backend's checker. Raises ``GrammarError``."""
    _program(kind, value)


class TinyGrammarBackend(GrammarBackend):
    """Kinds ``choice``, ``regex`` (literals, ``\\`` before one, ``.``, ``[a-z]``, ``( | )``, ``* + ?``), ``json_object``, and ``json_schema`` of the form
    ``{"pattern": REGEX}``. A regex ``\\!...`` misbehaves while it is compiled: ``\\!sleep``, ``\\!die``, ``\\!huge``, ``\\!raise``."""

    def compile(self, request: GrammarRequest) -> CompiledGrammar:
        if request.value.startswith(r"\!"):
            _misbehave(request.value[2:])
        return _Compiled(self.ctx, _program(request.kind, request.value), request)

    def serialize(self, compiled: CompiledGrammar) -> bytes:
        assert isinstance(compiled, _Compiled), "it is this backend's own"
        padding = self.ctx.limits.compiled_bytes + 1 if compiled.request.value == r"\!huge" else 0
        return json.dumps([compiled.request.kind, compiled.request.value, " " * padding]).encode()

    def deserialize(self, data: bytes) -> CompiledGrammar:
        kind, value, _ = json.loads(data)
        return _Compiled(self.ctx, _program(kind, value), GrammarRequest(kind=kind, value=value))


def _misbehave(how: str) -> None:
    if how == "sleep":
        while True:
            time.sleep(0.01)
    if how == "spin":
        while True:
            pass
    if how == "die":
        os.kill(os.getpid(), 9)
    if how == "raise":
        raise RuntimeError("something in a library broke")


class _Compiled(CompiledGrammar):
    def __init__(self, ctx: GrammarContext, program: list[_Node], request: GrammarRequest) -> None:
        self.ctx = ctx
        self.program = program
        self.request = request
        self.stops = frozenset(ctx.stop_token_ids)
        self._closures: dict[int, _States] = {}
        self._masks: dict[_States, Mask] = {}

    def matcher(self) -> GrammarMatcher:
        return _Matcher(self)

    def closure(self, states: Sequence[int]) -> _States:
        """All states that are reached without a byte."""
        seen: set[int] = set()
        todo = list(states)
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            node = self.program[state]
            if node[0] is None:
                todo += node[1]
        return frozenset(seen)

    def step(self, states: _States, piece: bytes) -> _States:
        """Where the bytes lead; empty where nowhere."""
        for byte in piece:
            after = []
            for state in states:
                node = self.program[state]
                if node[0] is not None and byte in node[0]:
                    after.append(node[1])
            states = self.closure(after)
            if not states:
                break
        return states

    def ends(self, states: _States) -> bool:
        """The text may end here."""
        return any(self.program[state] == (None, ()) for state in states)

    def mask(self, states: _States) -> Mask:
        """(words) int32."""
        if states not in self._masks:
            words = -(-self.ctx.vocab_size // 32)
            allowed = np.zeros(words * 32, dtype=np.uint8)
            for token, piece in enumerate(self.ctx.vocabulary):
                allowed[token] = bool(piece) and token not in self.stops and bool(self.step(states, piece))
            if self.ends(states):
                allowed[sorted(self.stops)] = 1
            self._masks[states] = np.packbits(allowed, bitorder="little").view(np.int32)
        return self._masks[states]


class _Matcher(GrammarMatcher):
    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._states: list[_States] = [compiled.closure([0])]
        self._terminated = False

    @property
    def terminated(self) -> bool:
        return self._terminated

    def accept(self, token: int) -> bool:
        compiled, states = self._compiled, self._states[-1]
        if self._terminated or not 0 <= token < len(compiled.ctx.vocabulary):
            return False
        if token in compiled.stops:
            if not compiled.ends(states):
                return False
            self._terminated = True
            self._states.append(states)
            return True
        piece = compiled.ctx.vocabulary[token]
        after = compiled.step(states, piece) if piece else frozenset()
        if not after:
            return False
        self._states.append(after)
        return True

    def fill_mask(self, mask: Mask, row: int) -> bool:
        mask[row] = self._compiled.mask(self._states[-1])
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self._states[-count:]
            self._terminated = False


def _program(kind: str, value: str) -> list[_Node]:
    """State 0 is where it begins."""
    if kind == "choice":
        return _Regex("|".join(_escaped(choice) for choice in json.loads(value))).program
    if kind == "regex":
        return _Regex(value).program
    if kind == "json_object":
        return _Regex(_JSON_OBJECT).program
    if kind == "json_schema":
        schema = json.loads(value)
        if set(schema) != {"pattern"}:
            raise GrammarError(f"$: only pattern is enforced, not {', '.join(sorted(set(schema) - {'pattern'}))}")
        return _Regex(schema["pattern"]).program
    raise GrammarError(f"grammars of kind {kind} are not compiled")


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\.[]()|*+?!" else char for char in text)


class _Regex:
    """Parser by descent; ``program`` grows backwards in ``_nodes`` and is turned round in the end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._nodes: list[_Node] = [(None, ())]
        start = self._alternatives(0)
        if self._at < len(text):
            self._fail(f"{text[self._at]!r} closes nothing")
        self.program: list[_Node] = [(None, (start + 1,))]
        for node in self._nodes:
            if node[0] is None:
                self.program.append((None, tuple(state + 1 for state in node[1])))
            else:
                self.program.append((node[0], node[1] + 1))

    def _add(self, node: _Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _alternatives(self, end: int) -> int:
        starts = [self._sequence(end)]
        while self._peek() == "|":
            self._at += 1
            starts.append(self._sequence(end))
        return self._add((None, tuple(starts))) if len(starts) > 1 else starts[0]

    def _sequence(self, end: int) -> int:
        """Parses its items first to last, and links them last to first: each is parsed again when it is known what follows."""
        spans: list[int] = []
        while self._peek() not in ("", "|", ")"):
            spans.append(self._at)
            self._item(0)
        stop = self._at
        for begin in reversed(spans):
            self._at = begin
            end = self._item(end)
        self._at = stop
        return end

    def _item(self, end: int) -> int:
        begin = self._at
        start = self._atom(end)
        sign = self._peek()
        if sign not in ("*", "+", "?"):
            return start
        after = self._at + 1
        if sign == "?":
            self._at = after
            return self._add((None, (start, end)))
        loop = self._add((None, ()))
        self._at = begin
        again = self._atom(loop)
        self._nodes[loop] = (None, (again, end))
        self._at = after
        return loop if sign == "*" else again

    def _atom(self, end: int) -> int:
        char = self._peek()
        self._at += 1
        if char == "(":
            start = self._alternatives(end)
            if self._peek() != ")":
                self._fail("a ( is not closed")
            self._at += 1
            return start
        if char == "[":
            close = self._text.find("]", self._at)
            if close < 0:
                self._fail("a [ is not closed")
            body, self._at = self._text[self._at : close].encode(), close + 1
            return self._add((frozenset(_set(body)), end))
        if char == ".":
            return self._add((frozenset(range(256)) - {10}, end))
        if char in "*+?":
            self._fail(f"{char!r} repeats nothing")
        if char == "\\":
            char = self._peek()
            self._at += 1
        for byte in reversed(char.encode()):
            end = self._add((frozenset((byte,)), end))
        return end

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _fail(self, why: str) -> NoReturn:
        raise GrammarError(f"the regular expression {self._text!r} is malformed: {why}")


def _set(body: bytes) -> set[int]:
    found: set[int] = set()
    at = 0
    while at < len(body):
        if at + 2 < len(body) and body[at + 1 : at + 2] == b"-":
            found.update(range(body[at], body[at + 2] + 1))
            at += 3
        else:
            found.add(body[at])
            at += 1
    return found
