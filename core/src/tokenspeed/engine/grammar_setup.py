"""From an assembly to its grammar backend: on every rank one that follows grammars, on rank 0 a process that compiles them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.end_tokens import end_ids_of
from tokenspeed.engine.grammar_compiler import GrammarCompiler
from tokenspeed.engine.grammar_worker import WorkerStart, backend_from
from tokenspeed.engine.grammars import Grammars
from tokenspeed.errors import ConfigError, ModelError
from tokenspeed.interfaces.grammar import GrammarLimits, mask_words
from tokenspeed.runtime.grammar import GrammarStore, SlotGrammars
from tokenspeed.weights.vocabulary import read_vocabulary

__all__ = ["GrammarParts", "build_grammars", "load_grammar_parts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GrammarParts:
    """What one rank follows grammars with; ``reason`` says why there is nothing, empty where no backend was chosen. ``rank`` 0 decides which take too long."""

    start: WorkerStart | None = None
    store: GrammarStore | None = None
    reason: str = ""
    rank: int = 0

    def for_slots(self, max_slots: int) -> SlotGrammars | None:
        """Matchers by slot."""
        if self.start is None or self.store is None:
            return None
        return SlotGrammars(
            self.store,
            max_slots=max_slots,
            vocab_size=self.start.vocab_size,
            stop_ids=self.start.stop_token_ids,
            clock=None if self.rank else time.thread_time,
        )

    def warm_up(
        self, apply_bitmask: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], device: torch.device
    ) -> None:
        """Mask something, so that whatever the kernel compiles on first use is there when requests come."""
        if self.start is None:
            return
        row = torch.zeros(1, dtype=torch.int64, device=device)
        bits = torch.zeros((1, mask_words(self.start.vocab_size)), dtype=torch.int32, device=device)
        apply_bitmask(torch.zeros((1, self.start.vocab_size), device=device), bits, row)


def load_grammar_parts(assembly: Assembly, *, vocab_size: int, rank: int = 0) -> GrammarParts:
    """The backend of the plan. Assembly chooses none where no tokenizer is loaded.

    Raises:
        ConfigError: it was named by a flag, and the vocabulary that it needs is not to be had.
    """
    spec = assembly.grammar_backend
    if spec is None:
        why = assembly.absent.get("grammar_backend", "")
        return GrammarParts(reason=why and f"nothing can be constrained without a grammar backend: {why}")
    try:
        vocabulary = read_vocabulary(assembly.config.tokenizer or assembly.model.tokenizer_path)
    except ModelError as error:
        reason = f"requests with a grammar are refused: {error}"
        if assembly.choices["grammar_backend"].why.startswith("--grammar-backend"):
            raise ConfigError(f"--grammar-backend {spec.name}: {error}") from error
        _log.warning("%s", reason[0].upper() + reason[1:])
        return GrammarParts(reason=reason)
    limits = GrammarLimits()
    start = WorkerStart(
        target=spec.target,
        vocabulary=list(vocabulary.pieces[:vocab_size]),
        vocab_size=vocab_size,
        stop_token_ids=tuple(sorted(end_ids_of(assembly, vocab_size=vocab_size))),
        special_token_ids={text: token for text, token in vocabulary.special.items() if token < vocab_size},
        options=dict(assembly.options_of("grammar_backend")),
        value_bytes=limits.value_bytes,
        compiled_bytes=limits.compiled_bytes,
        compile_s=limits.compile_s,
    )
    return GrammarParts(start=start, store=GrammarStore(backend_from(start)), rank=rank)


def build_grammars(parts: GrammarParts) -> Grammars:
    """Where rank 0's requests wait for their grammars."""
    if parts.start is None or parts.store is None:
        return Grammars(reason=parts.reason)
    return Grammars(
        GrammarCompiler(parts.start, prepare=parts.store.get),
        limits=GrammarLimits(value_bytes=parts.start.value_bytes),
        stop_ids=parts.start.stop_token_ids,
    )
