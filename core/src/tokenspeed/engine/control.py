"""Operations on the engine as a whole, asked for by ``ControlRequest``."""

from __future__ import annotations

from typing import Any

from tokenspeed._scheduler import Scheduler
from tokenspeed.engine.gauges import Gauges
from tokenspeed.messages import ControlReply, ControlRequest, EngineInfo

__all__ = ["Control"]


class Control:
    """Answers control requests; ``stopping`` turns true on ``shutdown``."""

    def __init__(self, *, scheduler: Scheduler, gauges: Gauges, info: EngineInfo) -> None:
        self._scheduler = scheduler
        self._gauges = gauges
        self.info = info
        self.stopping = False

    def answer(self, request: ControlRequest) -> ControlReply:
        """Carry out ``request``; an unknown method is answered with its name and those that exist."""
        methods = {
            "flush_cache": self._flush_cache,
            "info": self._info,
            "shutdown": self._shutdown,
            "stats": self._gauges.now,
        }
        method = methods.get(request.method)
        if method is None:
            return ControlReply(
                request.id, False, f"the engine knows no {request.method!r}; it knows {', '.join(sorted(methods))}"
            )
        return ControlReply(request.id, True, method())

    def _flush_cache(self) -> Any:
        self._gauges.changed()
        return int(self._scheduler.flush_cache())

    def _info(self) -> EngineInfo:
        return self.info

    def _shutdown(self) -> None:
        self.stopping = True
