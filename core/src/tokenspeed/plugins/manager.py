"""Loads plugins into a registry, one at a time and each on its own: what one does wrong is its own error.

Only ``engine.assembly`` and the command line use this module.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pluggy

from tokenspeed import __version__
from tokenspeed.errors import PluginError
from tokenspeed.plugins import hookspecs
from tokenspeed.plugins.discovery import BUILTIN, Discovery, Found, discover
from tokenspeed.plugins.grammar import Selection, parse_plugins
from tokenspeed.plugins.markers import ENTRY_POINT_GROUP, PROJECT
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.options import check_option
from tokenspeed.plugins.registry import REGISTRATION_HOOKS, AnySpec, Contribution, Registry, check_spec
from tokenspeed.plugins.selection import check_api
from tokenspeed.plugins.specs import OptionSpec, Spec
from tokenspeed.plugins.watchdog import LoadLimits, Watchdog

__all__ = ["PluginHost", "PluginRecord", "innermost_cause"]

BUILTIN_MODULE = "tokenspeed.builtin.plugin"
CORE = "tokenspeed-core"
PLUGIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def innermost_cause(error: BaseException) -> str:
    """``Type: message`` of the exception at the bottom of the chain, which is what a user can act on."""
    while True:
        below = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if below is None:
            break
        error = below
    text = str(error).strip() or "no message"
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"


@dataclass(kw_only=True)
class PluginRecord:
    """What became of one plugin.

    Attributes:
        status: ``active``, ``inactive`` (installed, not used because of ``--plugins``), or ``broken``.
        cause: why it is broken; ``error`` is the exception itself.
        needed_by: active plugins whose contributions name it in ``needs``.
        hooks: names of the hooks that it implements.
        load_s: seconds of import and registration.
    """

    name: str
    distribution: str
    version: str
    location: str
    value: str
    first_party: bool
    named: bool = False
    status: str = "inactive"
    cause: str = ""
    error: BaseException | None = None
    needed_by: tuple[str, ...] = ()
    contributions: tuple[Contribution[Any], ...] = ()
    hooks: tuple[str, ...] = ()
    load_s: float = 0.0


@dataclass(kw_only=True)
class PluginHost:
    """Everything that loading found out. ``load`` makes one; nothing is added afterwards."""

    discovery: Discovery
    selection: Selection
    records: dict[str, PluginRecord] = field(default_factory=dict)
    registry: Registry = field(default_factory=Registry)
    manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))

    @classmethod
    def load(
        cls,
        plugins: str = "",
        *,
        source: str = "--plugins",
        strict: bool = True,
        discovery: Discovery | None = None,
        builtin: str = BUILTIN_MODULE,
        limits: LoadLimits | None = None,
    ) -> PluginHost:
        """Find and load the plugins that ``plugins`` (the ``--plugins`` text) allows.

        Args:
            source: where the text came from, for messages.
            strict: raise when a plugin that was named is broken; otherwise only record it.
            discovery: what is installed; found on ``sys.path`` unless given.
            builtin: module of the built-in plugin.

        Raises:
            ConfigError: the text is malformed or names a plugin that is not installed.
            PluginError: the built-ins cannot be loaded, or (``strict``) a named plugin cannot.
        """
        found = discover() if discovery is None else discovery
        host = cls(discovery=found, selection=parse_plugins(plugins, found, source=source))
        host.manager.add_hookspecs(hookspecs)
        with Watchdog(limits or LoadLimits()) as watchdog:
            host._load_builtin(builtin, watchdog)
            host._load_installed(watchdog)
        if strict:
            for name in host.selection.named:
                record = host.records[name]
                if record.status == "broken":
                    raise PluginError(
                        f"{record.cause}\nplugin {name!r} was named in {source} and cannot be used"
                    ) from record.error
        return host

    @property
    def active(self) -> list[str]:
        """Names of active plugins, the built-ins first."""
        names = sorted(name for name, record in self.records.items() if record.status == "active")
        return sorted(names, key=lambda name: name != BUILTIN)

    @property
    def broken(self) -> list[tuple[str, str]]:
        """(plugin, cause) of what is broken, by name."""
        return sorted((name, record.cause) for name, record in self.records.items() if record.status == "broken")

    def record(self, name: str) -> PluginRecord:
        """The record of one plugin. Raises ``PluginError`` naming the nearest for an unknown one."""
        if name not in self.records:
            raise PluginError(
                f"no plugin named {name!r} is installed{did_you_mean(name, self.records)}\nlooked in {self.discovery.where()}"
            )
        return self.records[name]

    def _load_builtin(self, module: str, watchdog: Watchdog) -> None:
        found = Found(
            name=BUILTIN,
            value=module,
            distribution="tokenspeed-core",
            version=__version__,
            location="",
            first_party=True,
        )
        record = self._load(found, watchdog)
        if record.status == "broken":
            raise PluginError(
                f"{record.cause}\nthe built-in plugin cannot be loaded; reinstall tokenspeed-core"
            ) from record.error

    def _load_installed(self, watchdog: Watchdog) -> None:
        """In the order of names; where ``--plugins`` lists some, those first and then, again and again, what loaded ones need."""
        owners: dict[str, list[Found]] = {}
        for found in self.discovery.found:
            if found.name != BUILTIN:
                owners.setdefault(found.name, []).append(found)
            elif found.distribution != CORE:  # core's own entry point names what is loaded already
                owners.setdefault(f"{found.distribution}:{BUILTIN}", []).append(found)
        for name, claims in list(owners.items()):
            ours = [found for found in claims if found.first_party]
            if len(ours) == 1:  # it stays what the name means, whatever is installed beside it
                owners[name] = ours
                owners |= {f"{found.distribution}:{name}": [found] for found in claims if not found.first_party}
        wanted: dict[str, set[str]] = {name: set() for name in sorted(owners)}
        if self.selection.only:
            wanted = {name: set() for name in sorted(self.selection.named)}
        queue = list(wanted)
        while queue:
            name = queue.pop(0)
            if name not in owners or name in self.selection.removed or name in self.records:
                continue
            record = self._load_one(name, owners[name], watchdog)
            for needed in sorted({n for c in record.contributions if isinstance(c.spec, Spec) for n in c.spec.needs}):
                wanted.setdefault(needed, set()).add(name)
                queue.append(needed)
        for name in sorted(owners):
            if name not in self.records:
                self.records[name] = _record(owners[name][0], self.selection)
            self.records[name].needed_by = tuple(sorted(wanted.get(name, ())))
        self._admit()

    def _load_one(self, key: str, owners: Sequence[Found], watchdog: Watchdog) -> PluginRecord:
        fault = _claim_fault(key, owners)
        if not fault:
            return self._load(owners[0], watchdog)
        record = _record(owners[0], self.selection)
        record.status, record.cause = "broken", fault
        self.records[key] = record
        return record

    def _load(self, found: Found, watchdog: Watchdog) -> PluginRecord:
        """Import, check and register one plugin; everything it raises but KeyboardInterrupt ends up in its record."""
        record = _record(found, self.selection)
        self.records[found.name] = record
        started = time.perf_counter()
        try:
            with watchdog.watching(found.name):
                plugin = _import(found)
                record.hooks = self._check_hooks(found.name, plugin)
                record.contributions = self._collect(found.name, plugin, record.hooks)
            record.status = "active"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            record.status, record.cause, record.error = "broken", innermost_cause(error), error
            record.contributions = ()
            if self.manager.has_plugin(found.name):
                self.manager.unregister(name=found.name)
        record.load_s = time.perf_counter() - started
        return record

    def _check_hooks(self, name: str, plugin: Any) -> tuple[str, ...]:
        """Register with pluggy, refusing misspelt, undecorated and wrapping hooks."""
        known = [hook for hook in vars(hookspecs) if hook.startswith(f"{PROJECT}_")]
        for attribute, value in vars(plugin).items():
            if attribute.startswith(f"{PROJECT}_") and callable(value) and not hasattr(value, f"{PROJECT}_impl"):
                raise PluginError(f"{attribute} is not decorated with @hookimpl, so that it would never be called")
        alone = pluggy.PluginManager(PROJECT)
        alone.add_hookspecs(hookspecs)
        alone.register(plugin, name)
        callers = alone.get_hookcallers(plugin) or []
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.hookwrapper or impl.wrapper:
                    raise PluginError(
                        f"{caller.name} is a wrapper; a plugin contributes for itself and does not see what others do"
                    )
            if not caller.has_spec() and not all(impl.optionalhook for impl in caller.get_hookimpls()):
                raise PluginError(f"there is no hook {caller.name!r}{did_you_mean(caller.name, known)}")
        alone.check_pending()
        self.manager.register(plugin, name)
        return tuple(sorted(caller.name for caller in callers))

    def _collect(self, name: str, plugin: Any, hooks: Sequence[str]) -> tuple[Contribution[Any], ...]:
        """Call the registration hooks of one plugin and check what they return."""
        contributions: list[Contribution[Any]] = []
        others = [other for other in self.manager.get_plugins() if other is not plugin]
        for hook, cls in REGISTRATION_HOOKS.items():
            if hook not in hooks:
                continue
            results = self.manager.subset_hook_caller(hook, others)()
            if not results:  # pluggy drops None
                raise PluginError(f"{hook} returned None, not a list of {cls.__name__}")
            for specs in results:
                contributions += [self._contribution(name, hook, cls, spec) for spec in _listed(hook, cls, specs)]
        Registry().add(contributions)  # a name that comes twice is this plugin's own error
        return tuple(contributions)

    def _contribution(self, name: str, hook: str, cls: type[AnySpec], spec: Any) -> Contribution[Any]:
        if not isinstance(spec, cls):
            raise PluginError(f"{hook} returned {type(spec).__name__}, not {cls.__name__}")
        fault = check_spec(spec) or (check_option(spec) if isinstance(spec, OptionSpec) else "")
        if fault:
            raise PluginError(f"{hook}: {fault}")
        off = check_api(spec) if isinstance(spec, Spec) else ""
        return Contribution(name, spec, named=name in self.selection.named, off=off)

    def _admit(self) -> None:
        """Fill the registry, now that it is known who is needed by whom."""
        asked = {name for name, record in self.records.items() if record.named}
        while grown := {n for n, r in self.records.items() if n not in asked and asked.intersection(r.needed_by)}:
            asked |= grown
        for name in self.active:
            record = self.records[name]
            automatic = record.first_party or name in asked
            record.contributions = tuple(
                replace(c, automatic=automatic, first_party=record.first_party) for c in record.contributions
            )
            self.registry.add(record.contributions)


def _record(found: Found, selection: Selection) -> PluginRecord:
    return PluginRecord(
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        location=found.location,
        value=found.value,
        first_party=found.first_party,
        named=found.name in selection.named,
    )


def _claim_fault(key: str, owners: Sequence[Found]) -> str:
    """Why, of distributions that are recorded under ``key``, none of the distributions that use one plugin name can have it, or an empty string."""
    name = owners[0].name
    if name == BUILTIN:
        return f"distribution {owners[0].distribution} claims the name of the built-in plugin; uninstall it"
    if not PLUGIN_NAME.fullmatch(name):
        return f"plugin name {name!r} of {owners[0].distribution} is not made of letters, digits, '.', '_' and '-'"
    if key != name:
        return f"distribution {owners[0].distribution} claims the name of the first-party plugin {name}; uninstall it"
    if len(owners) > 1:
        claims = " and ".join(f"{found.distribution} {found.version} ({found.value})" for found in owners)
        return f"the plugin name {name!r} is claimed by {claims}; uninstall one"
    return ""


def _import(found: Found) -> Any:
    if found.name == BUILTIN:
        return importlib.import_module(found.value)
    return importlib.metadata.EntryPoint(name=found.name, value=found.value, group=ENTRY_POINT_GROUP).load()


def _listed(hook: str, cls: type[AnySpec], specs: Any) -> Sequence[Any]:
    if not isinstance(specs, (list, tuple)):
        raise PluginError(f"{hook} returned {type(specs).__name__}, not a list of {cls.__name__}")
    return specs
