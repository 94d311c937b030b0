"""What is sent: random prompts, prompts behind a shared prefix, and agent sessions of several turns. Everything follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Session", "WorkloadConfig", "load_tokenizer", "make_sessions"]

_WORDS: Sequence[str] = (  # noqa: SIM905 -- as a list literal it would be one line a word
    "river stone paper garden letter window morning engine bridge silver market winter simple answer number planet forest copper signal "
    "harbor ticket pencil carbon method season farmer mirror native orange system travel velvet wonder yellow anchor basket candle desert "
    "editor fabric golden hammer island jacket kernel ladder magnet needle office pepper quartz record sample temple unique valley weight"
).split()


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Shape of a run.

    Attributes:
        kind: ``random``, ``shared-prefix`` or ``agent``.
        num_prompts: requests of ``random`` and ``shared-prefix``.
        input_len: tokens that differ per request (per turn for ``agent``).
        output_len: ``max_tokens`` of each request.
        prefix_len: tokens in front that all requests share.
        sessions, turns: conversations of ``agent`` and the requests of each; every turn sends the whole history.
        vocab_size: where not 0, a prompt's words are the decimal numbers of random ids below it, for a server without a tokenizer.
        think_time_s: mean pause between the end of an answer and the next turn, exponentially distributed.
    """

    kind: str
    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int
    sessions: int
    turns: int
    think_time_s: float
    seed: int
    vocab_size: int = 0


@dataclass(frozen=True, kw_only=True)
class Session:
    """One conversation: ``turns`` holds the user's texts, ``pauses_s`` what passes before each."""

    index: int
    system: str
    turns: tuple[str, ...]
    pauses_s: tuple[float, ...]


def load_tokenizer(path: str) -> Any:
    """A ``tokenizers.Tokenizer`` from ``tokenizer.json`` or the directory that holds it; raises ``ValueError`` naming the path if it cannot be read."""
    from tokenizers import Tokenizer

    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"cannot read the tokenizer {file}: {error}") from None


def _text_maker(tokenizer: Any, rng: random.Random, vocab_size: int) -> Callable[[int, str], str]:
    """A function ``(tokens, first word) -> text`` of exactly that many tokens with a tokenizer, of that many words or ids without."""

    def make(count: int, first: str) -> str:
        if count <= 0:
            return ""
        if vocab_size:
            return " ".join(str(rng.randrange(vocab_size)) for _ in range(count))
        words = [first]
        while True:
            words += [rng.choice(_WORDS) for _ in range(count)]
            if tokenizer is None:
                return " ".join(words[:count])
            ids = tokenizer.encode(" ".join(words), add_special_tokens=False).ids
            if len(ids) >= count:
                return str(tokenizer.decode(ids[:count], skip_special_tokens=False))

    return make


def make_sessions(config: WorkloadConfig, tokenizer: Any = None) -> list[Session]:
    """The run's conversations; ``random`` and ``shared-prefix`` are sessions of one turn. The same config gives the same texts."""
    rng = random.Random(config.seed)
    make = _text_maker(tokenizer, rng, config.vocab_size)
    agent = config.kind == "agent"
    system = make(config.prefix_len, f"rules{config.seed}") if config.kind != "random" else ""
    count, turns = (config.sessions, config.turns) if agent else (config.num_prompts, 1)
    sessions = []
    for index in range(count):
        # The first word differs, so that nothing but the shared part can be reused by accident.
        texts = tuple(make(config.input_len, f"{config.seed}{index}{turn}") for turn in range(turns))
        pauses = tuple(
            rng.expovariate(1 / config.think_time_s) if turn and config.think_time_s > 0 else 0.0
            for turn in range(turns)
        )
        sessions.append(Session(index=index, system=system, turns=texts, pauses_s=pauses))
    return sessions
