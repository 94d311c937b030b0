"""Each plugin is loaded on its own: whatever one does wrong is its own error, with a cause that a user can act on."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.testing.plugins import PluginFolder

GOOD = """
@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="{name}", target="nowhere:Parser"{more})]
"""


def good(name: str, more: str = "") -> str:
    return GOOD.format(name=name, more=f", {more}" if more else "")


def parsers(host: Any) -> list[str]:
    return [c.name for c in host.registry.specs("tool_parser")]


def test_plug_03_a_plugin_that_raises_or_exits_on_import_leaves_the_others_alone(core: Any) -> None:
    core.folder.add("broken", "raise ImportError('libfoo.so.3: cannot open')")
    core.folder.add("exits", "import sys; sys.exit(1)")
    core.folder.add("odd", "class Odd(BaseException): pass\nraise Odd('strange')")
    core.folder.add("good", good("good"))
    host = core.load()
    assert dict(host.broken) == {
        "broken": "ImportError: libfoo.so.3: cannot open",
        "exits": "SystemExit: 1",
        "odd": "Odd: strange",
    }
    assert "good:good" in parsers(host)


def test_plug_03_a_registration_hook_that_raises_leaves_nothing_of_the_plugin(core: Any) -> None:
    core.folder.add(
        "half", good("half") + "\n@hookimpl\ndef tokenspeed_kernels():\n    raise ValueError('no device')\n"
    )
    host = core.load()
    assert host.broken == [("half", "ValueError: no device")]
    assert "half:half" not in parsers(host)
    assert "half" not in host.active


def test_the_innermost_cause_is_what_is_reported(core: Any) -> None:
    core.folder.add(
        "deep",
        "try:\n    import absent_library\nexcept ImportError as e:\n    raise RuntimeError('cannot start') from e",
    )
    assert core.load().broken == [("deep", "ModuleNotFoundError: No module named 'absent_library'")]


def test_an_interrupt_by_the_user_is_not_a_plugin_error(core: Any) -> None:
    core.folder.add("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        core.load()


def test_a_stale_entry_point_is_a_broken_plugin(core: Any) -> None:
    core.folder.write_metadata("dist-gone", "1.0", {"gone": "module_that_is_gone"})
    assert core.load().broken == [("gone", "ModuleNotFoundError: No module named 'module_that_is_gone'")]


def test_a_named_plugin_that_is_broken_is_fatal_cause_first(core: Any) -> None:
    core.folder.add("broken", "raise ImportError('libfoo.so.3')")
    with pytest.raises(PluginError) as error:
        core.load("+broken")
    first, second = str(error.value).splitlines()
    assert first == "ImportError: libfoo.so.3"
    assert "'broken' was named in --plugins" in second
    assert core.load("+broken", strict=False).broken


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("@hookimpl\ndef tokenspeed_modells():\n    return []", "did you mean 'tokenspeed_models'?"),
        ("def tokenspeed_models():\n    return []", "not decorated with @hookimpl"),
        ("@hookimpl(wrapper=True)\ndef tokenspeed_models():\n    return (yield)", "is a wrapper"),
        ("@hookimpl\ndef tokenspeed_shutdown(contxt):\n    pass", "contxt"),
        ("@hookimpl\ndef tokenspeed_models():\n    pass", "returned None, not a list of ModelSpec"),
        (
            "@hookimpl\ndef tokenspeed_models():\n    return ToolParserSpec(name='x', target='a:b')",
            "not a list of ModelSpec",
        ),
        (
            "@hookimpl\ndef tokenspeed_models():\n    return [ToolParserSpec(name='x', target='a:b')]",
            "returned ToolParserSpec",
        ),
        (
            "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='x', target='a.b')]",
            "'package.module:attribute'",
        ),
        (
            "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='a:b', target='a:b')]",
            "name 'a:b'",
        ),
        (
            "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='x', target='a:b', platforms='cpu')]",
            "must be a tuple",
        ),
        (
            "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='x', target='a:b', priority=20)]",
            "Priority",
        ),
        (
            "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='x', target='a:b')] * 2",
            "'x' twice",
        ),
        (
            "@hookimpl\ndef tokenspeed_kernels():\n    return [KernelSpec(name='x', target='a:b', family='nrm', mode='m')]",
            "family 'nrm'",
        ),
        (
            "@hookimpl\ndef tokenspeed_kernels():\n    return [KernelSpec(name='x', target='a:b', family='norm', mode='m', objectives=('fast',))]",
            "objective 'fast'",
        ),
        (
            "@hookimpl\ndef tokenspeed_options():\n    return [OptionSpec(name='n', type=int, default='1', help='')]",
            "default of option 'n'",
        ),
        (
            "@hookimpl\ndef tokenspeed_commands():\n    return [CommandSpec(name='c', target='a:b', help='')]",
            "must be a module",
        ),
        (
            "@hookimpl\ndef tokenspeed_models():\n    return [ModelSpec(name='x', target='a:b', architectures=())]",
            "names no architecture",
        ),
        (
            "@hookimpl\ndef tokenspeed_platforms():\n    return [PlatformSpec(name='x', target='a:b', detect='a', device_type='x')]",
            "detect of 'x'",
        ),
    ],
)
def test_a_mistake_in_a_plugin_is_its_own_error(core: Any, source: str, cause: str) -> None:
    core.folder.add("wrong", source)
    ((name, found),) = core.load().broken
    assert name == "wrong"
    assert cause in found


@pytest.mark.parametrize(("api", "upgrade"), [(0, "upgrade the plugin"), (2, "upgrade tokenspeed-core")])
def test_another_version_of_the_contract_turns_off_that_contribution_alone(core: Any, api: int, upgrade: str) -> None:
    core.folder.add("mixed", good("old", f"api={api}").replace(")]", "), ToolParserSpec(name='new', target='a:b')]"))
    host = core.load()
    off = {c.name: c.off for c in host.registry.specs("tool_parser")}
    assert upgrade in off["mixed:old"]
    assert off["mixed:new"] == ""
    assert host.broken == []


def test_plug_06_two_distributions_with_one_plugin_name_are_both_named_and_neither_is_used(core: Any) -> None:
    core.folder.add("hermes2", good("hermes2"), distribution="p1", module="p1_plugin")
    core.folder.add("hermes2", good("hermes2"), distribution="p2", module="p2_plugin")
    host = core.load()
    ((name, cause),) = host.broken
    assert name == "hermes2"
    assert "p1 1.0" in cause
    assert "p2 1.0" in cause
    assert "p1_plugin" not in sys.modules
    with pytest.raises(PluginError, match="claimed by p1"):
        core.load("+hermes2")


@pytest.mark.parametrize("plugins", ["", "+p", "p"])
def test_plug_06_nobody_takes_the_name_of_a_first_party_plugin(core: Any, plugins: str) -> None:
    core.folder.add("p", good("a"), distribution="dist-ours", module="ours", first_party=True)
    core.folder.add("p", good("b"), distribution="a-usurper", module="theirs")
    host = core.load(plugins)
    assert [c.spec.name for c in host.records["p"].contributions] == ["a"]
    assert host.records["p"].status == "active"
    if not plugins.startswith("p"):
        assert "a-usurper claims the name of the first-party plugin p; uninstall it" in dict(host.broken)["a-usurper:p"]


def test_plug_06_nobody_takes_the_name_of_the_built_ins(core: Any) -> None:
    core.folder.add("builtin", good("x"), distribution="usurper")
    host = core.load()
    assert "usurper claims the name of the built-in plugin" in host.broken[0][1]
    assert host.records["builtin"].distribution == "tokenspeed-core"


def test_broken_built_ins_end_the_start(folder: PluginFolder) -> None:
    folder.write_module("bad_builtin", "raise ImportError('half installed')")
    with pytest.raises(PluginError, match="half installed"):
        folder.load(builtin="bad_builtin")


def test_a_list_loads_these_and_what_they_need_and_nothing_else(core: Any) -> None:
    core.folder.add("a", good("a", "needs=('b',)"))
    core.folder.add("b", good("b", "needs=('c',)"))
    core.folder.add("c", good("c"))
    core.folder.add("d", good("d"))
    host = core.load("a")
    assert host.active == ["builtin", "a", "b", "c"]
    assert host.records["d"].status == "inactive"
    assert "d_plugin" not in sys.modules
    assert host.records["b"].needed_by == ("a",)
    kinds = {c.plugin: (c.automatic, c.named) for c in host.registry.specs("tool_parser")}
    assert kinds["a"] == (True, True)
    assert kinds["c"] == (True, False)


def test_a_removed_plugin_is_not_imported(core: Any) -> None:
    core.folder.add("a", good("a"))
    core.folder.add("c", "raise RuntimeError")
    host = core.load("-c")
    assert host.active == ["builtin", "a"]
    assert host.broken == []


def test_none_is_the_built_ins_alone(core: Any) -> None:
    core.folder.add("a", good("a"))
    assert core.load("none").active == ["builtin"]


def test_a_typo_fails_before_anything_is_imported(core: Any) -> None:
    module = core.folder.add("hermes", good("hermes"))
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        core.load("hermse")
    assert module not in sys.modules


def test_only_first_party_and_named_plugins_take_part_in_automatic_choice(core: Any) -> None:
    core.folder.add("ours", good("ours"), first_party=True)
    core.folder.add("theirs", good("theirs"))
    automatic = {c.plugin: c.automatic for c in core.load().registry.specs("tool_parser")}
    assert automatic == {"builtin": True, "ours": True, "theirs": False}
    automatic = {c.plugin: c.automatic for c in core.load("+theirs").registry.specs("tool_parser")}
    assert automatic["theirs"]


def test_plug_07_each_plugin_is_logged_before_and_after_with_its_duration(core: Any, caplog: Any) -> None:
    core.folder.add("a", good("a"))
    with caplog.at_level(logging.DEBUG, logger="tokenspeed.plugins"):
        host = core.load()
    lines = [record.getMessage() for record in caplog.records]
    at = lines.index("plugin a: loading")
    assert lines[at + 1].startswith("plugin a: ")
    assert lines[at + 1].endswith(" ms")
    assert host.records["a"].load_s > 0


def test_an_entry_point_may_name_an_object_in_a_module(core: Any) -> None:
    core.folder.write_module(
        "classy",
        "from tokenspeed.plugins import *\nclass P:\n    @hookimpl\n    def tokenspeed_tool_parsers(self):\n"
        "        return [ToolParserSpec(name='classy', target='a:b')]\nplugin = P()\n",
    )
    core.folder.write_metadata("dist-classy", "1.0", {"classy": "classy:plugin"})
    host = core.load()
    assert host.broken == []
    assert "classy:classy" in parsers(host)
