"""What the pages of window and recurrent groups hold, in plain Python: the tokens up to each offset, or up to a state."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed import _scheduler as ts

__all__ = ["GroupRow", "Groups", "StateOp"]

Cells = dict[tuple[int, int], object]


@dataclass(frozen=True)
class StateOp:
    """``target`` becomes zero (``source`` -1), or a copy."""

    group: int
    source: int
    target: int


@dataclass
class GroupRow:
    """What a row finds in each window and recurrent group: its table, copied when its plan was taken."""

    tables: dict[int, dict[int, int]] = field(default_factory=dict)


class Groups:
    """``cells``: by group, (page, offset) to the tokens up to and with that one; a state has the offset 0."""

    def __init__(self, config: ts.SchedulerConfig) -> None:
        self.cells: list[Cells] = [{} for _ in config.groups]
        self.kinds = [group.kind for group in config.groups]
        self.sizes = [group.page_size if group.kind != ts.CacheGroupKind.RECURRENT else 1 for group in config.groups]
        self.windows = [group.window for group in config.groups]
        self.tables: list[list[dict[int, int]]] = [[{} for _ in config.groups] for _ in range(config.max_num_seqs)]

    def of_kind(self, kind: ts.CacheGroupKind) -> list[int]:
        return [group for group, its in enumerate(self.kinds) if its == kind]

    def take(self, plan: ts.ExecutionPlan) -> list[StateOp]:
        """Applies the deltas of a plan to the tables of these groups; its state ops."""
        columns = (plan.delta_group, plan.delta_slot, plan.delta_index, plan.delta_page)
        for group, slot, index, page in zip(*(column.tolist() for column in columns), strict=True):
            if group:
                assert self.kinds[group] != ts.CacheGroupKind.FULL, "a full group has the table of the first"
                self.tables[slot][group][index] = page
        ops = [
            StateOp(group, source, target)
            for group, source, target in zip(
                plan.state_group.tolist(), plan.state_source.tolist(), plan.state_target.tolist(), strict=True
            )
        ]
        sources = {(op.group, op.source) for op in ops}
        assert not sources & {(op.group, op.target) for op in ops}, "a state is both source and target"
        return ops

    def row(self, slot: int) -> GroupRow:
        return GroupRow({group: dict(table) for group, table in enumerate(self.tables[slot]) if group})

    def written(self, row: GroupRow, begin: int, end: int) -> list[tuple[int, int]]:
        """(group, page) of what a row over tokens [begin, end) writes."""
        pages = [(group, row.tables[group][0]) for group in self.of_kind(ts.CacheGroupKind.RECURRENT)]
        for group in self.of_kind(ts.CacheGroupKind.WINDOW):
            size = self.sizes[group]
            pages += [(group, row.tables[group][index]) for index in range(begin // size, (end - 1) // size + 1)]
        return pages

    def apply(self, ops: list[StateOp]) -> None:
        for op in ops:
            cells = self.cells[op.group]
            cells[op.target, 0] = () if op.source < 0 else cells.get((op.source, 0))

    def compute(self, row: GroupRow, tokens: list[int], begin: int, end: int) -> None:
        """A row finds the window before ``begin`` and the state there, and leaves those of its own tokens."""
        for group in self.of_kind(ts.CacheGroupKind.WINDOW):
            size = self.sizes[group]
            for position in range(max(0, begin - self.windows[group] + 1), end):
                cell = (row.tables[group][position // size], position % size)
                prefix = tuple(tokens[: position + 1])
                if position < begin:
                    assert self.cells[group].get(cell) == prefix, "a row reads a window that is not its own"
                else:
                    self.cells[group][cell] = prefix
        for group in self.of_kind(ts.CacheGroupKind.RECURRENT):
            state = (row.tables[group][0], 0)
            assert self.cells[group].get(state) == tuple(tokens[:begin]), "a row goes on from another's state"
            self.cells[group][state] = tuple(tokens[:end])

    def spoil(self, row: GroupRow, begin: int, end: int) -> None:
        """A row that does not count writes what it likes."""
        for group, page in self.written(row, begin, end):
            for offset in range(self.sizes[group]):
                if self.kinds[group] == ts.CacheGroupKind.RECURRENT:
                    self.cells[group][page, offset] = object()
        for group in self.of_kind(ts.CacheGroupKind.WINDOW):
            for position in range(begin, end):
                page = row.tables[group][position // self.sizes[group]]
                self.cells[group][page, position % self.sizes[group]] = object()
