"""Whether what plugins contribute can be used on this machine: requirements, other plugins, devices. Imports neither torch nor a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.plugins.manager import PluginHost, PluginRecord, innermost_cause
from tokenspeed.plugins.registry import Contribution, spec_key
from tokenspeed.plugins.requirements import missing_requirements
from tokenspeed.plugins.selection import load_target, probe
from tokenspeed.plugins.specs import PlatformSpec, Spec
from tokenspeed.plugins.watchdog import LoadLimits, Watchdog

__all__ = ["Usability"]

_NAMED_AT_MOST = 3


class Usability:
    """Judges the contributions of active plugins; asks each platform once whether it finds its device."""

    def __init__(self, host: PluginHost) -> None:
        self._host = host
        self._missing: dict[tuple[str, ...], list[str]] = {}
        self._platforms = self._detect()
        self._present = {c.spec.name for c in host.registry.specs("platform") if not self._platforms[c.name]}

    def fault(self, c: Contribution[Any]) -> str:
        """Why a contribution of an active plugin cannot be used here; an empty string where it can, and for options and commands."""
        spec = c.spec
        if not isinstance(spec, Spec):
            return ""
        if isinstance(spec, PlatformSpec):
            return self._platforms[c.name]
        lacks, away = self._lacks(c), self._elsewhere(spec)
        own = "" if lacks or away else probe(spec)
        return "; ".join(text for text in (*lacks, away, own) if text)

    def elsewhere(self, record: PluginRecord) -> str:
        """What of an active plugin runs on devices only that are not here; an empty string for nothing."""
        offered = [c.spec for c in record.contributions if isinstance(c.spec, Spec)]
        faults = {_label(spec): fault for spec in offered if (fault := self._elsewhere(spec))}
        return _summary(faults, len(offered)) if faults else ""

    def state(self, record: PluginRecord) -> tuple[str, str]:
        """(state, cause): the record's own status, or for an active plugin ``unusable`` or ``partial`` where all or some of what it offers cannot be used."""
        if record.status != "active":
            return record.status, record.cause
        offered = [c for c in record.contributions if isinstance(c.spec, Spec)]
        faults = {_label(c.spec): fault for c in offered if (fault := self.fault(c))}
        if not faults:
            return "active", ""
        return ("unusable" if len(faults) == len(offered) else "partial"), _summary(faults, len(offered))

    def _elsewhere(self, spec: Spec) -> str:
        here = not spec.platforms or self._present.intersection(spec.platforms)
        return "" if here else f"runs on {', '.join(spec.platforms)}, which no active plugin finds here"

    def _lacks(self, c: Contribution[Any]) -> list[str]:
        spec: Spec = c.spec
        if spec.requires not in self._missing:
            self._missing[spec.requires] = missing_requirements(spec.requires)
        needs = [f"needs plugin {name}, which is not active" for name in spec.needs if name not in self._host.active]
        return [*([c.off] if c.off else []), *needs, *self._missing[spec.requires]]

    def _detect(self) -> dict[str, str]:
        """The fault of each platform by ``plugin:name``."""
        faults = {}
        with Watchdog(LoadLimits()) as watchdog:
            for c in self._host.registry.specs("platform"):
                faults[c.name] = "; ".join(self._lacks(c))
                if not faults[c.name]:
                    with watchdog.watching(c.plugin):
                        faults[c.name] = self._no_device(c)
        return faults

    def _no_device(self, c: Contribution[PlatformSpec]) -> str:
        try:
            description = load_target(c.spec.detect)()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return f"detection failed: {innermost_cause(error)}"
        if description is not None:
            return ""
        asks = "tokenspeed_doctor" in self._host.records[c.plugin].hooks
        why = f": {lacking}" if (lacking := probe(c.spec)) else ""
        return f"finds no such device here{why}" + (
            f" (`tokenspeed plugins doctor {c.plugin}` says why)" if asks and not why else ""
        )


def _label(spec: Spec) -> str:
    return f"{spec.KIND} {spec_key(spec)}"


def _summary(faults: Mapping[str, str], offered: int) -> str:
    """Each reason once, with what it holds back unless that is all."""
    by_reason: dict[str, list[str]] = {}
    for label, fault in faults.items():
        by_reason.setdefault(fault, []).append(label)
    if len(by_reason) == 1 and len(faults) == offered:
        return next(iter(by_reason))
    parts = []
    for reason, labels in by_reason.items():
        more = f" and {len(labels) - _NAMED_AT_MOST} more" if len(labels) > _NAMED_AT_MOST else ""
        parts.append(f"{', '.join(labels[:_NAMED_AT_MOST])}{more}: {reason}")
    return "; ".join(parts)
