"""``PluginPlan``: what one start decided, frozen as plain data so that every process can check that it decides the same."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["PLAN_VERSION", "PlanPlugin", "PlanSlot", "PluginPlan"]

PLAN_VERSION = 1


class PlanPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """One plugin that contributes to the plan; ``named`` in ``--plugins``."""

    name: str
    distribution: str
    version: str
    named: bool = False


class PlanSlot(msgspec.Struct, frozen=True, kw_only=True):
    """What fills a slot: ``name`` of ``plugin``, loaded from ``target``."""

    plugin: str
    name: str
    target: str


class PluginPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Only what contributes: a plugin that is installed somewhere and does nothing here makes no difference.

    Attributes:
        core: version of tokenspeed-core.
        plugins: by name.
        slots: ``platform``, ``model``, ``attention.extend``, ``attention.decode``; ``tool_parser``, ``reasoning_parser``,
            ``grammar_backend`` and ``kv_store`` where there is one.
        kernels: ``family.mode/plugin:name`` to target, of every kernel that automatic choice or an override may take on the platform.
        options: final option values of contributing plugins, by plugin and name.
        settings: what was decided besides: ``kv_layout``, ``page_size``, ``dtype``, ``kv_cache_dtype``.
    """

    core: str
    plugins: tuple[PlanPlugin, ...]
    slots: dict[str, PlanSlot]
    kernels: dict[str, str]
    options: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    version: int = PLAN_VERSION

    def encode(self) -> bytes:
        """The plan as JSON, the same bytes for equal plans."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def decode(cls, data: bytes | str) -> PluginPlan:
        """Read ``encode``'s output. Raises ``msgspec.DecodeError`` for anything else."""
        return msgspec.json.decode(data, type=cls)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON objects."""
        plain: dict[str, Any] = msgspec.json.decode(self.encode())
        return plain

    def differences(self, other: PluginPlan) -> list[str]:
        """A line for each value that differs, ``path: here ..., there ...``; empty when the plans are equal."""
        lines: list[str] = []
        _compare("", _by_name(self.to_json()), _by_name(other.to_json()), lines)
        return lines


def _by_name(plain: dict[str, Any]) -> dict[str, Any]:
    return {**plain, "plugins": {plugin["name"]: plugin for plugin in plain["plugins"]}}


def _compare(path: str, here: Any, there: Any, lines: list[str]) -> None:
    if isinstance(here, dict) and isinstance(there, dict):
        for key in sorted({*here, *there}):
            where = f"{path}.{key}" if path else str(key)
            if key not in there:
                lines.append(f"{where}: here {msgspec.json.encode(here[key]).decode()}, there nothing")
            elif key not in here:
                lines.append(f"{where}: here nothing, there {msgspec.json.encode(there[key]).decode()}")
            else:
                _compare(where, here[key], there[key], lines)
    elif here != there:
        lines.append(f"{path}: here {msgspec.json.encode(here).decode()}, there {msgspec.json.encode(there).decode()}")
