"""How axes and heads are dealt out to ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.errors import ConfigError
from tokenspeed.layers.parallel import ParallelGroup, ParallelGroups, shard_heads, shard_slice


@given(units=st.integers(1, 40), block=st.integers(1, 8), ranks=st.integers(1, 9))
def test_every_block_is_somewhere_and_all_ranks_have_the_same_shape(units: int, block: int, ranks: int) -> None:
    if units < ranks and ranks % units:
        with pytest.raises(ConfigError):
            shard_slice(units * block, units, 0, ranks)
        return
    cuts = [shard_slice(units * block, units, rank, ranks) for rank in range(ranks)]
    assert len({cut.local for cut in cuts}) == 1
    seen = [index for cut in cuts for index in range(cut.begin, cut.begin + cut.count)]
    copies = max(1, ranks // units) if units < ranks else 1
    assert sorted(seen) == sorted(list(range(units * block)) * copies)
    assert all(cut.begin % block == 0 and cut.count % block == 0 for cut in cuts)


@given(kv=st.integers(1, 12), group=st.integers(1, 6), ranks=st.integers(1, 8))
def test_a_kv_head_stays_with_its_query_heads(kv: int, group: int, ranks: int) -> None:
    q = kv * group
    try:
        heads = shard_heads(q, kv, ranks)
    except ConfigError:
        assert kv < ranks
        return
    assert heads.q_heads % heads.kv_heads == 0
    for rank in range(ranks):
        queries = shard_slice(q, heads.q_units, rank, ranks)
        keys = shard_slice(kv, heads.kv_units, rank, ranks)
        assert (queries.local, keys.local) == (heads.q_heads, heads.kv_heads)
        per_key = heads.q_heads // heads.kv_heads
        for index in range(queries.count):
            assert (queries.begin + index) // group == keys.begin + index // per_key


def test_nine_heads_over_three_on_two_ranks() -> None:
    """SmolLM2: the second rank has one real group and one of zeros."""
    heads = shard_heads(9, 3, 2)
    assert (heads.q_heads, heads.kv_heads) == (6, 2)
    assert [shard_slice(9, heads.q_units, rank, 2).count for rank in (0, 1)] == [6, 3]


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 query heads cannot share 2"):
        shard_heads(7, 2, 1)
    with pytest.raises(ConfigError, match="choose a smaller tensor parallel size"):
        shard_heads(6, 2, 4)
    with pytest.raises(ValueError, match="cannot be cut"):
        shard_slice(10, 3, 0, 2)


def test_groups_by_name() -> None:
    mine = ParallelGroup(2, 1)
    groups = ParallelGroups({"attn": mine})
    assert groups["attn"] is mine
    assert (groups["dense"].size, groups["moe"].rank) == (1, 0)
    with pytest.raises(ValueError, match=r"'expert'.*attn, dense, moe"):
        groups["expert"]
    with pytest.raises(ValueError, match="'expert'"):
        ParallelGroups({"expert": mine})
