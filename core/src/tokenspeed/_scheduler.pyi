"""The C++ scheduler: request life cycle, KV page ownership, prefix cache, and what runs next.

Times are microseconds and come from the caller; request ids are the caller's and never decide an order. One plan looks like::

    plan = scheduler.next_execution_plan(now_us)
    if plan.mode is not ForwardMode.IDLE:  # an IDLE plan has no rows and is not advanced
        counts, tokens, outcomes = execute(plan)
        result = scheduler.advance(plan.plan_id, counts, tokens, outcomes, step_us)

Every accepted request is reported as finished exactly once: by ``AdvanceResult``, or by the next plan where it ended between two
steps. Calls may come from several threads; each runs without the GIL, one at a time.
"""

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Int32: TypeAlias = NDArray[np.int32]
_Int64: TypeAlias = NDArray[np.int64]
_Tokens: TypeAlias = NDArray[np.int32] | Sequence[int]

class CacheGroupKind(IntEnum):
    """What a cache group keeps."""

    FULL = 0

class AdmissionRule(IntEnum):
    """How much output is provided for at admission."""

    EXPECTED_OUTPUT = 0
    WHOLE_OUTPUT = 1

class RetractionRule(IntEnum):
    """Whom page pressure strikes first."""

    CHEAPEST_TO_RESTORE = 0
    YOUNGEST = 1

class FinishReason(IntEnum):
    """Why a request ended. LENGTH: max_new_tokens, the model length, or the whole pool."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    FAILED = 3
    ABORTED = 4

class Outcome(IntEnum):
    """What the engine says of a row."""

    CONTINUE = 0
    FINISH = 1
    FAIL = 2

class RowRefusal(IntEnum):
    """Why the result of a row was not taken. All but LATE end the request as FAILED."""

    NONE = 0
    LATE = 1
    BAD_COUNT = 2
    BAD_TOKEN = 3
    BAD_OUTCOME = 4

class SubmitRefusal(IntEnum):
    """Why a request was not accepted."""

    NONE = 0
    DUPLICATE_ID = 1
    EMPTY_PROMPT = 2
    BAD_TOKEN = 3
    BAD_MAX_NEW_TOKENS = 4
    TOO_LONG = 5
    NEVER_FITS = 6
    BAD_EXTRA_KEY = 7
    BAD_PRIORITY = 8
    BAD_MAX_REUSE = 9

class ForwardMode(IntEnum):
    """What kinds of rows a plan has."""

    IDLE = 0
    EXTEND = 1
    DECODE = 2
    MIXED = 3

class RowFlags(IntFlag):
    """Flags of a row: it yields a token; it is the first of its request in its slot."""

    SAMPLES = 1
    NEW_IN_SLOT = 2

class CacheGroupConfig:
    """One cache group: ``num_pages`` pages of ``page_size`` tokens."""

    def __init__(self, *, page_size: int, num_pages: int, kind: CacheGroupKind = ...) -> None: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def kind(self) -> CacheGroupKind: ...

class SchedulerConfig:
    """What a scheduler is told once. Raises ValueError naming a bad field."""

    def __init__(
        self,
        *,
        groups: Sequence[CacheGroupConfig],
        max_num_seqs: int,
        max_batched_tokens: int,
        max_model_len: int,
        max_row_width: int = 1,
        overlap_depth: int = 0,
        enable_prefix_caching: bool = True,
        max_step_us: int = 0,
        hit_window: int = 8,
        aging_us: int = 10000000,
        finished_history: int = 4096,
        admission: AdmissionRule = ...,
        retraction: RetractionRule = ...,
    ) -> None: ...
    @property
    def groups(self) -> list[CacheGroupConfig]: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_row_width(self) -> int: ...
    @property
    def overlap_depth(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def max_step_us(self) -> int: ...
    @property
    def hit_window(self) -> int: ...
    @property
    def aging_us(self) -> int: ...
    @property
    def finished_history(self) -> int: ...
    @property
    def admission(self) -> AdmissionRule: ...
    @property
    def retraction(self) -> RetractionRule: ...
    @property
    def max_step_tokens(self) -> int:
        """No plan has more tokens than this: what the executor's buffers must hold."""

class RequestSpec:
    """A request as it is submitted. Raises ValueError for an extra key that has not 16 bytes."""

    def __init__(
        self,
        *,
        id: int,
        tokens: _Tokens,
        max_new_tokens: int,
        salt: bytes = b"",
        extra_keys: Sequence[tuple[int, bytes]] = [],
        adapter: int = 0,
        priority: int = 0,
        max_reuse_tokens: int = -1,
        multimodal: int = 0,
    ) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> _Int32: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def salt(self) -> bytes: ...
    @property
    def adapter(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def max_reuse_tokens(self) -> int: ...
    @property
    def multimodal(self) -> int: ...

class SubmitResult:
    """Whether a request was accepted, and if not, why and what to do."""

    @property
    def accepted(self) -> bool: ...
    @property
    def refusal(self) -> SubmitRefusal: ...
    @property
    def reason(self) -> str: ...

class RequestInfo:
    """What is known of one request; of a finished one too, for the last ``finished_history`` of them."""

    @property
    def id(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def priority(self) -> int: ...
    @property
    def multimodal(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is complete."""
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache at first admission."""
    @property
    def retractions(self) -> int: ...
    @property
    def queued_us(self) -> int: ...
    @property
    def first_scheduled_us(self) -> int:
        """-1: not yet."""
    @property
    def retracted_us(self) -> int:
        """Time spent retracted, in all."""

class ExecutionPlan:
    """What one step computes: extends first, then decodes in tree order.

    Arrays are read-only views, valid until the plan after next is taken and as long as the plan is in flight; reading a plan
    after that raises RuntimeError.
    """

    @property
    def plan_id(self) -> int: ...
    @property
    def mode(self) -> ForwardMode: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_extend_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def request_ids(self) -> _Int64:
        """(rows)."""
    @property
    def slots(self) -> _Int32:
        """(rows)."""
    @property
    def context_lens(self) -> _Int32:
        """(rows) tokens in the KV cache before this step; an upper bound under overlap with rows wider than one token."""
    @property
    def query_lens(self) -> _Int32:
        """(rows) tokens that the row computes."""
    @property
    def input_ids(self) -> _Int32:
        """(tokens) row by row; -1: not known on the host (the last sampled token of the slot, or a draft)."""
    @property
    def flags(self) -> _Int32:
        """(rows) RowFlags."""
    @property
    def output_lens(self) -> _Int32:
        """(rows) tokens generated before this step, an upper bound like context_lens."""
    @property
    def delta_group(self) -> _Int32:
        """(deltas) table[group][slot, index] = page; no entry stands twice in a plan."""
    @property
    def delta_slot(self) -> _Int32:
        """(deltas)."""
    @property
    def delta_index(self) -> _Int32:
        """(deltas)."""
    @property
    def delta_page(self) -> _Int32:
        """(deltas)."""
    @property
    def prefix_intervals(self) -> _Int32:
        """(intervals, 4) row_begin, row_end, first_page_index, pages; nested, outer before inner."""
    @property
    def retracted_ids(self) -> _Int64: ...
    @property
    def finished_ids(self) -> _Int64:
        """Requests that ended outside of advance."""
    @property
    def finished_reasons(self) -> _Int32:
        """FinishReason for each of finished_ids."""

class AdvanceResult:
    """What the results of a step ended and refused."""

    @property
    def finished_ids(self) -> _Int64: ...
    @property
    def finished_reasons(self) -> _Int32: ...
    @property
    def row_refusals(self) -> _Int32:
        """(rows) RowRefusal."""

class SchedulerStats:
    """Counts of now, and totals since the start. Page counts have a value per cache group."""

    @property
    def waiting(self) -> int:
        """Submitted and not admitted yet."""
    @property
    def running(self) -> int: ...
    @property
    def leaving(self) -> int:
        """Finished or aborted, with a step in flight."""
    @property
    def retracted(self) -> int:
        """Wait for their resumption now; `retractions` counts all there ever were."""
    @property
    def parked(self) -> int:
        """Of those waiting: for a prefix that another request computes."""
    @property
    def slots_free(self) -> int: ...
    @property
    def pages_active(self) -> list[int]: ...
    @property
    def pages_cached(self) -> list[int]:
        """Used by no request and evictable."""
    @property
    def pages_free(self) -> list[int]: ...
    @property
    def pages_total(self) -> list[int]: ...
    @property
    def expected_output(self) -> int:
        """Tokens: the observed mean that admission uses."""
    @property
    def context_weight(self) -> float:
        """What a prompt token costs for each token that it attends to, by the times of steps; without any it costs 1."""
    @property
    def submitted(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def finished(self) -> int: ...
    @property
    def aborted(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def retractions(self) -> int: ...
    @property
    def prompt_tokens_queried(self) -> int:
        """Prompt tokens of requests at their first admission."""
    @property
    def prefix_hit_tokens(self) -> int:
        """Of prompt_tokens_queried, found in the cache."""
    @property
    def prefill_tokens(self) -> int:
        """Planned in chunks, recomputation after a retraction included."""
    @property
    def decode_tokens(self) -> int: ...
    @property
    def evicted_pages(self) -> int: ...
    @property
    def inflight_waits(self) -> int:
        """Times that a request waited for a prefix being computed."""
    @property
    def plans(self) -> int: ...

class Scheduler:
    """Turns requests into plans, and results into the next state of requests."""

    def __init__(self, config: SchedulerConfig) -> None: ...
    def submit_requests(self, specs: Sequence[RequestSpec], now_us: int) -> list[SubmitResult]:
        """One result a spec; a bad one is refused with a reason and the others go on."""
    def next_execution_plan(self, now_us: int) -> ExecutionPlan:
        """The next step, of mode IDLE when nothing can run.

        Raises ValueError where ``overlap_depth + 1`` plans wait for their results.
        """
    def advance(
        self,
        plan_id: int,
        counts: _Tokens,
        tokens: _Tokens | Sequence[Sequence[int]],
        outcomes: _Tokens,
        step_us: int = 0,
    ) -> AdvanceResult:
        """The results of the oldest plan in flight: counts (rows), tokens (rows, W) or flat, outcomes (rows).

        Raises ValueError, with nothing changed, for another plan or a wrong size.
        """
    def abort(self, id: int, reason: FinishReason = ...) -> bool:
        """Whether the request ends by this call: at once, or when its step in flight has. False for one unknown or ended.

        ``reason`` is ABORTED (the default), or STOP where it is complete: it then counts as finished, and admission learns from the length of its
        output. Raises ValueError for any other.
        """
    def calc_rolling_hash(
        self, tokens: _Tokens, salt: bytes = b"", extra_keys: Sequence[tuple[int, bytes]] = [], adapter: int = 0
    ) -> NDArray[np.uint8]:
        """(full pages, 16) the chained page hashes of a prompt."""
    def flush_cache(self) -> int:
        """Drops every cached page that no request uses; returns how many."""
    def check_integrity(self) -> None:
        """Raises RuntimeError naming what is wrong."""
    def stats(self) -> SchedulerStats: ...
    def request_info(self, id: int) -> RequestInfo | None: ...
    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int:
        """Not admitted, retracted ones included."""
    @property
    def num_running(self) -> int: ...
    @property
    def config(self) -> SchedulerConfig: ...
