"""What ``tokenspeed plugins doctor`` looks for: everything that would keep a contribution from being used, and what plugins say themselves."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tokenspeed.cli.main import COMMANDS
from tokenspeed.cli.usability import Usability
from tokenspeed.engine.advice import where_parsers_are
from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.plugins.dispatch import EventCalls
from tokenspeed.plugins.manager import PluginHost, innermost_cause
from tokenspeed.plugins.options import resolve_options
from tokenspeed.plugins.registry import Contribution, spec_key
from tokenspeed.plugins.requirements import missing_requirements
from tokenspeed.plugins.selection import load_target, owners
from tokenspeed.plugins.specs import CommandSpec, Spec

__all__ = ["examine"]

Finding = dict[str, str]

#: Fields of a model's spec that name a part of a kind with that name, and the flag of each.
_PARTS = {
    "attention_backend": "--attention-backend",
    "tool_parser": "--tool-call-parser",
    "reasoning_parser": "--reasoning-parser",
    "renderer": "--renderer",
}


def _finding(status: str, plugin: str, what: str, advice: str = "") -> Finding:
    return {"status": status, "plugin": plugin, "what": what, "advice": advice}


def examine(host: PluginHost, given: Mapping[str, str], only: Collection[str] = ()) -> list[Finding]:
    """All findings, those of the plugins ``only`` where some are given. ``status`` is ``ok``, ``warning`` or ``error``."""
    findings = [*_broken(host), *_shadowed(host), *_contributions(host), *_devices(host), *_collisions(host)]
    findings += _named_parts(host)
    findings += [*_stores(host, given), *_own(host, given)]
    faulty = {finding["plugin"] for finding in findings}
    findings += [_finding("ok", name, "loaded") for name in host.active if name not in faulty]
    return [finding for finding in findings if not only or finding["plugin"] in only]


def _broken(host: PluginHost) -> Iterator[Finding]:
    for name, cause in host.broken:
        record = host.records[name]
        yield _finding("error", name, cause, f"upgrade, repair or uninstall {record.distribution} {record.version}")


def _shadowed(host: PluginHost) -> Iterator[Finding]:
    names = {found.distribution: found.name for found in host.discovery.found}
    for copy in host.discovery.shadowed:
        yield _finding(
            "warning",
            names.get(copy.distribution, copy.distribution),
            f"{copy.distribution} {copy.version} in {copy.location} is never used: {copy.by} comes first",
            "uninstall the copy that is not wanted",
        )


def _contributions(host: PluginHost) -> Iterator[Finding]:
    for name in host.active:
        for c in host.records[name].contributions:
            spec = c.spec
            if not isinstance(spec, (Spec, CommandSpec)):
                continue
            label = f"{spec.KIND} {spec_key(spec)}"
            if c.off:
                yield _finding("warning", name, f"{label} is off: {c.off}")
            if isinstance(spec, Spec):
                for phrase in missing_requirements(spec.requires):
                    yield _finding("warning", name, f"{label} {phrase}", "install what it requires, or ignore it")
                for needed in spec.needs:
                    if needed not in host.active:
                        yield _finding("warning", name, f"{label} needs plugin {needed}, which is not active")
            elif spec.name in COMMANDS:
                yield _finding("error", name, f"{label} has the name of a built-in command and cannot be reached")
            fault = (
                _target_fault(spec)
                if isinstance(spec, Spec) and not c.off
                else _missing_module(spec.target.partition(":")[0])
            )
            if fault:
                yield _finding("error", name, f"{label}: {fault}", "the plugin is incomplete; reinstall it")


def _named_parts(host: PluginHost) -> Iterator[Finding]:
    """Parts that a model's spec asks for by name and that no active plugin has: misspelt, or not there."""
    for c in host.registry.specs("model"):
        for kind, flag in _PARTS.items():
            wanted: str = getattr(c.spec, kind)
            candidates: list[Contribution[Any]] = host.registry.specs(kind)  # type: ignore[call-overload]
            if wanted and not owners(candidates, wanted):
                text = f"model {c.spec.name} names {kind} {wanted}, which no active plugin has"
                yield _finding("warning", c.plugin, text, where_parsers_are(host, wanted, candidates, flag))


def _devices(host: PluginHost) -> Iterator[Finding]:
    usability = Usability(host)
    for name in host.active:
        if away := usability.elsewhere(host.records[name]):
            yield _finding("warning", name, away, "ignore it, or see what the plugin of the platform lacks")


def _stores(host: PluginHost, given: Mapping[str, str]) -> Iterator[Finding]:
    """What KV stores say of the options that they would be started with."""
    options = resolve_options(host.registry.specs("option"), given, host.records)
    for c in host.registry.specs("kv_store"):
        if c.spec.checker and not c.off and not missing_requirements(c.spec.requires):
            try:
                load_target(c.spec.checker)(options.get(c.plugin, {}))
            except ConfigError as error:
                yield _finding("warning", c.plugin, f"kv_store {c.spec.name} cannot start as it is: {error}")
            except Exception as error:
                yield _finding(
                    "error", c.plugin, f"kv_store {c.spec.name}: its checker raised {innermost_cause(error)}"
                )


def _target_fault(spec: Spec) -> str:
    """What a user would meet on selecting it: the target is imported where what it requires is there."""
    module = spec.target.partition(":")[0]
    fault = _missing_module(module)
    if fault or missing_requirements(spec.requires):
        return fault
    try:
        load_target(spec.target)
    except PluginError as error:
        return innermost_cause(error.__cause__ or error)
    return ""


def _missing_module(module: str) -> str:
    """Whether a target's module can be found; it is not imported (its parent package is)."""
    try:
        found = importlib.util.find_spec(module) is not None
    except Exception as error:
        return f"module {module} cannot be looked for: {type(error).__name__}: {error}"
    return "" if found else f"there is no module {module}"


def _collisions(host: PluginHost) -> Iterator[Finding]:
    owners: dict[tuple[str, str], list[Contribution[Any]]] = defaultdict(list)
    for name in host.active:
        for c in host.records[name].contributions:
            if isinstance(c.spec, (Spec, CommandSpec)) and c.spec.KIND != "model":
                for key in (spec_key(c.spec), *getattr(c.spec, "aliases", ())):
                    owners[c.spec.KIND, key].append(c)
    for (kind, key), claims in sorted(owners.items()):
        if len({c.plugin for c in claims}) > 1:
            names = " and ".join(c.name for c in claims)
            ours = [c for c in claims if c.first_party]
            if len(ours) == 1:
                for c in claims:
                    if c is not ours[0]:
                        text = f"{kind} {key} of {c.name} means {ours[0].name}, which is first-party"
                        name = key.rpartition("=")[2]  # of a kernel, what follows its operation
                        yield _finding("warning", c.plugin, text, f"write {c.plugin}:{name} for this one")
                continue
            for c in claims:
                yield _finding(
                    "warning", c.plugin, f"{kind} {key} belongs to {names}", "write the one you mean in full"
                )


def _own(host: PluginHost, given: Mapping[str, str]) -> Iterator[Finding]:
    options = resolve_options(host.registry.specs("option"), given, host.records)
    for name, findings in EventCalls(host.manager, host.active, options=options).doctor().items():
        for finding in findings:
            yield _finding(finding.status, name, finding.what, finding.advice)
