"""Where requests wait for their grammars, and the compiled ones that are kept."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenspeed.engine.grammar_compiler import Compiled
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GRAMMAR_KINDS, GrammarLimits, GrammarRequest
from tokenspeed.messages import Grammar
from tokenspeed.runtime.plan import SlotGrammar

__all__ = ["Compiler", "GrammarFigures", "Grammars", "grammar_key"]

#: Serialised grammars kept, in bytes; errors kept, in number.
_MAX_BYTES = 256 << 20
_MAX_ERRORS = 1024

_NO_BACKEND = (
    "no grammar backend is active, so that nothing can be constrained: pip install tokenspeed-plugin-grammar-xgrammar "
    "(and start without --grammar-backend none)"
)


class Compiler(Protocol):
    """What compiles: ``GrammarCompiler``, which says more of each method."""

    def submit(self, key: bytes, request: GrammarRequest) -> None:
        """Queue a grammar; raises ``GrammarError`` where too many wait."""

    def withdraw(self, key: bytes) -> None:
        """Nobody waits for ``key`` any more."""

    def results(self) -> list[Compiled]:
        """What has ended since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Wait until something has ended."""

    def close(self) -> None:
        """End what compiles."""


@dataclass(slots=True)
class GrammarFigures:
    """Cumulative: grammars compiled and the seconds that took (failures included), requests served from the cache, requests that failed for theirs."""

    compiles: int = 0
    compile_seconds: float = 0.0
    hits: int = 0
    failures: int = 0


def grammar_key(grammar: Grammar) -> bytes:
    """16 bytes that stand for a grammar's kind and text."""
    return hashlib.sha256(f"{grammar.kind}\0{grammar.value}".encode("utf-8", "surrogatepass")).digest()[:16]


class Grammars:
    """Gives each request its grammar, at once or later.

    Args:
        compiler: ``None`` where there is no backend, or none that can work; ``reason`` says why then.
        limits: what a request may ask for.
        stop_ids: the model's stop tokens; without any no grammar can end.
        max_bytes: of serialised grammars that are kept, the least recently used ones given up.
    """

    def __init__(
        self,
        compiler: Compiler | None = None,
        *,
        reason: str = _NO_BACKEND,
        limits: GrammarLimits | None = None,
        stop_ids: Sequence[int] = (),
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._compiler = compiler
        self._reason = reason
        self._limits = limits or GrammarLimits()
        self._stop_ids = tuple(stop_ids)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._errors: OrderedDict[bytes, str] = OrderedDict()
        self._waiting: dict[bytes, dict[int, tuple[LiveRequest, Grammar]]] = {}
        self.figures = GrammarFigures()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def busy(self) -> bool:
        """Whether anyone waits."""
        return bool(self._waiting)

    def check(self, grammar: Grammar) -> None:
        """Raises ``GrammarError`` for what cannot be compiled at all."""
        if self._compiler is None:
            raise GrammarError(self._reason, param="grammar")
        if grammar.kind not in GRAMMAR_KINDS:
            raise GrammarError(
                f"no grammar is of kind {grammar.kind!r}; kinds are {', '.join(GRAMMAR_KINDS)}", param="grammar"
            )
        if not self._stop_ids:
            raise GrammarError("the model names no token that ends a text, so that no grammar can end", param="grammar")
        size = len(grammar.value.encode("utf-8", "surrogatepass"))
        if size > self._limits.value_bytes:
            raise GrammarError(f"the grammar has {size} bytes; {self._limits.value_bytes} are allowed", param="grammar")

    def ask(self, request: LiveRequest, grammar: Grammar) -> bool:
        """Give ``request`` its grammar; false where it has to wait for that.

        Raises:
            GrammarError: the grammar is known to fail, or too many wait.
        """
        key = grammar_key(grammar)
        if key in self._errors:
            self._errors.move_to_end(key)
            self.figures.hits += 1
            self.figures.failures += 1
            raise GrammarError(self._errors[key], param="grammar")
        if key in self._kept:
            self._kept.move_to_end(key)
            self.figures.hits += 1
            request.grammar = SlotGrammar(key, self._kept[key], grammar.reasoning_end)
            return True
        if key not in self._waiting:
            assert self._compiler is not None, "check comes first"
            try:
                self._compiler.submit(key, GrammarRequest(kind=grammar.kind, value=grammar.value))
            except GrammarError:
                self.figures.failures += 1
                raise
        self._waiting.setdefault(key, {})[request.id] = request, grammar
        return False

    def leave(self, request: LiveRequest) -> bool:
        """``request`` ends; whether it was waiting. A compilation that has begun goes on: the next one may want it."""
        left = False
        for key, waiting in list(self._waiting.items()):
            if waiting.pop(request.id, None) is None:
                continue
            left = True
            if not waiting:
                del self._waiting[key]
                assert self._compiler is not None, "it was asked"
                self._compiler.withdraw(key)
        return left

    def collect(self) -> list[tuple[LiveRequest, GrammarError | None]]:
        """Requests whose wait is over since the last call, in order of their arrival for each grammar, and what went wrong."""
        if self._compiler is None:
            return []
        over: list[tuple[LiveRequest, GrammarError | None]] = []
        for result in self._compiler.results():
            self.figures.compiles += 1
            self.figures.compile_seconds += result.seconds
            waiting = self._waiting.pop(result.key, {})
            if result.error is not None:
                if result.lasting:
                    self._keep_error(result.key, result.error.message)
                self.figures.failures += len(waiting)
            else:
                self._keep(result.key, result.data)
            for request, grammar in waiting.values():
                if result.error is None:
                    request.grammar = SlotGrammar(result.key, result.data, grammar.reasoning_end)
                over.append((request, result.error))
        return over

    def wait(self, timeout_s: float) -> None:
        """Wait until a grammar is there, where anyone waits for one."""
        if self._waiting and self._compiler is not None:
            self._compiler.wait(timeout_s)

    def close(self) -> None:
        """End the process that compiles."""
        if self._compiler is not None:
            self._compiler.close()

    def _keep(self, key: bytes, data: bytes) -> None:
        self._bytes += len(data) - len(self._kept.pop(key, b""))
        self._kept[key] = data
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def _keep_error(self, key: bytes, error: str) -> None:
        self._errors[key] = error
        if len(self._errors) > _MAX_ERRORS:
            self._errors.popitem(last=False)
