"""Options that plugins declare as data and users set with ``--set PLUGIN.NAME=VALUE``: found, typed, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenspeed.errors import ConfigError
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.specs import OptionSpec

__all__ = ["check_option", "hide_given", "hide_values", "option_owner", "parse_option", "resolve_options"]

#: What is shown instead of a secret.
_HIDDEN = "***"

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
#: What plugins may hand on to compiled code, whatever bounds of their own they declare.
_INT64 = (-(1 << 63), (1 << 63) - 1)
_TYPES: tuple[type, ...] = (int, float, str, bool)


def check_option(spec: OptionSpec) -> str:
    """What is wrong with a declaration, or an empty string."""
    if spec.type not in _TYPES:
        return f"option {spec.name!r} has type {spec.type!r}; it must be int, float, str or bool"
    if "." in spec.name or "=" in spec.name:
        return f"option {spec.name!r} must not contain '.' or '='"
    fault = _fault(spec, spec.default)
    return f"default of option {spec.name!r} {fault}" if fault else ""


def _fault(spec: OptionSpec, value: Any) -> str:
    if type(value) is not spec.type and not (spec.type is float and type(value) is int):
        return f"is {value!r}, not of type {spec.type.__name__}"
    if spec.choices and value not in spec.choices:
        return f"is {value!r}; choose from {', '.join(str(choice) for choice in spec.choices)}"
    if isinstance(value, (int, float)):
        if type(value) is int and not _INT64[0] <= value <= _INT64[1]:
            return f"is {value!r}, which no 64 bits hold"
        if spec.minimum is not None and value < spec.minimum:
            return f"is {value!r}; the least is {spec.minimum:g}"
        if spec.maximum is not None and value > spec.maximum:
            return f"is {value!r}; the most is {spec.maximum:g}"
    return ""


def parse_option(spec: OptionSpec, text: str) -> Any:
    """The value of ``text``, checked. Raises ``ValueError`` with a phrase that begins with a verb (``is 'x'; choose from ...``)."""
    value: Any = text
    if spec.type is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"is {text!r}; write true or false")
        value = _BOOLEANS[text.lower()]
    elif spec.type in (int, float):
        try:
            value = spec.type(text)
        except ValueError:
            raise ValueError(f"is {text!r}, not of type {spec.type.__name__}") from None
    fault = _fault(spec, value)
    if fault:
        raise ValueError(fault)
    return value


def _find_plugin(name: str, plugins: Iterable[str]) -> list[str]:
    """Plugins meant by ``name``: its own, or the name less the kind (``flashinfer`` for ``attention-flashinfer``)."""
    known = list(plugins)
    if name in known:
        return [name]
    return [plugin for plugin in known if plugin.partition("-")[2] == name]


def resolve_options(
    declared: Iterable[Contribution[OptionSpec]], given: Mapping[str, str], inactive: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """Values of every declared option by plugin and name; ``given`` maps ``plugin.option`` to text.

    Args:
        inactive: plugins that are installed but not active, for a better message.

    Raises:
        ConfigError: an unknown plugin or option (the nearest is named), or a value that does not pass.
    """
    specs: dict[str, dict[str, OptionSpec]] = {}
    ours: set[str] = set()
    for c in declared:
        specs.setdefault(c.plugin, {})[c.spec.name] = c.spec
        ours |= {c.plugin} if c.first_party else set()
    values = {plugin: {name: spec.default for name, spec in options.items()} for plugin, options in specs.items()}
    for key, text in given.items():
        name, dot, option = key.rpartition(".")
        if not dot or not name or not option:
            raise ConfigError(f"--set {key}={text}: write PLUGIN.OPTION=VALUE")
        plugin = _one_plugin(f"--set {key}", name, specs, list(inactive), ours)
        spec = specs[plugin].get(option)
        if spec is None:
            known = ", ".join(sorted(specs[plugin]))
            raise ConfigError(
                f"--set {key}: plugin {plugin} has no such option{did_you_mean(option, specs[plugin])}; it has {known}"
            )
        try:
            values[plugin][option] = parse_option(spec, text)
        except ValueError as error:
            raise ConfigError(f"--set {key}: the value {error}") from None
    return values


def option_owner(key: str, declared: Iterable[Contribution[OptionSpec]]) -> str:
    """The plugin that ``key`` (``plugin.option``) means. Raises ``ConfigError`` as ``resolve_options`` does."""
    own = list(declared)
    name = key.rpartition(".")[0]
    return _one_plugin(f"--set {key}", name, {c.plugin: c for c in own}, [], {c.plugin for c in own if c.first_party})


def hide_values(
    declared: Iterable[Contribution[OptionSpec]], values: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """``values`` by plugin and name as they may be shown: secrets that were given are hidden."""
    defaults = {(c.plugin, c.spec.name): c.spec.default for c in declared if c.spec.secret}
    return {
        plugin: {
            name: _HIDDEN if (plugin, name) in defaults and value != defaults[plugin, name] else value
            for name, value in options.items()
        }
        for plugin, options in values.items()
    }


def hide_given(declared: Iterable[Contribution[OptionSpec]], given: Mapping[str, str]) -> dict[str, str]:
    """``given`` (``plugin.option`` to text) as it may be shown; whichever way the plugin is named."""
    secrets = {(c.plugin, c.spec.name) for c in declared if c.spec.secret}
    plugins = {plugin for plugin, _ in secrets}

    def shown(key: str, text: str) -> str:
        name, _, option = key.rpartition(".")
        return _HIDDEN if any((plugin, option) in secrets for plugin in _find_plugin(name, plugins)) else text

    return {key: shown(key, text) for key, text in given.items()}


def _one_plugin(what: str, name: str, specs: Mapping[str, Any], inactive: list[str], ours: Collection[str]) -> str:
    """The plugin that ``name`` means; a short name of one in ``ours`` stays its own."""
    found = _find_plugin(name, specs)
    found = [plugin for plugin in found if plugin in ours] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{what}: {name} may mean {' or '.join(found)}; write one in full")
    if _find_plugin(name, inactive):
        raise ConfigError(
            f"{what}: plugin {name} is installed but not active, or has no options; see `tokenspeed plugins list`"
        )
    raise ConfigError(
        f"{what}: no active plugin of that name has options{did_you_mean(name, specs)}; "
        f"plugins with options: {', '.join(sorted(specs)) or 'none'}"
    )
