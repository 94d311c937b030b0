"""What the tiers below the device would hold, and the transfers between them: the rules in plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tokenspeed import _scheduler as ts

__all__ = ["Tiers", "Transfer"]

Page = list[object]
KINDS = ("write_back", "load_back", "lookup", "prefetch", "store")


@dataclass
class Transfer:
    """One op: a run of pages of one group that moves from one place to another."""

    kind: str
    group: int
    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    source: list[Page] = field(default_factory=list)
    good: int | None = None  # leading pages that were copied; None: not yet

    @property
    def pages(self) -> int:
        return max(len(self.device), len(self.host), len(self.hashes))


class Tiers:
    """``device``: the engine's cells of each group by (page, offset), and ``sizes``: the cells of a page.

    A page in transfer is read by transfers only, or by one written, and never both.
    """

    def __init__(self, device: list[dict[tuple[int, int], object]], sizes: list[int]) -> None:
        self.sizes = sizes
        self.device = device
        self.host: list[dict[tuple[int, int], object]] = [{} for _ in sizes]
        self.stored: dict[tuple[int, bytes], Page] = {}  # by group and block
        self.open: dict[int, Transfer] = {}
        self.lost: set[int] = set()  # load backs that were answered as failed
        self.last = 0

    def read(self, tier: list[dict[tuple[int, int], object]], group: int, page: int) -> Page:
        return [tier[group].get((page, offset)) for offset in range(self.sizes[group])]

    def write(self, tier: list[dict[tuple[int, int], object]], group: int, page: int, content: Page) -> None:
        for offset, value in enumerate(content):
            tier[group][page, offset] = value

    def begin(self, plan: ts.ExecutionPlan) -> list[tuple[int, Transfer]]:
        """Takes the transfers of a plan; those that load for a row are returned too."""
        begun: dict[int, Transfer] = {}
        for kind in KINDS:
            ops: np.ndarray = getattr(plan, f"{kind}_op")
            groups = getattr(plan, f"{kind}_group").tolist()
            for i, op in enumerate(ops.tolist()):
                transfer = begun.setdefault(op, Transfer(kind, groups[i]))
                assert (transfer.kind, transfer.group) == (kind, groups[i]), "an op has pages of two groups"
                for name in ("device", "host", "row"):
                    column = getattr(plan, f"{kind}_{name}", None)
                    if column is not None:
                        getattr(transfer, "rows" if name == "row" else name).append(int(column[i]))
                hashes = getattr(plan, f"{kind}_hash", None)
                if hashes is not None:
                    transfer.hashes.append(hashes[i].tobytes())
        assert all(op > self.last for op in begun), "a transfer is begun twice"
        self.last = max(begun, default=self.last)
        for op, transfer in begun.items():
            self.check_free(transfer)
            self.open[op] = transfer
            self.start(transfer)
        return [(op, transfer) for op, transfer in begun.items() if transfer.kind == "load_back"]

    def uses(self, group: int) -> Iterator[tuple[str, int, bool]]:
        """(tier, page, whether it is written) of everything of the group in transfer."""
        for transfer in self.open.values():
            if transfer.group == group:
                yield from (("device", page, transfer.kind == "load_back") for page in transfer.device)
                yield from (("host", page, transfer.kind in ("write_back", "prefetch")) for page in transfer.host)

    def check_free(self, transfer: Transfer) -> None:
        uses = list(self.uses(transfer.group))
        read = {(tier, page) for tier, page, written in uses if not written}
        written = {(tier, page) for tier, page, written in uses if written}
        for page in transfer.device:
            assert ("device", page) not in written
            assert transfer.kind == "write_back" or ("device", page) not in read, "a load writes a page in transfer"
        for page in transfer.host:
            assert ("host", page) not in written
            assert transfer.kind in ("load_back", "store") or ("host", page) not in read, (
                "a host page in transfer is used again"
            )

    def moves(self, page: int, group: int = 0) -> bool:
        """Whether no row may write the device page now."""
        return any(tier == "device" and used == page for tier, used, _ in self.uses(group))

    def start(self, transfer: Transfer) -> None:
        group = transfer.group
        garbage: Page = [object()] * self.sizes[group]
        if transfer.kind == "write_back":
            transfer.source = [self.read(self.device, group, page) for page in transfer.device]
        elif transfer.kind in ("load_back", "store"):
            transfer.source = [self.read(self.host, group, page) for page in transfer.host]
        if transfer.kind in ("write_back", "prefetch"):
            for page in transfer.host:
                self.write(self.host, group, page, garbage)
        elif transfer.kind == "load_back":
            for page in transfer.device:
                self.write(self.device, group, page, garbage)

    def copy(self, op: int, wanted: int) -> int:
        """Copies up to ``wanted`` leading pages, once; how many are good."""
        transfer = self.open[op]
        if transfer.good is not None:
            return transfer.good
        good = min(wanted, transfer.pages)
        if transfer.kind in ("lookup", "prefetch"):
            there = 0
            while there < transfer.pages and (transfer.group, transfer.hashes[there]) in self.stored:
                there += 1
            good = min(good, there)
        for i in range(good):
            if transfer.kind == "write_back":
                self.write(self.host, transfer.group, transfer.host[i], transfer.source[i])
            elif transfer.kind == "load_back":
                self.write(self.device, transfer.group, transfer.device[i], transfer.source[i])
            elif transfer.kind == "prefetch":
                self.write(self.host, transfer.group, transfer.host[i], self.stored[transfer.group, transfer.hashes[i]])
            elif transfer.kind == "store":
                known = self.stored.setdefault((transfer.group, transfer.hashes[i]), transfer.source[i])
                assert known == transfer.source[i], "a page is stored under the name of another"
        transfer.good = good
        return good

    def came(self, op: int, wanted: int) -> bool:
        """Settles a load back before its row computes; whether all of it is there."""
        if op not in self.open:
            return op not in self.lost
        return self.copy(op, wanted) == self.open[op].pages

    def answer(self, op: int, wanted: int) -> int:
        """Ends a transfer: what it read must be as it was."""
        good = self.copy(op, wanted)
        transfer = self.open.pop(op)
        if transfer.kind == "write_back":
            now = [self.read(self.device, transfer.group, page) for page in transfer.device]
            assert transfer.source == now, "a page changed while it was copied"
        elif transfer.kind in ("load_back", "store"):
            now = [self.read(self.host, transfer.group, page) for page in transfer.host]
            assert transfer.source == now, "a host page changed while it was copied"
        if transfer.kind == "load_back" and good < transfer.pages:
            self.lost.add(op)
        return good
