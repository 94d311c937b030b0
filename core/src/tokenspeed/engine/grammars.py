"""Where requests wait for their grammars, and the compiled ones that are kept."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenspeed.engine.grammar_compiler import Compiled
from tokenspeed.engine.requests import LiveRequest
from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GRAMMAR_KINDS, GrammarLimits, GrammarRequest
from tokenspeed.messages import Grammar
from tokenspeed.runtime.plan import SlotGrammar

__all__ = ["Compiler", "GrammarFigures", "Grammars", "grammar_key"]

#: Serialised grammars kept, in bytes, with what each takes beside that; errors kept, in number.
_MAX_BYTES = 256 << 20
_ENTRY_BYTES = 256
_MAX_ERRORS = 1024
#: How long a request waits for its grammar at most, the start of the process that compiles included.
_WAIT_S = 120.0

_NO_BACKEND = (
    "no grammar backend is active, so that nothing can be constrained: pip install tokenspeed-plugin-grammar-xgrammar "
    "(and start without --grammar-backend none)"
)


class Compiler(Protocol):
    """What compiles: ``GrammarCompiler``, which says more of each method."""

    def begin(self) -> None:
        """Get ready for the first grammar, without waiting."""

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
        wait_s: a request that has waited so long is refused with status 503.
        clock: seconds.
    """

    def __init__(
        self,
        compiler: Compiler | None = None,
        *,
        reason: str = "",
        limits: GrammarLimits | None = None,
        stop_ids: Sequence[int] = (),
        max_bytes: int = _MAX_BYTES,
        wait_s: float = _WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compiler = compiler
        self._reason = reason or _NO_BACKEND
        self._limits = limits or GrammarLimits()
        self._stop_ids = tuple(stop_ids)
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._errors: OrderedDict[bytes, str] = OrderedDict()
        self._waiting: dict[bytes, dict[int, tuple[LiveRequest, Grammar]]] = {}
        self._wait_s = wait_s
        self._clock = clock
        #: since when each request waits, and for which grammar; the longest first
        self._since: dict[int, tuple[float, bytes]] = {}
        self.figures = GrammarFigures()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def busy(self) -> bool:
        """Whether anyone waits."""
        return bool(self._waiting)

    def begin(self) -> None:
        """The engine serves from now on: get ready for the first grammar, so that its request does not pay for that. Does not wait."""
        if self._compiler is not None and self._stop_ids:
            self._compiler.begin()

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
        self._since[request.id] = self._clock(), key
        return False

    def leave(self, request: LiveRequest) -> bool:
        """``request`` ends; whether it was waiting. A compilation that has begun goes on: the next one may want it."""
        since = self._since.pop(request.id, None)
        if since is None:
            return False
        key = since[1]
        waiting = self._waiting[key]
        del waiting[request.id]
        if not waiting:
            del self._waiting[key]
            assert self._compiler is not None, "it was asked"
            self._compiler.withdraw(key)
        return True

    def collect(self) -> list[tuple[LiveRequest, GrammarError | None]]:
        """Requests whose wait is over since the last call, in order of their arrival for each grammar, and what went wrong: too long a wait, too."""
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
                del self._since[request.id]
                if result.error is None:
                    request.grammar = SlotGrammar(result.key, result.data, grammar.reasoning_end)
                over.append((request, result.error))
        over += self._expired()
        return over

    def _expired(self) -> list[tuple[LiveRequest, GrammarError | None]]:
        """Requests that have waited too long; others' grammars may stand before theirs."""
        over: list[tuple[LiveRequest, GrammarError | None]] = []
        end = self._clock() - self._wait_s
        while self._since:
            number, (since, key) = next(iter(self._since.items()))
            if since > end:
                break
            request, _ = self._waiting[key][number]
            self.leave(request)
            self.figures.failures += 1
            text = f"the request waited {self._wait_s:g} s for its grammar to be compiled; try again later"
            over.append((request, GrammarError(text, param="grammar", status=503)))
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
        if (old := self._kept.pop(key, None)) is not None:
            self._bytes -= len(old) + _ENTRY_BYTES
        self._bytes += len(data) + _ENTRY_BYTES
        self._kept[key] = data
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1]) + _ENTRY_BYTES

    def _keep_error(self, key: bytes, error: str) -> None:
        self._errors[key] = error
        if len(self._errors) > _MAX_ERRORS:
            self._errors.popitem(last=False)
