"""Entry point of ``tokenspeed`` and ``ts``: finds the command, imports only that, and turns errors into exit codes.

0 success, 1 an error, 2 a wrong setting, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenspeed import __version__
from tokenspeed.cli.arguments import Parser
from tokenspeed.cli.logs import configure_logging
from tokenspeed.errors import ConfigError, TokenSpeedError
from tokenspeed.plugins.names import did_you_mean

if TYPE_CHECKING:
    from tokenspeed.plugins.manager import PluginHost
    from tokenspeed.plugins.registry import Contribution
    from tokenspeed.plugins.specs import CommandSpec

__all__ = ["COMMANDS", "main"]

#: Built-in commands: module with ``add_arguments(parser)`` and ``run(args) -> int``, and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("tokenspeed.cli.serve", "serve a model over an OpenAI-compatible API"),
    "generate": ("tokenspeed.cli.generate", "complete prompts without a server"),
    "bench": ("tokenspeed.cli.bench", "measure a running server"),
    "plugins": ("tokenspeed.cli.plugins_cmd", "list, show and check installed plugins"),
    "explain": (
        "tokenspeed.cli.explain_cmd",
        "show what a model would be served with (platform, backends, parsers), and why",
    ),
    "kernels": ("tokenspeed.cli.kernels_cmd", "list kernels, explain which one an operation gets, and time them"),
    "env": ("tokenspeed.cli.env", "show versions and hardware, for bug reports"),
    "version": ("tokenspeed.cli.version", "show the version"),
}
_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except ConfigError as error:
        return _fail(error, 2)
    except TokenSpeedError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `tokenspeed plugins list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(error: TokenSpeedError, code: int) -> int:
    print(f"tokenspeed: {error}", file=sys.stderr)
    return code


def _run(args: list[str]) -> int:
    top = _top_parser()
    name = _command_name(top, args)
    if name is None:
        _add_commands(top, _plugin_commands(None))
        top.parse(args or ["--help"])
        return 0  # pragma: no cover  parse_args leaves after --help and --version
    at = args.index(name)
    configure_logging(top.parse(args[:at]).log_level)
    target, text = _command(name)
    module = importlib.import_module(target)
    if "%(prog)" in text:  # the one thing that argparse looks for in a description
        text = text.replace("%", "%%")
    parser = Parser(prog=f"tokenspeed {name}", description=f"{text[:1].upper()}{text[1:]}.")
    module.add_arguments(parser)
    code: int = module.run(parser.parse(args[at + 1 :]))
    return code


def _top_parser() -> Parser:
    parser = Parser(prog="tokenspeed", description="An LLM inference engine for agent traffic, made of plugins.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--log-level", choices=_LEVELS, default="warning", help="log of the command itself (default: %(default)s)"
    )
    return parser


def _command_name(top: Parser, args: list[str]) -> str | None:
    """The first argument that is no option of ``top`` and no value of one."""
    skip = False
    for argument in args:
        if skip:
            skip = False
        elif argument == "--log-level":
            skip = True
        elif argument in ("-h", "--help", "--version"):
            return None
        elif not argument.startswith("-"):
            return argument
        elif not argument.startswith("--log-level="):
            top.parse([argument])
    return None


def _add_commands(top: Parser, plugin_commands: list[Contribution[CommandSpec]]) -> None:
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    for c in plugin_commands:
        text = f"{c.spec.help} (plugin {c.plugin})".replace("%", "%%")  # argparse fills values in
        commands.add_parser(c.spec.name, help=text)


def _plugin_commands(host: PluginHost | None) -> list[Contribution[CommandSpec]]:
    """Commands of plugins; none where plugins cannot be loaded at all, because help must always work."""
    try:
        host = host or _load_plugins()
    except TokenSpeedError as error:
        print(f"tokenspeed: plugins are left out: {error}", file=sys.stderr)
        return []
    return [c for c in host.registry.specs("command") if c.spec.name not in COMMANDS]


def _load_plugins() -> PluginHost:
    from tokenspeed.plugins.manager import PluginHost

    return PluginHost.load(os.environ.get("TOKENSPEED_PLUGINS", ""), source="TOKENSPEED_PLUGINS", strict=False)


def _command(name: str) -> tuple[str, str]:
    """Module and purpose of a built-in command, or of a plugin's.

    Raises:
        ConfigError: there is none (the nearest is named), or two plugins own the name.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    host = _load_plugins()
    commands = _plugin_commands(host)
    owners = [c for c in commands if name in (c.spec.name, c.name)]
    if len(owners) > 1:
        names = " or ".join(c.name for c in owners)
        raise ConfigError(f"command {name} belongs to more than one plugin; write {names}")
    if not owners:
        known = [*COMMANDS, *(c.spec.name for c in commands)]
        broken = "".join(f"\nplugin {name} is broken and may have offered it: {cause}" for name, cause in host.broken)
        raise ConfigError(f"no command {name!r}{did_you_mean(name, known)}; commands: {', '.join(known)}{broken}")
    return owners[0].spec.target, owners[0].spec.help
