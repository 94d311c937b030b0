"""All parser families together: names and aliases belong to one plugin each, and the documentation lists them."""

from __future__ import annotations

import importlib
import re
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.interfaces.parser import ParserContext

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "plugins/parsers").glob("*/pyproject.toml"))

# Names by which other servers know these parsers.
UPSTREAM = {
    "reasoning": [
        "deepseek_r1",
        "deepseek_v31",
        "qwen3",
        "qwen3_thinking",
        "glm45",
        "glm47",
        "kimi",
        "kimi_k2",
        "kimi_k25",
        "minimax_m2",
        "gpt_oss",
        "mistral",
        "base",
        "kimi_thinking",
        "passthrough",
        "deepseek31",
        "deepseek32",
        "glm45_moe",
        "glm47_moe",
        "qwen",
    ],
    "tool": [
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "pythonic",
        "mistral",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "kimi_k2",
        "glm45",
        "glm47",
        "minimax_m2",
        "gpt_oss",
        "json",
        "kimik2",
        "glm45_moe",
        "glm47_moe",
        "qwen",
        "qwen25",
        "qwen_coder",
        "qwen_xml",
        "qwen3_xml",
        "llama",
        "llama3",
        "deepseek31",
        "deepseek32",
        "passthrough",
        "llama4_pythonic",
    ],
}

HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
NASTY_CALLS = ('{"name":"a","parameters":{"x":[1,{"y":"z"}]}} ', "[f(a='x', b=[1, {'c': 2}])] ")


def contributions(kind: str) -> list[tuple[str, Any]]:
    """(plugin, spec) of every family."""
    found = []
    for folder in FOLDERS:
        (point,) = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"][
            "tokenspeed.plugins"
        ].items()
        module = importlib.import_module(point[1])
        found += [(point[0], spec) for spec in getattr(module, f"tokenspeed_{kind}_parsers", list)()]
    return found


@pytest.mark.parametrize("kind", ["reasoning", "tool"])
def test_a_name_has_one_owner(kind: str) -> None:
    names = Counter(name for _, spec in contributions(kind) for name in (spec.name, *spec.aliases))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("kind", ["reasoning", "tool"])
def test_the_names_of_other_servers_are_known(kind: str) -> None:
    names = {name for _, spec in contributions(kind) for name in (spec.name, *spec.aliases)}
    assert set(UPSTREAM[kind]) - names == set()


@pytest.mark.parametrize(("kind", "heading"), [("reasoning", "Reasoning parsers:"), ("tool", "Tool-call parsers:")])
def test_the_documentation_lists_them(kind: str, heading: str) -> None:
    text = (ROOT / "docs/parsers.md").read_text().partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0]
    listed = set()
    for row in text.splitlines()[2:]:
        name, aliases, plugin = [cell.strip() for cell in row.split("|")[1:4]]
        listed.add((name.strip("`"), tuple(re.findall(r"`([^`]+)`", aliases)), plugin))
    assert listed == {(spec.name, spec.aliases, plugin) for plugin, spec in contributions(kind)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [spec.name for _, spec in contributions("tool")])
def test_a_megabyte_of_the_nastiest_text(name: str) -> None:
    """Markers, halves of markers, brackets, quotes and whole calls, repeated to 1 MB, in pieces and at once: under a second of CPU each.

    A busy machine inflates CPU time, so a text gets five runs.
    """
    (spec,) = [spec for _, spec in contributions("tool") if spec.name == name]
    module, _, attribute = spec.target.partition(":")
    parser = getattr(importlib.import_module(module), attribute)
    markers = [*parser.announcements, *HARMONY] if name == "gpt_oss" else [*parser.announcements]
    nasty = [
        "{",
        "[",
        "<",
        "\\",
        '"',
        "}",
        "[[],",
        "\n",
        "<|",
        "a",
        '{"name": "',
        "[f(a=[1,",
        *NASTY_CALLS,
        *markers,
        *(text[:-1] for text in markers),
    ]
    nasty += [text + '{"a": "x' for text in markers] + [text + "f" for text in markers] + ["".join(markers) or "x"]
    for text in nasty:
        whole = text * (1_000_000 // len(text))
        for size in (64, len(whole)):
            assert any(seconds(parser, whole, size) < 1 for _ in range(5)), (text, size)


def seconds(parser: Any, text: str, size: int) -> float:
    """CPU time to read ``text`` in pieces."""
    machine = parser(ParserContext())
    begin = time.process_time()
    for at in range(0, len(text), size):
        machine.feed(text[at : at + size])
    machine.finish()
    return time.process_time() - begin


def test_every_example_of_a_format_is_read_by_its_own_parser_alone() -> None:
    """A parser takes no other family's calls for its own: their text stays text or at least names nothing."""
    calls = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "mistral": "[TOOL_CALLS]f[ARGS]{}",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "glm47": "<tool_call>f</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "pythonic": "[f()]",
    }
    parsers = {}
    for _, spec in contributions("tool"):
        module, _, attribute = spec.target.partition(":")
        parsers[spec.name] = getattr(importlib.import_module(module), attribute)
    for name in calls:
        for other, text in calls.items():
            parser = parsers[name](ParserContext())
            told = [call.name for delta in (parser.feed(text), parser.finish()) for call in delta.calls if call.name]
            assert told == (["f"] if other == name else []), (name, other)
