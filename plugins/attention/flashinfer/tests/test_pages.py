"""The page lists that FlashInfer is planned with."""

import numpy as np
import pytest
from tokenspeed_plugin_attention_flashinfer.pages import page_list, token_list


@pytest.mark.parametrize("seed", range(20))
def test_page_list_names_each_rows_pages_in_order(seed):
    rng = np.random.default_rng(seed)
    rows, stride, page, first = int(rng.integers(1, 9)), 12, int(rng.choice([1, 4, 16])), int(rng.integers(0, 3))
    lens = rng.integers(1, page * stride + 1, rows).astype(np.int32)
    table = rng.permutation((rows + first) * stride).reshape(rows + first, stride).astype(np.int32)
    pages = page_list(lens, page, stride, first)
    flat = table.reshape(-1)[pages.gather]
    for row in range(rows):
        mine = flat[pages.indptr[row] : pages.indptr[row + 1]]
        assert mine.tolist() == table[row + first, : -(-int(lens[row]) // page)].tolist()
        assert (len(mine) - 1) * page + pages.last[row] == lens[row]
        assert 1 <= pages.last[row] <= page


@pytest.mark.parametrize("seed", range(10))
def test_token_list_names_each_rows_tokens_in_order(seed):
    rng = np.random.default_rng(seed)
    rows, stride, page = int(rng.integers(1, 9)), 12, int(rng.choice([1, 4, 16]))
    lens = rng.integers(1, page * stride + 1, rows).astype(np.int32)
    table = rng.permutation(rows * stride).reshape(rows, stride).astype(np.int32)
    at, offset = token_list(lens, page, stride)
    expected = [int(table[row, t // page]) * page + t % page for row in range(rows) for t in range(int(lens[row]))]
    assert (table.reshape(-1)[at] * page + offset).tolist() == expected
