"""From the scheduler's record, one page an event, to events on the wire, where runs of pages stand together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenspeed.engine.kv_events.wire import MEDIUMS, AllBlocksCleared, BlockRemoved, BlockStored, Event

__all__ = ["Record", "events_of"]

STORED, REMOVED, CLEARED = range(3)
_HASH = 16  # bytes


class Record(Protocol):
    """What entered and left each tier, one page an event, in order of mutation."""

    @property
    def kind(self) -> NDArray[np.int32]:
        """(events) stored, removed, cleared."""

    @property
    def medium(self) -> NDArray[np.int32]:
        """(events) index into ``MEDIUMS``."""

    @property
    def group(self) -> NDArray[np.int32]:
        """(events) cache group."""

    @property
    def depth(self) -> NDArray[np.int32]:
        """(events) place of the page in its chain; 0 has no parent."""

    @property
    def hash(self) -> NDArray[np.uint8]:
        """(events, 16)."""

    @property
    def parent(self) -> NDArray[np.uint8]:
        """(events, 16)."""

    @property
    def adapter(self) -> NDArray[np.int64]:
        """(events) 0 for none."""

    @property
    def token_counts(self) -> NDArray[np.int32]:
        """(events)."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """(tokens) event by event."""


@dataclass(slots=True)
class _Page:
    kind: int
    medium: int
    group: int
    depth: int
    hash: bytes
    parent: bytes
    adapter: int
    tokens: list[int]


def events_of(record: Record, block_sizes: Sequence[int]) -> list[Event]:
    """``record`` as events, in its order. ``block_sizes``: tokens of a page, per cache group."""
    events: list[Event] = []
    last: _Page | None = None
    for page in _pages(record):
        group = page.group if len(block_sizes) > 1 else None
        event = events[-1] if events else None
        alike = last is not None and (last.kind, last.medium, last.group) == (page.kind, page.medium, page.group)
        if page.kind == CLEARED:
            events.append(AllBlocksCleared())
        elif page.kind == REMOVED:
            if alike and isinstance(event, BlockRemoved):
                event.block_hashes.append(page.hash)
            else:
                events.append(BlockRemoved([page.hash], MEDIUMS[page.medium], group))
        elif alike and isinstance(event, BlockStored) and last is not None and _continues(last, page):
            event.block_hashes.append(page.hash)
            event.token_ids += page.tokens
        else:
            events.append(
                BlockStored(
                    block_hashes=[page.hash],
                    parent_block_hash=page.parent if page.depth > 0 else None,
                    token_ids=page.tokens,
                    block_size=block_sizes[page.group],
                    lora_id=page.adapter or None,
                    medium=MEDIUMS[page.medium],
                    lora_name=None,
                    group_idx=group,
                )
            )
        last = page
    return events


def _continues(last: _Page, page: _Page) -> bool:
    return page.depth == last.depth + 1 and page.parent == last.hash and page.adapter == last.adapter


def _pages(record: Record) -> Iterator[_Page]:
    hashes, parents, tokens = record.hash.tobytes(), record.parent.tobytes(), record.tokens.tolist()
    columns: list[list[Any]] = [
        column.tolist()
        for column in (record.kind, record.medium, record.group, record.depth, record.adapter, record.token_counts)
    ]
    begin = 0
    for index, (kind, medium, group, depth, adapter, count) in enumerate(zip(*columns, strict=True)):
        at = slice(index * _HASH, (index + 1) * _HASH)
        yield _Page(kind, medium, group, depth, hashes[at], parents[at], adapter, tokens[begin : begin + count])
        begin += count
