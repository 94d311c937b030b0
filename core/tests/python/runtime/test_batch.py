"""Batches are built from the plan's arrays: positions, slot mapping, tables and late input ids."""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.runtime.batch import BatchBuilder
from tokenspeed.runtime.page_tables import PageTables
from tokenspeed.runtime.plan import PlanArrays

CPU = torch.device("cpu")
PAGE = 4


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def plan(*, slots, context, query, ids, extends, deltas=(), **extra) -> PlanArrays:
    columns = np.array(deltas, dtype=np.int32).reshape(-1, 4).T
    return PlanArrays(
        num_rows=len(slots),
        num_extend_rows=extends,
        num_tokens=sum(query),
        slots=ints(*slots),
        context_lens=ints(*context),
        query_lens=ints(*query),
        input_ids=ints(*ids),
        flags=ints(*[1] * len(slots)),
        output_lens=ints(*[0] * len(slots)),
        delta_group=columns[0],
        delta_slot=columns[1],
        delta_index=columns[2],
        delta_page=columns[3],
        prefix_intervals=np.zeros((0, 4), dtype=np.int32),
    )


class Rig:
    def __init__(self, groups: int = 1) -> None:
        self.tables = PageTables(max_slots=4, max_pages=[8] * groups, device=CPU)
        self.last = torch.tensor([100, 101, 102, 103])
        self.builder = BatchBuilder(
            max_rows=4, max_tokens=16, page_sizes=[PAGE] * groups, tables=self.tables, last_tokens=self.last, device=CPU
        )

    def build(self, plan: PlanArrays):
        self.tables.apply(plan.delta_group, plan.delta_slot, plan.delta_index, plan.delta_page)
        return self.builder.build(plan)


def test_a_mixed_step_places_every_token():
    rig = Rig()
    deltas = [(0, 2, 0, 7), (0, 2, 1, 3), (0, 1, 0, 5), (0, 1, 1, 6)]
    batch = rig.build(plan(slots=[2, 1], context=[2, 4], query=[3, 1], ids=[11, 12, 13, 14], extends=1, deltas=deltas))
    assert batch.positions.tolist() == [2, 3, 4, 4]
    assert batch.slot_mapping[0].tolist() == [7 * PAGE + 2, 7 * PAGE + 3, 3 * PAGE, 6 * PAGE]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [5, 5]
    assert (batch.num_extend_tokens, batch.decode_width, batch.max_seq_len) == (3, 1, 5)
    assert batch.page_tables[0].tolist() == [[7, 3], [5, 6]]
    assert batch.input_ids.tolist() == [11, 12, 13, 14]


def test_ids_unknown_to_the_host_come_from_the_slots_last_token():
    rig = Rig()
    batch = rig.build(plan(slots=[3, 0, 1], context=[1, 2, 3], query=[1, 1, 1], ids=[-1, 55, -1], extends=0))
    assert batch.input_ids.tolist() == [103, 55, 101]
    assert batch.positions.tolist() == [1, 2, 3]


def test_decode_rows_of_width_two_keep_their_order():
    rig = Rig()
    batch = rig.build(
        plan(
            slots=[1, 0], context=[3, 6], query=[2, 2], ids=[1, 2, 3, 4], extends=0, deltas=[(0, 1, 1, 2), (0, 0, 1, 9)]
        )
    )
    assert batch.decode_width == 2
    assert batch.positions.tolist() == [3, 4, 6, 7]
    assert batch.slot_mapping[0].tolist() == [3, 2 * PAGE, 9 * PAGE + 2, 9 * PAGE + 3]


def test_tables_persist_and_the_later_of_two_writes_wins():
    rig = Rig(groups=2)
    rig.build(
        plan(slots=[1], context=[0], query=[1], ids=[1], extends=1, deltas=[(0, 1, 0, 4), (1, 1, 0, 5), (0, 1, 0, 6)])
    )
    batch = rig.build(plan(slots=[1], context=[1], query=[1], ids=[1], extends=0))
    assert batch.page_tables[0].tolist() == [[6]]
    assert batch.page_tables[1].tolist() == [[5]]
    assert [m.tolist() for m in batch.slot_mapping] == [[6 * PAGE + 1], [5 * PAGE + 1]]
