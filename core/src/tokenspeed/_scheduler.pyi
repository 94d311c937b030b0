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
    WINDOW = 1
    RECURRENT = 2

class AdmissionRule(IntEnum):
    """How much output is provided for at admission."""

    EXPECTED_OUTPUT = 0
    WHOLE_OUTPUT = 1

class RetractionRule(IntEnum):
    """Whom page pressure strikes first."""

    CHEAPEST_TO_RESTORE = 0
    YOUNGEST = 1

class WritePolicy(IntEnum):
    """When a page is copied to the host: when it is published, when it is among the next to be evicted, when a second request uses it."""

    THROUGH = 0
    ON_EVICT = 1
    SELECTIVE = 2

class FinishReason(IntEnum):
    """Why a request ended. LENGTH: max_new_tokens, the model length, or the whole pool."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    FAILED = 3
    ABORTED = 4

class Outcome(IntEnum):
    """What the engine says of a row. RELOAD: its load back failed; nothing of the row counts, and the request computes its prefix."""

    CONTINUE = 0
    FINISH = 1
    FAIL = 2
    RELOAD = 3

class HitCut(IntEnum):
    """Why the cache gave a prompt no more than it did, at its first admission.

    NONE: it gave every full page before the last token. NEW: the next page is none that it remembers. EVICTED: it gave up that page, or the window
    or state to go on behind it (RequestInfo.hit_cut_group says whose), for want of room.
    REUSE_BOUND: max_reuse_tokens. STORE_TIMEOUT: the store below did not answer in time. LOAD_FAILED: the host or the store had it, and it did not come.
    BOUNDARY: it has that page, and a window or recurrent group kept nothing to go on behind it, nor gave any up.
    """

    NONE = 0
    NEW = 1
    EVICTED = 2
    REUSE_BOUND = 3
    STORE_TIMEOUT = 4
    LOAD_FAILED = 5
    BOUNDARY = 6

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
    BAD_RETAIN = 10

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

class StateKind(IntEnum):
    """What is done to a recurrent group's state before the forward."""

    ZERO = 0
    COPY = 1

class CacheGroupConfig:
    """One cache group: ``num_pages`` pages of ``page_size`` tokens, and ``host_pages`` in its host tier (0: none).

    Group 0 is full; its pages are the blocks in which prefixes are shared. Further full groups have what group 0 has: they share its
    page ids. A window group has its page size too, and a ``window`` (tokens that a token reads, its own included). The pages of a
    recurrent group are states, which can be kept every ``page_size`` tokens, a multiple of group 0's.
    """

    def __init__(
        self, *, page_size: int, num_pages: int, kind: CacheGroupKind = ..., host_pages: int = 0, window: int = 0
    ) -> None: ...
    @property
    def window(self) -> int: ...
    @property
    def host_pages(self) -> int: ...
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
        write_policy: WritePolicy = ...,
        l3: bool = False,
        prefetch_threshold: int = 256,
        prefetch_timeout_us: int = 1000000,
        kv_events: bool = False,
        retain_percent: int = 50,
        step_sizes: Sequence[int] = [],
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
    def step_sizes(self) -> list[int]:
        """Prompt tokens that the device fills a step with decodes up to, ascending; more than the last are not filled up."""
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
    def write_policy(self) -> WritePolicy: ...
    @property
    def l3(self) -> bool:
        """There is a store below the host tier."""
    @property
    def prefetch_threshold(self) -> int:
        """Tokens that the store may have and the tiers above do not, from which on it is asked."""
    @property
    def prefetch_timeout_us(self) -> int:
        """Then a request goes on with what is there."""
    @property
    def kv_events(self) -> bool: ...
    @property
    def retain_percent(self) -> int:
        """Of the device pages: what sessions may keep at a higher rank."""
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
        session: int = -1,
        retain_us: int = 0,
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
    @property
    def session(self) -> int:
        """-1: none."""
    @property
    def retain_us(self) -> int:
        """How long its prefix is kept above others after a good end."""

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
    def host_tokens(self) -> int:
        """Of cached_tokens, loaded back from the host."""
    @property
    def storage_tokens(self) -> int:
        """Of host_tokens, brought by the store for this request."""
    @property
    def hit_cut(self) -> HitCut:
        """Why there were no more cached_tokens."""
    @property
    def hit_cut_group(self) -> int:
        """The cache group whose window or state was missing where there were no more; 0: the full ones had no more."""
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
        """(deltas) table[group][slot, index] = page; no entry stands twice in a plan. All full groups have the table of group 0; that of a
        recurrent group has one column, the state of the slot."""
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
    def state_kind(self) -> _Int32:
        """(state ops) StateKind. Done before the forward and after the load-backs of the plan, of which one may bring the source; no
        state is both source and target in a plan."""
    @property
    def state_group(self) -> _Int32:
        """(state ops) a recurrent group."""
    @property
    def state_source(self) -> _Int32:
        """(state ops) page that is copied; -1 for ZERO."""
    @property
    def state_target(self) -> _Int32:
        """(state ops) page that becomes it."""
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
    @property
    def num_transfers(self) -> int:
        """Entries of the transfers below. An IDLE plan may have some."""
    @property
    def write_back_op(self) -> _Int64:
        """(pages) the transfer; an op is a run of entries. Device page to host page: what it reads is complete, the copy may start."""
    @property
    def write_back_group(self) -> _Int32: ...
    @property
    def write_back_device(self) -> _Int32: ...
    @property
    def write_back_host(self) -> _Int32: ...
    @property
    def load_back_op(self) -> _Int64:
        """(pages) host page to device page: may start at once; the row that needs it must see it. An op has pages of one group; a row
        may have several."""
    @property
    def load_back_group(self) -> _Int32: ...
    @property
    def load_back_host(self) -> _Int32: ...
    @property
    def load_back_device(self) -> _Int32: ...
    @property
    def load_back_row(self) -> _Int32:
        """(pages) the row of this plan that needs the page; -1: none, a session is brought up."""
    @property
    def lookup_op(self) -> _Int64:
        """(pages) the store is asked how many leading pages of the op it has."""
    @property
    def lookup_group(self) -> _Int32: ...
    @property
    def lookup_hash(self) -> NDArray[np.uint8]:
        """(pages, 16)."""
    @property
    def prefetch_op(self) -> _Int64:
        """(pages) store to host page."""
    @property
    def prefetch_group(self) -> _Int32: ...
    @property
    def prefetch_host(self) -> _Int32: ...
    @property
    def prefetch_hash(self) -> NDArray[np.uint8]:
        """(pages, 16)."""
    @property
    def store_op(self) -> _Int64:
        """(pages) host page to store."""
    @property
    def store_group(self) -> _Int32: ...
    @property
    def store_host(self) -> _Int32: ...
    @property
    def store_hash(self) -> NDArray[np.uint8]:
        """(pages, 16)."""

class AdvanceResult:
    """What the results of a step ended and refused."""

    @property
    def finished_ids(self) -> _Int64: ...
    @property
    def finished_reasons(self) -> _Int32: ...
    @property
    def row_refusals(self) -> _Int32:
        """(rows) RowRefusal."""

class KvEvents:
    """What entered and left each tier since the last drain, one page an event, in order of mutation."""

    @property
    def kind(self) -> _Int32:
        """(events) 0 stored, 1 removed, 2 cleared: device and host are empty."""
    @property
    def medium(self) -> _Int32:
        """(events) 0 device, 1 host, 2 store."""
    @property
    def group(self) -> _Int32: ...
    @property
    def depth(self) -> _Int32:
        """(events) page index in its chain; -1 where all was cleared."""
    @property
    def hash(self) -> NDArray[np.uint8]:
        """(events, 16)."""
    @property
    def parent(self) -> NDArray[np.uint8]:
        """(events, 16) of the page before; zeros at depth 0 and where nothing was stored."""
    @property
    def adapter(self) -> _Int64:
        """(events) of stores on the device, else 0."""
    @property
    def token_counts(self) -> _Int32:
        """(events) page_size for stores on the device, else 0."""
    @property
    def tokens(self) -> _Int32:
        """(tokens) event by event."""

class SchedulerStats:
    """Counts of now, and totals since the start. Page counts have a value per cache group."""

    @property
    def waiting(self) -> int:
        """Submitted and not admitted yet, those for whom the store is asked included."""
    @property
    def running(self) -> int: ...
    @property
    def leaving(self) -> int:
        """Finished or aborted, with a step in flight."""
    @property
    def retracted(self) -> int:
        """Wait for their resumption, or for a copy to the host before it; `retractions` counts all there ever were."""
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
    @property
    def host_pages_total(self) -> list[int]: ...
    @property
    def host_pages_free(self) -> list[int]: ...
    @property
    def host_pages_cached(self) -> list[int]:
        """Found by their names."""
    @property
    def host_pages_moving(self) -> list[int]:
        """In a transfer; of the cached ones or on their way."""
    @property
    def prefetching(self) -> int:
        """Requests for which the store is asked; counted in `waiting` too."""
    @property
    def writing_back(self) -> int:
        """Requests that have finished while their pages are copied to the host."""
    @property
    def cache_ops_in_flight(self) -> int: ...
    @property
    def cache_ops_pending(self) -> int: ...
    @property
    def sessions(self) -> int: ...
    @property
    def retained_pages(self) -> int:
        """Kept above others for sessions."""
    @property
    def host_hit_tokens(self) -> int:
        """Of prefix_hit_tokens, loaded back from the host."""
    @property
    def storage_hit_tokens(self) -> int:
        """Of host_hit_tokens, brought by the store for that request."""
    @property
    def pages_written_back(self) -> int: ...
    @property
    def pages_loaded_back(self) -> int: ...
    @property
    def pages_prefetched(self) -> int: ...
    @property
    def pages_stored(self) -> int: ...
    @property
    def write_backs_failed(self) -> int:
        """Pages, as in the three after it."""
    @property
    def load_backs_failed(self) -> int: ...
    @property
    def prefetches_failed(self) -> int: ...
    @property
    def stores_failed(self) -> int: ...
    @property
    def host_evicted_pages(self) -> int: ...
    @property
    def host_full(self) -> int:
        """Pages not copied because every host page was in use."""
    @property
    def lookups(self) -> int: ...
    @property
    def lookup_hits(self) -> int: ...
    @property
    def prefetch_timeouts(self) -> int: ...
    @property
    def hits_cut(self) -> list[int]:
        """First admissions by their ``HitCut``."""
    @property
    def reloads(self) -> int:
        """Requests whose prefix did not come back from the host."""

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
    def cache_done(self, op_ids: NDArray[np.int64] | Sequence[int], pages: _Tokens) -> None:
        """Answers transfers in any order: ``pages[i]`` leading pages of ``op_ids[i]`` are good; all of them is success.

        Until then both ends of a transfer stay pinned. Raises ValueError, with nothing changed, for an op that is not in flight, one
        named twice, or a count that it does not have. A load back's outcome must be known before the plan that carries it is advanced;
        where it failed, the row's outcome is RELOAD.
        """
    def prefetch_session(self, session: int, now_us: int) -> int:
        """Pages of the session's last turn that are to be brought to the device: those that it lacks and the host has, which the next plan begins to load
        back, and those that the store is asked for. 0 where nothing is missing or can be had, -1 where the session is not known."""
    def release_session(self, session: int) -> bool:
        """Its prefix is kept no longer than others. False where it is not known."""
    def drain_kv_events(self) -> KvEvents:
        """Everything since the last call; empty unless ``config.kv_events``."""
    @property
    def cache_ops_in_flight(self) -> int:
        """Transfers that stand in a plan and were not answered."""
    @property
    def cache_ops_pending(self) -> int:
        """Transfers that the next plan begins; take one, IDLE or not, where there are any."""
    def flush_cache(self) -> int:
        """Drops every page of device and host that nothing uses; returns how many. The store is not touched.

        To forget all, call it when ``has_work()`` is False and no transfer is in flight: what is in one stays on the device.
        """
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
