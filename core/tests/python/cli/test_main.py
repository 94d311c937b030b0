"""Finding commands, exit codes, and what the command line costs before it does anything."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import __version__
from tokenspeed.cli import main as main_module
from tokenspeed.cli.main import COMMANDS
from tokenspeed.errors import ConfigError, EngineError, PluginError

CORE_SRC = str(Path(__file__).resolve().parents[3] / "src")

COMMAND = """
@hookimpl
def tokenspeed_commands():
    return [CommandSpec(name="{name}", target="{target}", help="do a thing")]
"""
GREET = """
def add_arguments(parser): parser.add_argument("--whom", default="nobody")
def run(args):
    print("hello", args.whom)
    return 7
"""


def cli(*arguments: str) -> tuple[list[str], dict[str, str]]:
    code = "import sys; from tokenspeed.cli.main import main; code = main(); print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    path = os.pathsep.join(filter(None, [CORE_SRC, os.environ.get("PYTHONPATH", "")]))
    return [sys.executable, "-c", code, *arguments], os.environ | {"PYTHONPATH": path}


def processor_seconds(*arguments: str) -> float:
    """Processor time of one run in one thread: what it takes on an idle machine, measured on a busy one. The least of three."""
    command, env = cli(*arguments)
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=env, capture_output=True, check=False, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_lists_every_command_with_its_purpose(run: Any) -> None:
    outcome = run("--help")
    assert outcome.code == 0
    for name, (_, text) in COMMANDS.items():
        assert name in outcome.out
        assert text in " ".join(outcome.out.split())


def test_without_arguments_help_is_shown(run: Any) -> None:
    assert "commands:" in run().out


def test_version(run: Any) -> None:
    assert run("--version").out.strip() == __version__
    assert run("version").out.strip() == f"tokenspeed {__version__}"
    assert '"kernel": 1' in run("version", "--json").out


@pytest.mark.parametrize(
    "arguments", [("--help",), ("serve", "--help"), ("explain", "--help"), ("plugins", "list", "--help")]
)
def test_help_takes_less_than_a_second(arguments: tuple[str, ...]) -> None:
    assert processor_seconds(*arguments) < 1.0


def test_plugins_list_takes_less_than_half_a_second() -> None:
    assert processor_seconds("plugins", "list") < 0.5


@pytest.mark.parametrize(
    "arguments",
    [
        ("plugins", "list"),
        ("plugins", "show", "builtin"),
        ("kernels", "list"),
        ("env",),
        ("explain", "toy", "--device", "cpu"),
    ],
)
def test_looking_at_things_imports_no_torch(arguments: tuple[str, ...]) -> None:
    command, env = cli(*arguments)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("wrong"), 2), (PluginError("wrong"), 1), (EngineError("wrong"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_codes_and_a_message_without_traceback(
    run: Any, monkeypatch: Any, error: BaseException, code: int
) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(main_module, "_command", fail)
    outcome = run("anything")
    assert outcome.code == code
    assert "Traceback" not in outcome.err
    if code != 130:
        assert outcome.err.strip() == "tokenspeed: wrong"


def test_an_unknown_command_names_the_nearest(run: Any) -> None:
    outcome = run("pluginz", "list")
    assert outcome.code == 2
    assert "did you mean 'plugins'?" in outcome.err


def test_an_unknown_flag_names_the_nearest_in_two_lines(run: Any) -> None:
    outcome = run("explain", "toy", "--max-modl-len", "5")
    assert outcome.code == 2
    assert "did you mean '--max-model-len'?" in outcome.err
    assert len(outcome.err.splitlines()) == 2


def test_flags_are_not_abbreviated(run: Any) -> None:
    assert run("plugins", "list", "--plug", "none").code == 2


def test_a_plugin_adds_a_command(run: Any, folder: Any) -> None:
    folder.add("greeter", COMMAND.format(name="greet", target="greeting"), modules={"greeting": GREET})
    assert "do a thing (plugin greeter)" in " ".join(run("--help").out.split())
    outcome = run("greet", "--whom", "you")
    assert (outcome.code, outcome.out) == (7, "hello you\n")
    assert "--whom" in run("greet", "--help").out


def test_the_text_of_a_plugins_command_is_shown_as_it_is_written(run: Any, folder: Any) -> None:
    """A percent sign means nothing in it, here or in the help of the command itself."""
    text = "saves 50% of %(prog)s, %s and %%"
    folder.add(
        "zoo", COMMAND.format(name="zoo", target="zoo_cli").replace("do a thing", text), modules={"zoo_cli": GREET}
    )
    outcome = run("--help")
    assert outcome.code == 0
    assert f"{text} (plugin zoo)" in " ".join(outcome.out.split())
    outcome = run("zoo", "--help")
    assert outcome.code == 0
    assert text[1:] in outcome.out


def test_plug_06_two_plugins_with_one_command_must_be_named_in_full(run: Any, folder: Any) -> None:
    for name in ("p1", "p2"):
        folder.add(name, COMMAND.format(name="greet", target="greeting"), modules={"greeting": GREET})
    outcome = run("greet")
    assert outcome.code == 2
    assert "p1:greet or p2:greet" in outcome.err
    assert run("p2:greet").code == 7


def test_a_plugin_cannot_take_the_place_of_a_built_in_command(run: Any, folder: Any) -> None:
    folder.add("usurper", COMMAND.format(name="version", target="greeting"), modules={"greeting": GREET})
    assert run("version").out.strip() == f"tokenspeed {__version__}"
    outcome = run("plugins", "doctor", "usurper")
    assert outcome.code == 1
    assert "has the name of a built-in command" in outcome.out


def test_plug_04_help_works_while_a_plugin_is_broken_and_its_command_is_explained(run: Any, folder: Any) -> None:
    folder.add("sick", "raise ImportError('libfoo')")
    assert run("--help").code == 0
    outcome = run("greet")
    assert outcome.code == 2
    assert "plugin sick is broken and may have offered it: ImportError: libfoo" in outcome.err


def test_help_works_while_the_environment_names_a_plugin_that_is_not_there(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "ghost")
    outcome = run("--help")
    assert outcome.code == 0
    assert "no plugin named 'ghost'" in outcome.err


def test_debug_log_shows_each_plugin_with_its_duration(folder: Any) -> None:
    command, env = cli("--log-level", "debug", "plugins", "list")
    env["PYTHONPATH"] = os.pathsep.join([str(folder.path), env["PYTHONPATH"]])
    folder.add("acme", "")
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "plugin acme: loading" in result.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command, env = cli("plugins", "list", "--json")
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 0
    assert "BrokenPipeError" not in errors
