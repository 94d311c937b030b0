"""Event hooks: each plugin is called on its own, and what it raises is reported once, by its name."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pluggy

from tokenspeed.errors import PluginError
from tokenspeed.plugins.events import (
    ConfigureContext,
    DoctorContext,
    DoctorFinding,
    EngineReadyContext,
    ModelLoadedContext,
    ProcessInitContext,
    ShutdownContext,
)

__all__ = ["EventCalls"]

_log = logging.getLogger(__name__)


class EventCalls:
    """Calls the event hooks of some plugins, in the order given.

    A plugin that raises is not called again, but for ``shutdown``. Where it is one of ``required``, ``configure``, ``process_init`` and ``model_loaded``
    raise ``PluginError`` instead: a start does not go on with a plugin that was asked for and is not ready.

    Args:
        names: plugins to call.
        required: those that were named, or that fill a slot.
        options: final option values by plugin.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        names: Sequence[str],
        *,
        required: Collection[str] = (),
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._manager = manager
        self._names = tuple(names)
        self._required = frozenset(required)
        self._options = dict(options or {})
        self._failed: dict[str, str] = {}

    @property
    def failed(self) -> dict[str, str]:
        """Plugins that raised, and what."""
        return dict(self._failed)

    def configure(self, plan: Mapping[str, Any]) -> None:
        """The plan is frozen: every plugin gets its own options with it."""
        for name in self._names:
            context = ConfigureContext(options=self._options.get(name, {}), plan=plan)
            self._call(name, "tokenspeed_configure", context, fatal=True)

    def process_init(self, context: ProcessInitContext) -> None:
        """This process is about to begin its work."""
        self._all("tokenspeed_process_init", context, fatal=True)

    def model_loaded(self, context: ModelLoadedContext) -> None:
        """The weights are in place on this rank."""
        self._all("tokenspeed_model_loaded", context, fatal=True)

    def engine_ready(self, context: EngineReadyContext) -> None:
        """The engine takes requests."""
        self._all("tokenspeed_engine_ready", context)

    def shutdown(self, context: ShutdownContext) -> None:
        """The process ends; called even for plugins that failed before, because they may hold something outside it."""
        for name in self._names:
            self._call(name, "tokenspeed_shutdown", context, always=True)

    def doctor(self) -> dict[str, list[DoctorFinding]]:
        """Findings of each plugin that has the hook; one that raises becomes a finding of status ``error``."""
        findings: dict[str, list[DoctorFinding]] = {}
        for name in self._names:
            results = self._call(name, "tokenspeed_doctor", DoctorContext(options=self._options.get(name, {})))
            if name in self._failed:
                findings[name] = [
                    DoctorFinding(status="error", what=self._failed[name], advice="report this to the plugin's author")
                ]
            elif results:
                findings[name] = [finding for result in results for finding in result]
        return findings

    def _all(self, hook: str, context: Any, *, fatal: bool = False) -> None:
        for name in self._names:
            self._call(name, hook, context, fatal=fatal)

    def _call(self, name: str, hook: str, context: Any, *, fatal: bool = False, always: bool = False) -> list[Any]:
        plugin = self._manager.get_plugin(name)
        if plugin is None or (name in self._failed and not always):
            return []
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        try:
            results: list[Any] = self._manager.subset_hook_caller(hook, others)(context=context)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a plugin must not end the process either
            cause = f"{type(error).__name__}: {error}"
            if fatal and name in self._required:
                raise PluginError(f"{cause}\nplugin {name!r} raised it in {hook}, and it is needed") from error
            if name not in self._failed:
                self._failed[name] = f"{hook}: {cause}"
                _log.warning("plugin %r raised in %s and is not called again: %s", name, hook, cause)
                _log.debug("plugin %r", name, exc_info=error)
            return []
        return results
