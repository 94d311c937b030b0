"""Contract of a grammar backend (``GrammarBackendSpec``, API 1). Importing this imports no torch.

A grammar says which texts a request may generate. It is compiled against the vocabulary once, in a process that may be killed, and comes back as bytes. Each
request has a matcher of its own: after every token it tells which tokens may follow. A matcher never raises on a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "GRAMMAR_KINDS",
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarContext",
    "GrammarLimits",
    "GrammarMatcher",
    "GrammarRequest",
    "mask_words",
]

#: What ``GrammarRequest.kind`` may be, and so what a backend must compile.
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag")

Mask = npt.NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """int32 words of one row of a mask: 32 tokens each."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, kw_only=True)
class GrammarRequest:
    """What to compile.

    Attributes:
        kind: of ``GRAMMAR_KINDS``.
        value: the text of a JSON schema, a regular expression, an EBNF grammar, a JSON list of choices, or the JSON of a structural tag; empty for
            ``json_object``.
    """

    kind: str
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Bounds that core enforces around a backend: a request past one of them fails, and nothing else does.

    Attributes:
        value_bytes: bytes of ``GrammarRequest.value`` in UTF-8 at most.
        compiled_bytes: bytes of ``serialize``'s result at most.
        compile_s: seconds of one compilation at most; its process is killed then.
    """

    value_bytes: int = 1 << 20
    compiled_bytes: int = 4 << 20
    compile_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class GrammarContext:
    """What a backend is built from: in each engine process, and in the process that compiles.

    Attributes:
        vocabulary: bytes that each token stands for, by id; ``b""`` for ids that are unused or special, which no grammar allows.
        vocab_size: width of the logits, at least ``len(vocabulary)``; ids beyond the vocabulary are never allowed.
        stop_token_ids: ids that end a text of the model. Allowed exactly where the grammar may end.
        special_token_ids: ids of all special tokens by their text, for grammars that name one (structural tags); they are ``b""`` in ``vocabulary``.
        limits: what core enforces, so that a backend can refuse early and with a better reason.
        options: options of the plugin that contributes the backend.
    """

    vocabulary: Sequence[bytes]
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    special_token_ids: Mapping[str, int] = field(default_factory=dict)
    limits: GrammarLimits = field(default_factory=GrammarLimits)
    options: Mapping[str, Any] = field(default_factory=dict)


class GrammarMatcher(ABC):
    """Where one request stands in its grammar."""

    @property
    @abstractmethod
    def terminated(self) -> bool:
        """A stop token was accepted: nothing may follow."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Take the next token. False: the grammar does not allow it, or has terminated; nothing has changed then."""

    @abstractmethod
    def fill_mask(self, mask: Mask, row: int) -> bool:
        """Say which tokens may follow; not called when ``terminated``.

        Args:
            mask: (rows, ``mask_words(vocab_size)``) int32, C-contiguous. Bit ``i % 32`` of word ``i // 32`` in ``row`` stands for token ``i``; all bits of
                the row are overwritten, 1 is allowed. Stop tokens are allowed exactly where the text may end; where nothing else may follow they are the
                only ones. At least one token is allowed.

        Returns:
            False where every token is allowed; the row's bits then mean nothing.
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens, a stop token among them. ``count`` is at most the number accepted; at least 64 can be undone."""


class CompiledGrammar(ABC):
    """A grammar compiled against the vocabulary; immutable and shared by all requests that asked for it."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, by which core bounds how many it keeps; 0 where that is no more than its serialised form."""
        return 0

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """A matcher at the grammar's beginning."""


class GrammarBackend(ABC):
    """Compiles grammars. One per process; ``compile`` and ``serialize`` are called in a process of their own, ``deserialize`` and matchers in the engine's,
    possibly in another thread than the step loop's."""

    def __init__(self, ctx: GrammarContext) -> None:
        self.ctx = ctx

    @abstractmethod
    def compile(self, request: GrammarRequest) -> CompiledGrammar:
        """Compile ``request``.

        Raises:
            GrammarError: it is malformed, or asks for what the grammar would not enforce; the message names keyword and path.
        """

    @abstractmethod
    def serialize(self, compiled: CompiledGrammar) -> bytes:
        """``compiled``, made by this backend's ``compile``, as bytes."""

    @abstractmethod
    def deserialize(self, data: bytes) -> CompiledGrammar:
        """What ``serialize`` made in another process with the same context. Fast: it must not compile anything that takes long."""
