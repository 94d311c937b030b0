"""The plan reads every latent of every row once, in stretches of equal length, and numbers parts in order."""

import numpy as np
import pytest
from tokenspeed_plugin_attention_mla.plan import plan_decode, plan_extend


@pytest.mark.parametrize("seed", range(40))
def test_decode_covers_every_latent_once_and_evenly(seed):
    rng = np.random.default_rng(seed)
    rows, groups, block = int(rng.integers(1, 40)), int(rng.choice([1, 3, 132])), int(rng.choice([16, 64]))
    lens = rng.integers(0, 5000, rows).astype(np.int32)
    plan = plan_decode(lens, groups=groups, block=block)
    covered = [np.zeros(length, dtype=np.int64) for length in lens]
    parts: dict[int, list[int]] = {row: [] for row in range(rows)}
    for row, first, begin, end, part, *_ in plan.items.tolist():
        assert first == 0
        assert begin % block == 0
        covered[row][begin:end] += 1
        parts[row].append(part)
    for row in range(rows):
        assert bool((covered[row] == 1).all())
        first, last = plan.parts[row : row + 2].tolist()
        # One piece has the result, several are the row's parts in order.
        assert parts[row] == ([-1] if first == last else list(range(first, last)))
    assert len(plan.items) <= rows + groups
    assert plan.parts[-1] <= 2 * groups
    assert plan.ranges[0] == 0
    assert plan.ranges[-1] == len(plan.items)
    blocks = np.maximum(1, -(-lens.astype(np.int64) // block)).sum()
    work = np.maximum(1, -(-(plan.items[:, 3] - plan.items[:, 2]) // block))
    most = max(int(work[a:b].sum()) for a, b in zip(plan.ranges[:-1], plan.ranges[1:], strict=True))
    assert most <= max(2, -(-int(blocks) // groups))


@pytest.mark.parametrize("seed", range(20))
def test_extend_covers_every_query_once_and_reads_up_to_its_last_token(seed):
    rng = np.random.default_rng(seed)
    rows, heads, tile = int(rng.integers(1, 9)), int(rng.choice([1, 3, 16, 128])), int(rng.choice([16, 64]))
    context, new = rng.integers(0, 300, rows).astype(np.int32), rng.integers(0, 50, rows).astype(np.int32)
    items = plan_extend(context, new, heads=heads, tile=tile)
    covered = [np.zeros(int(count) * heads, dtype=np.int64) for count in new]
    for row, first, begin, end, part, *_ in items.tolist():
        covered[row][first : first + tile] += 1
        last = (min(first + tile, int(new[row]) * heads) - 1) // heads
        assert (begin, end, part) == (0, int(context[row]) + last + 1, -1)
    assert all(bool((c == 1).all()) for c in covered)
    assert (np.diff(items[:, 3]) <= 0).all()
