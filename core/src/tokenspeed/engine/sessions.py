"""What is asked of a session between its turns: its pages brought up, or kept no longer."""

from __future__ import annotations

from tokenspeed._scheduler import Scheduler
from tokenspeed.messages import ControlReply, ControlRequest

__all__ = ["SESSION_METHODS", "SessionAsks"]

#: Control methods that are answered here.
SESSION_METHODS = frozenset(("prefetch_session", "release_session"))

_UNKNOWN = "the session is not known: nothing was kept for it, or its time is over"


class SessionAsks:
    """Questions in order, each held back to the end of the step after its arrival.

    A client is told of a request's end while a step of it may still be in flight, and its pages are kept from the end of that step on: a question
    answered at once would find the session of the turn before, or none. No plan that is in flight between two steps outlives the next one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._asks: list[ControlRequest] = []

    def add(self, request: ControlRequest) -> None:
        """Take a question."""
        self._asks.append(request)

    def answers(self, now_us: int) -> list[ControlReply]:
        """Answers to what was asked before this step; a plan was taken in it, so that sessions past their time have ended.

        Results are pages: those that begin to load or that the store is asked for, or those that are kept no longer.
        """
        asks, self._asks = self._asks, []
        replies = []
        for request in asks:
            pages = self._carry_out(request, now_us)
            replies.append(ControlReply(request.id, pages >= 0, pages if pages >= 0 else _UNKNOWN))
        return replies

    def __bool__(self) -> bool:
        """Some wait for their answers."""
        return bool(self._asks)

    def _carry_out(self, request: ControlRequest, now_us: int) -> int:
        """Pages, or -1 for a session that is not known."""
        if not 0 <= request.session < 1 << 63:
            return -1
        if request.method == "prefetch_session":
            return self._scheduler.prefetch_session(request.session, now_us)
        kept = self._scheduler.stats().retained_pages
        return kept - self._scheduler.stats().retained_pages if self._scheduler.release_session(request.session) else -1
