"""An engine around a stand-in model whose next token is a hash of every token it finds in its KV pages.

A wrong page, position, input id or late result changes the hash, so equal tokens mean that the whole way from request to output is right.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenspeed._scheduler import Scheduler
from tokenspeed.builtin.kernels.sampling import apply_bitmask
from tokenspeed.builtin.memory_store import MemoryStore
from tokenspeed.config import EngineConfig
from tokenspeed.engine.channel import LocalChannel
from tokenspeed.engine.control import Control
from tokenspeed.engine.event_loop import EventLoop
from tokenspeed.engine.gauges import Gauges
from tokenspeed.engine.grammar_compiler import Compiled
from tokenspeed.engine.grammars import Compiler, Grammars
from tokenspeed.engine.requests import Admission
from tokenspeed.engine.scheduling import scheduler_config
from tokenspeed.engine.tiers import Tiers
from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.interfaces.grammar import GrammarContext, GrammarLimits, GrammarRequest
from tokenspeed.interfaces.kvstore import KVNamespace, KVStoreContext
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.messages import (
    ControlRequest,
    EngineInfo,
    GenerateRequest,
    Grammar,
    Outputs,
    SamplingParams,
    TokenOutput,
)
from tokenspeed.runtime.cache_executor import CacheExecutor
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.grammar import GrammarStore, SlotGrammars
from tokenspeed.runtime.host_pool import HostPool
from tokenspeed.runtime.kv_pool import KVPool
from tokenspeed.runtime.page_copies import PageCopies
from tokenspeed.runtime.page_tables import make_tables
from tokenspeed.runtime.reference_sampler import reference_sample
from tokenspeed.runtime.sampler import Sampler
from tokenspeed.runtime.slot_sampling import SlotSampling
from tokenspeed.runtime.store_guard import StoreGuard
from tokenspeed.testing.grammar_backend import allowed_tokens
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.testing.tiny_grammar import TinyGrammarBackend
from tokenspeed.types import CacheGroup, KVLayout

sys.path.insert(0, str(Path(__file__).parent))  # for ``hybrid``

CPU = torch.device("cpu")
#: How long anything may take on a machine that is busy with other things.
PATIENCE_S = 60.0
VOCAB = 997
PAGE = 4


def next_token(tokens: Sequence[int]) -> int:
    """What the stand-in model says after ``tokens``."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class HashModel(CausalLM):
    """Writes each token id to its page and hashes what the page table shows. ``poison``: a last token whose logits are NaN."""

    def __init__(self, pool: KVPool, poison: int | None = None) -> None:
        super().__init__()
        self.pages = pool.layer(0).k  # (pages, page_size, 1, 1)
        self.poison = poison

    @classmethod
    def cache_groups(cls, config: Any, tp_size: int) -> list[CacheGroup]:
        return [CacheGroup(kind="full", layers=(0,), kv_heads=1, head_dim=1, v_head_dim=1)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.pages.view(-1)[batch.slot_mapping[0]] = batch.input_ids.float() + 1
        hidden = []
        start = batch.query_start.tolist()
        for row in range(batch.num_rows):
            seq_len = int(batch.seq_lens[row])
            table = batch.page_tables[0][row, : -(-seq_len // PAGE)].long()
            context = (self.pages[table].reshape(-1)[:seq_len] - 1).long().tolist()
            new = start[row + 1] - start[row]
            assert batch.positions[start[row] : start[row + 1]].tolist() == list(range(seq_len - new, seq_len))
            hidden += [(next_token(context[: seq_len - new + i + 1]), context[seq_len - new + i]) for i in range(new)]
        return torch.tensor(hidden, dtype=torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = -(torch.arange(VOCAB)[None] - hidden[:, :1]).abs()
        if self.poison is not None:
            logits[hidden[:, 1] == self.poison, 3] = float("nan")
        return logits

    def load_weights(self, weights: Any) -> set[str]:
        return set()


#: The vocabulary that grammars see: bytes, and one token that ends a text.
PIECES = [*(bytes((byte,)) for byte in range(256)), b""]
STOP = 256


def grammar_context() -> GrammarContext:
    """The vocabulary in the logits of ``HashModel``."""
    limits = GrammarLimits(value_bytes=1000, compiled_bytes=4096, compile_s=0.5)
    return GrammarContext(vocabulary=PIECES, vocab_size=VOCAB, stop_token_ids=(STOP,), limits=limits)


class SlowCompiler:
    """Compiles in this process; each grammar is there ``delay`` looks after it was asked for."""

    def __init__(self, delay: int = 0) -> None:
        self.backend = TinyGrammarBackend(grammar_context())
        self.delay = delay
        self.jobs: list[tuple[int, bytes, GrammarRequest]] = []
        self.looks = self.compiled = 0
        self.closed = False

    def begin(self) -> None:
        """It is ready."""

    def submit(self, key: bytes, request: GrammarRequest) -> None:
        self.jobs.append((self.looks + self.delay, key, request))

    def withdraw(self, key: bytes) -> None:
        self.jobs = [job for job in self.jobs if job[1] != key]

    def results(self) -> list[Compiled]:
        self.looks += 1
        due = [job for job in self.jobs if job[0] < self.looks]
        self.jobs = [job for job in self.jobs if job[0] >= self.looks]
        return [self._compile(key, request) for _, key, request in due]

    def _compile(self, key: bytes, request: GrammarRequest) -> Compiled:
        self.compiled += 1
        try:
            return Compiled(key=key, data=self.backend.serialize(self.backend.compile(request)), seconds=0.25)
        except GrammarError as error:
            return Compiled(key=key, error=error, lasting=True)

    def wait(self, timeout_s: float) -> None:
        """Looks are what time is here."""

    def close(self) -> None:
        self.closed = True


class Rig:
    """One engine, stepped by hand."""

    def __init__(
        self,
        *,
        pages: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 200,
        overlap: bool = False,
        prefix_caching: bool = True,
        end_ids: Sequence[int] = (),
        poison: int | None = None,
        clock: Callable[[], int] | None = None,
        compiler: Compiler | None = None,
        grammar_bytes: int = 1 << 20,
        make_model: Callable[[KVPool], CausalLM] | None = None,
        groups: Sequence[CacheGroup] = (),
        further_pages: Sequence[int] = (),
        host_pages: Sequence[int] = (),
        copies: Callable[..., PageCopies] | None = None,
        **tiers: Any,
    ) -> None:
        groups = groups or HashModel.cache_groups(None, 1)
        sizes = [0 if group.kind == "recurrent" else PAGE for group in groups]
        num_pages = [pages, *further_pages]
        pool = KVPool(
            groups,
            select_kernel=kernel_registry().select,
            layout=KVLayout.NHD,
            page_sizes=sizes,
            num_pages=num_pages,
            dtype=torch.float32,
            device=CPU,
        )
        settings = EngineConfig(
            model="hash",
            block_size=PAGE,
            max_num_seqs=max_num_seqs,
            chunked_prefill_size=budget,
            max_model_len=max_model_len,
            disable_overlap_schedule=not overlap,
            enable_prefix_caching=prefix_caching,
            **tiers,
        )
        self.scheduler = Scheduler(
            scheduler_config(settings, num_pages=num_pages, host_pages=host_pages, groups=groups)
        )
        model = HashModel(pool, poison) if make_model is None else make_model(pool)
        state = SlotSampling(max_slots=max_num_seqs, vocab_size=VOCAB, device=CPU)
        self.store = GrammarStore(TinyGrammarBackend(grammar_context()))
        follow = SlotGrammars(self.store, max_slots=max_num_seqs, vocab_size=VOCAB, stop_ids=(STOP,))
        grammars = None
        if compiler is not None:
            limits, stops = grammar_context().limits, [STOP] if STOP in end_ids else []
            grammars = Grammars(compiler, limits=limits, stop_ids=stops, max_bytes=grammar_bytes)
        tables = make_tables(groups, page_size=PAGE, max_slots=max_num_seqs, max_model_len=max_model_len, device=CPU)
        self.executor = ModelExecutor(
            model=model,
            forward=model,
            sampler=Sampler(state, _argmax, grammars=follow, apply_bitmask=apply_bitmask),
            state=state,
            tables=tables,
            page_sizes=sizes,
            max_rows=max_num_seqs,
            max_tokens=self.scheduler.config.max_step_tokens,
            device=CPU,
        )
        self.executor.use_states(pool)
        self.channel = LocalChannel()
        self.cache, below = self._cache(pool, host_pages, copies, stored=settings.kvstore is not None), None
        if self.cache is not None:
            self.executor.use_cache(self.cache)
            below = Tiers(self.scheduler, self.cache, self.cache)
        self.gauges = Gauges(self.scheduler, grammars, below)
        info = EngineInfo(max_model_len, VOCAB, PAGE, pages, pool.nbytes, 0, "float32", "cpu", 0.0, {}, {})
        self.control = Control(scheduler=self.scheduler, gauges=self.gauges, info=info)
        extra = {} if clock is None else {"clock": clock}
        self.loop = EventLoop(
            scheduler=self.scheduler,
            executor=self.executor,
            admission=Admission(vocab_size=VOCAB, end_ids=end_ids, seed=0),
            channel=self.channel,
            control=self.control,
            gauges=self.gauges,
            grammars=grammars,
            tiers=below,
            overlap_depth=int(overlap),
            **extra,
        )
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.stats: list[Any] = []
        self.replies: list[Any] = []

    def _cache(
        self, pool: KVPool, pages: Sequence[int], copies: Callable[..., PageCopies] | None, *, stored: bool
    ) -> CacheExecutor | None:
        """The tiers, with a store that outlives neither them nor the rig."""
        if not pages:
            return None
        host, shared = HostPool(pool, pages, pinned=False), dict[str, Any]()

        def make(staging: Any) -> MemoryStore:
            return MemoryStore(KVStoreContext(staging=staging, timeout_s=PATIENCE_S, shared=shared))

        spaces = [
            KVNamespace(model="hash", dtype="float32", layout="NHD", page_size=PAGE, page_bytes=size, group=index)
            for index, size in enumerate(host.page_bytes)
        ]
        store = StoreGuard(make, spaces, timeout_s=PATIENCE_S) if stored else None
        cache = CacheExecutor(host, device=CPU, store=store, timeout_s=PATIENCE_S, copies=copies)
        pool.use_transfers(cache.wait_layer)
        return cache

    def add(
        self,
        rid: int,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        salt: bytes = b"",
        grammar: Grammar | None = None,
        session: int = -1,
        retain_us: int = 0,
        **params: Any,
    ) -> None:
        params = {"max_new_tokens": 8, "temperature": 0.0, **params}
        tokens = np.array(prompt, dtype="<i4").tobytes()
        self.send(
            GenerateRequest(rid, tokens, SamplingParams(**params), 0.0, priority, salt, grammar, session, retain_us)
        )

    def send(self, message: Any) -> None:
        self.channel.to_engine.append(message)

    def ask(self, method: str, session: int = -1) -> Any:
        self.send(ControlRequest(1, method, session))
        while not self.replies:
            self.turn()
        return self.replies.pop()

    def turn(self) -> bool:
        """Take messages, make one step, file what it told; true while there may be more to do."""
        self.loop.take(self.channel.receive(0))
        progressed = self.loop.step()
        self.scheduler.check_integrity()
        while self.channel.from_engine:
            message = self.channel.from_engine.popleft()
            if not isinstance(message, Outputs):
                self.replies.append(message)
                continue
            if message.stats is not None:
                self.stats.append(message.stats)
            for item in message.items:
                self.outputs.setdefault(item.rid, []).append(item)
        return progressed

    def run(self, limit: int = 2000) -> None:
        """To the end of all requests, the tiers at rest. Turns in which there is nothing to do but to wait for a copy do not count."""
        turns, end = 0, time.monotonic() + PATIENCE_S
        while turns < limit and time.monotonic() < end:
            progressed = self.turn()
            moving = self.loop._tiers is not None and self.loop._tiers.busy
            if not progressed and not self.loop.busy and not self.channel.to_engine and not moving:
                return
            turns += progressed or not moving
            if moving and not progressed:
                time.sleep(0.0001)
        raise AssertionError("the engine did not come to rest")

    def tokens(self, rid: int) -> list[int]:
        return [token for item in self.outputs.get(rid, []) for token in item.tokens]

    def last(self, rid: int) -> TokenOutput:
        ends = [item for item in self.outputs.get(rid, []) if item.finish]
        assert len(ends) == 1, "a request ends exactly once"
        assert self.outputs[rid][-1] is ends[0], "and says nothing after that"
        return ends[0]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(logits).any(dim=-1), -1, logits.argmax(dim=-1))


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes engines, and ends those that have threads."""
    threaded: list[Rig] = []

    def make(**options: Any) -> Rig:
        rig = Rig(**options)
        if rig.cache is not None:
            threaded.append(rig)
        return rig

    yield make
    for rig in threaded:
        rig.loop.close()


@pytest.fixture
def expected() -> Callable[[Sequence[int], int], list[int]]:
    """Greedy continuation of a prompt."""
    return continuation


@pytest.fixture
def make_compiler() -> type[SlowCompiler]:
    """Makes compilers that take their time."""
    return SlowCompiler


@pytest.fixture
def constrained() -> Callable[..., list[int]]:
    """What the stand-in model says under a grammar, by the definition of a sampler, one token at a time."""

    def tokens(
        prompt: Sequence[int], grammar: Grammar | None, params: SamplingParams, end_ids: Sequence[int] = (STOP,)
    ) -> list[int]:
        context, output = list(prompt), []
        matcher = None
        if grammar is not None:
            request = GrammarRequest(kind=grammar.kind, value=grammar.value)
            matcher = TinyGrammarBackend(grammar_context()).compile(request).matcher()
        while len(output) < params.max_new_tokens:
            logits = [-abs(token - float(next_token(context))) for token in range(VOCAB)]
            if matcher is not None:
                allowed = allowed_tokens(matcher, VOCAB)
                logits = [value if token in allowed else -math.inf for token, value in enumerate(logits)]
            token = reference_sample(logits, params, seed=params.seed or 0, prompt=list(prompt), output=output)
            output.append(token)
            context.append(token)
            if token in end_ids:
                break
            assert matcher is None or matcher.accept(token)
        return output

    return tokens
