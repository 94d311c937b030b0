"""From rows of a page table to the flat page lists that FlashInfer plans with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["PageList", "page_list", "starts", "token_list"]


@dataclass(frozen=True)
class PageList:
    """All int32.

    Attributes:
        indptr: (rows + 1) first entry of each row.
        gather: (entries) index into the flattened page table.
        last: (rows) tokens on the last page.
    """

    indptr: np.ndarray
    gather: np.ndarray
    last: np.ndarray


def starts(lengths: np.ndarray) -> np.ndarray:
    """First entries of stretches of ``lengths``, and the end: int32."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def page_list(seq_lens: np.ndarray, page_size: int, table_stride: int, first_row: int = 0) -> PageList:
    """Pages of rows ``first_row, first_row + 1, ...`` of a page table whose rows are ``table_stride`` entries apart; ``seq_lens`` are at least 1."""
    counts = -(-seq_lens.astype(np.int64) // page_size)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(seq_lens.size), counts)
    gather = np.arange(indptr[-1]) - indptr[rows] + (rows + first_row) * table_stride
    return PageList(
        indptr=indptr.astype(np.int32),
        gather=gather.astype(np.int32),
        last=(seq_lens - (counts - 1) * page_size).astype(np.int32),
    )


def token_list(seq_lens: np.ndarray, page_size: int, table_stride: int) -> np.ndarray:
    """Tokens of rows 0, 1, ... one after another: (2, tokens) int32, index of the token's page in the flattened page table, and its offset in the page."""
    lengths = seq_lens.astype(np.int64)
    rows = np.repeat(np.arange(lengths.size), lengths)
    position = np.arange(rows.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.stack((rows * table_stride + position // page_size, position % page_size)).astype(np.int32)
