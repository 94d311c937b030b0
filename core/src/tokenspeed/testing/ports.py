"""Ports for the servers that tests start: nobody else on the machine is given them meanwhile."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

__all__ = ["ReservedPorts"]


class ReservedPorts:
    """Ports in a row on loopback, taken from when this is made until ``close``.

    On Linux a server that sets ``SO_REUSEADDR``, as servers do, may listen on them, as often as it likes; the system chooses them for nobody. Elsewhere
    they were free a moment ago.

    Attributes:
        ports: their numbers, ascending.
    """

    def __init__(self, count: int = 1) -> None:
        self._held = next(held for held in _attempts(count) if held)
        self.ports = [int(each.getsockname()[1]) for each in self._held]
        if not sys.platform.startswith("linux"):
            self.close()

    def close(self) -> None:
        """Give them back."""
        for each in self._held:
            each.close()


def _attempts(count: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to ports in a row; an empty list where one of these is taken."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(_bound(0))
            try:
                rest = [stack.enter_context(_bound(first.getsockname()[1] + 1 + offset)) for offset in range(count - 1)]
            except (OSError, OverflowError):
                yield []
                continue
            stack.pop_all()
        yield [first, *rest]


def _bound(port: int) -> socket.socket:
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
    except BaseException:
        made.close()
        raise
    return made
