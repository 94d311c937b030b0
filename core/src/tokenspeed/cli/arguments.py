"""Flags that commands share, and the configs made of them.

Precedence: command line, then ``TOKENSPEED_PLUGINS`` and ``TOKENSPEED_API_KEY``, then the config file, then defaults.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tokenspeed.cli.config_file import read_config_file
from tokenspeed.cli.flags import ENGINE_FLAGS, SERVING_FLAGS, Flag
from tokenspeed.cli.refused import REFUSED, Refusal
from tokenspeed.config import EngineConfig, ParallelConfig, ServingConfig
from tokenspeed.errors import ConfigError
from tokenspeed.plugins.names import did_you_mean

__all__ = [
    "Parser",
    "add_engine_arguments",
    "add_plugin_arguments",
    "add_serving_arguments",
    "argument_type",
    "engine_config",
    "plugin_settings",
    "serving_config",
]

_GROUPS = {
    "model": "Model",
    "device": "Device",
    "memory": "Memory and KV cache",
    "scheduling": "Scheduling",
    "plugins": "Plugins and backends",
    "parallel": "Parallelism",
    "server": "Server",
    "logging": "Logging",
}
_FIELDS = {
    field.name: field.default
    for config in (EngineConfig, ServingConfig, ParallelConfig)
    for field in msgspec.structs.fields(config)
}
_PAIR_FIELDS = {"set": "plugin_options", "kernel": "kernel_overrides"}


class Parser(argparse.ArgumentParser):
    """``ArgumentParser`` without abbreviations, that names the nearest flag, command or choice for one it does not know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        # -5G and -1e3 are numbers too (no flag begins with a digit): their flag's reader says what it takes, rather than that it got nothing.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} (choose from {', '.join(known)})")

    def error(self, message: str) -> NoReturn:
        """One line and the way to the help, instead of a screen of usage."""
        if message.endswith("expected one argument"):
            message += "; a value that begins with - follows an equals sign: --flag=-1"
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """``parse_args`` that hints at the nearest flag before it exits with code 2."""
        parsed, extra = self.parse_known_args(args)
        if extra:
            first = extra[0].partition("=")[0]
            hint = did_you_mean(first, _option_strings(self)) if first.startswith("-") else ""
            self.error(f"unknown argument {extra[0]}{hint}")
        return parsed


def _option_strings(parser: argparse.ArgumentParser) -> list[str]:
    """All flags of a parser and of its sub-commands."""
    flags: list[str] = []
    for action in parser._actions:
        flags += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                flags += _option_strings(nested)
    return flags


def argument_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of flags as a ``type`` of argparse, which passes the message of no other error on."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


class _Refuse(argparse.Action):
    """Refuses a flag by its name, unless its value is one that changes nothing."""

    def __init__(self, refusal: Refusal, **kwargs: Any) -> None:
        super().__init__(
            nargs=None if refusal.takes_value else 0, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **kwargs
        )
        self._refusal = refusal

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002  argparse's signature
        value = values if self._refusal.takes_value else ""
        if value not in self._refusal.accepted:
            text = f"{option_string} {values}" if self._refusal.takes_value else str(option_string)
            accepted = f" (only {', '.join(self._refusal.accepted)} is accepted)" if self._refusal.accepted else ""
            raise ConfigError(f"{text} is not supported{accepted}: {self._refusal.reason}")


def _default_text(flag: Flag) -> str:
    if flag.default:
        return flag.default
    value = _FIELDS[flag.field]
    if flag.boolean:
        return "on" if value else "off"
    return "none" if value in (None, "", ()) else str(value)


def _add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag], groups: dict[str, Any]) -> None:
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(_GROUPS[flag.group])
        kwargs: dict[str, Any] = {
            "dest": flag.field,
            "default": argparse.SUPPRESS,
            "help": f"{flag.help} (default: {_default_text(flag)})".replace("%", "%%"),
        }
        if flag.boolean:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["type"] = argument_type(flag.read)
            kwargs["metavar"] = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.metavar
            if flag.choices:
                kwargs["choices"] = tuple(dict.fromkeys(flag.read(choice) for choice in flag.choices))
            if flag.many:
                kwargs.update(nargs="+", action="extend")
        groups[flag.group].add_argument(f"--{flag.name}", *flag.aliases, **kwargs)


def add_plugin_arguments(parser: argparse.ArgumentParser, group: Any = None) -> None:
    """``--plugins`` and ``--set``, for every command that loads plugins."""
    group = group or parser.add_argument_group(_GROUPS["plugins"])
    group.add_argument(
        "--plugins",
        default=argparse.SUPPRESS,
        metavar="LIST",
        help="plugins to use: a,b are the built-ins, these, and what they need; +a adds one; named ones rank first where no flag, need of the model, "
        "more specific model class or platform's order of attention backends decides; -c leaves one out "
        "(write --plugins=-c); none is the built-ins alone (default: TOKENSPEED_PLUGINS, or every installed one may be used)",
    )
    group.add_argument(
        "--set",
        dest="set",
        action="append",
        default=argparse.SUPPRESS,
        metavar="PLUGIN.OPTION=VALUE",
        help="an option of a plugin; may be given again (see tokenspeed plugins show)",
    )


def add_engine_arguments(parser: argparse.ArgumentParser, *, model: bool = True) -> dict[str, Any]:
    """Everything of ``EngineConfig``; ``model`` adds the positional MODEL. Returns the argument groups by key, for more flags in them."""
    if model:
        parser.usage = "%(prog)s MODEL [options]"
        parser.add_argument(
            "model",
            nargs="?",
            default=argparse.SUPPRESS,
            metavar="MODEL",
            help="a directory in Hugging Face layout, a GGUF file, a hub id, package:NAME (the model file in an installed Python package), or toy",
        )
    parser.add_argument(
        "--config",
        type=Path,
        default=None,
        metavar="FILE",
        help="YAML, JSON or TOML file of settings by flag name; flags win over it",
    )
    groups: dict[str, Any] = {}
    _add_flags(parser, [_SERVED_NAME, *ENGINE_FLAGS], groups)
    add_plugin_arguments(parser, groups["plugins"])
    groups["plugins"].add_argument(
        "--kernel",
        dest="kernel",
        action="append",
        default=argparse.SUPPRESS,
        metavar="FAMILY.MODE=SOLUTION",
        help="the kernel for one operation; may be given again (see tokenspeed kernels list)",
    )
    for refusal in REFUSED:
        parser.add_argument(*refusal.flags, action=_Refuse, refusal=refusal, dest=argparse.SUPPRESS)
    return groups


def add_serving_arguments(parser: argparse.ArgumentParser, groups: dict[str, Any] | None = None) -> None:
    """Everything of ``ServingConfig``; ``groups`` is what ``add_engine_arguments`` returned for the same parser."""
    _add_flags(parser, SERVING_FLAGS, {} if groups is None else groups)


_SERVED_NAME = Flag(
    name="served-model-name",
    group="model",
    help="names that clients use for the model",
    many=True,
    default="MODEL as given",
)
_BY_KEY = {flag.field: flag for flag in (_SERVED_NAME, *ENGINE_FLAGS, *SERVING_FLAGS)}
_BY_KEY |= {alias.lstrip("-").replace("-", "_"): flag for flag in _BY_KEY.values() for alias in flag.aliases}


def _pairs(flag: str, items: Iterable[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--{flag} {item}: write {'PLUGIN.OPTION=VALUE' if flag == 'set' else 'FAMILY.MODE=SOLUTION'}"
            )
        pairs[key] = value
    return pairs


def _flat(prefix: str, table: Mapping[str, Any]) -> dict[str, str]:
    """``{"flashinfer": {"workspace_mb": 512}}`` and ``{"flashinfer.workspace_mb": 512}`` are the same."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat |= _flat(path, value)
        else:
            flat[path] = _text(value)
    return flat


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _file_settings(path: Path | None) -> dict[str, Any]:
    """The config file's settings by field, read like flags. Raises ``ConfigError`` naming file and key."""
    settings: dict[str, Any] = {}
    for key, value in (read_config_file(path) if path else {}).items():
        field = key.lstrip("-").replace("-", "_")
        where = f"--config {path}: {key}"
        pair = next((f for flag, f in _PAIR_FIELDS.items() if field in (flag, f)), None)
        if value is None:
            continue
        if pair:
            flag = next(flag for flag, f in _PAIR_FIELDS.items() if f == pair)
            settings[pair] = _flat("", value) if isinstance(value, Mapping) else _pairs(flag, map(str, _as_list(value)))
        elif field in ("model", "plugins"):
            settings[field] = ",".join(map(str, _as_list(value)))
        elif field in _BY_KEY:
            settings[_BY_KEY[field].field] = _file_value(_BY_KEY[field], value, where)
        else:
            known = [*_BY_KEY, *_PAIR_FIELDS, *_PAIR_FIELDS.values(), "model", "plugins"]
            raise ConfigError(f"{where}: no such setting{did_you_mean(field, known)}")
    return settings


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _file_value(flag: Flag, value: Any, where: str) -> Any:
    if (
        flag.boolean != isinstance(value, bool)
        or isinstance(value, dict)
        or (isinstance(value, list) and not flag.many)
    ):
        kind = "true or false" if flag.boolean else "a list of values" if flag.many else "one value"
        raise ConfigError(f"{where}: {value!r} is not {kind}")
    if flag.boolean:
        return value
    try:
        values = [flag.read(str(item)) for item in _as_list(value)]
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    for item in values:
        if flag.choices and item not in flag.choices:
            raise ConfigError(f"{where}: {item!r} is not one of {', '.join(flag.choices)}")
    return values if flag.many else values[0]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """All settings that anybody made, by field."""
    settings = _file_settings(getattr(args, "config", None))
    if "TOKENSPEED_PLUGINS" in os.environ:
        settings["plugins"] = os.environ["TOKENSPEED_PLUGINS"]
    if "TOKENSPEED_API_KEY" in os.environ:
        settings["api_key"] = [os.environ["TOKENSPEED_API_KEY"]]
    given = vars(args)
    for flag, field in _PAIR_FIELDS.items():
        if flag in given:
            settings[field] = settings.get(field, {}) | _pairs(flag, given[flag])
    settings |= {field: value for field, value in given.items() if field in _BY_KEY or field in ("model", "plugins")}
    return {field: tuple(value) if isinstance(value, list) else value for field, value in settings.items()}


def plugin_settings(args: argparse.Namespace) -> tuple[str, dict[str, str], str]:
    """(``--plugins`` text, ``--set`` pairs, where the text came from), for commands that load plugins and no model."""
    settings = _settings(args)
    source = (
        "--plugins"
        if "plugins" in vars(args)
        else "TOKENSPEED_PLUGINS"
        if "TOKENSPEED_PLUGINS" in os.environ
        else "the config file"
    )
    return settings.get("plugins", ""), settings.get("plugin_options", {}), source


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings. Raises ``ConfigError`` for a bad config file, pair or missing model."""
    settings = _settings(args)
    if not settings.get("model"):
        raise ConfigError("no model is given: name a directory, a GGUF file, a hub id, package:NAME, or toy")
    parallel = {field: settings[field] for field in settings if field in _names(ParallelConfig)}
    parallel.setdefault("world_size", parallel.get("tensor_parallel_size", 1))
    fields = {field: value for field, value in settings.items() if field in _names(EngineConfig)}
    return EngineConfig(**fields, parallel=ParallelConfig(**parallel))


def serving_config(args: argparse.Namespace) -> ServingConfig:
    """The server's settings. Raises ``ConfigError`` as ``engine_config`` does, and for an empty key or name: one that every client has."""
    settings = _settings(args)
    for field, flag in (("api_key", "--api-key or TOKENSPEED_API_KEY"), ("served_model_name", "--served-model-name")):
        if not all(text.strip() for text in settings.get(field, ())):
            raise ConfigError(f"{flag}: an empty text is given; give one or leave it out")
        if field in settings:
            settings[field] = tuple(dict.fromkeys(settings[field]))
    fields = {field: value for field, value in settings.items() if field in _names(ServingConfig)}
    if not fields.get("served_model_name") and settings.get("model"):
        fields["served_model_name"] = (settings["model"],)
    return ServingConfig(**fields)


def _names(config: type[msgspec.Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(config)}
