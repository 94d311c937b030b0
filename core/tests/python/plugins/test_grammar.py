"""The ``--plugins`` text."""

from __future__ import annotations

import pytest

from tokenspeed.errors import ConfigError
from tokenspeed.plugins.grammar import Selection, parse_plugins
from tokenspeed.testing.plugins import PluginFolder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Selection()),
        (" , ", Selection()),
        ("a,b", Selection(only=True, named=("a", "b"))),
        ("+a", Selection(named=("a",))),
        ("-c", Selection(removed=frozenset({"c"}))),
        ("+a,-c", Selection(named=("a",), removed=frozenset({"c"}))),
        ("a,+b", Selection(only=True, named=("a", "b"))),
        ("none", Selection(only=True)),
        ("none,+a", Selection(only=True, named=("a",))),
        ("tokenspeed-plugin-models-llama", Selection(only=True, named=("models-llama",))),
        ("a,a", Selection(only=True, named=("a",))),
    ],
)
def test_grammar(text: str, expected: Selection) -> None:
    assert parse_plugins(text) == expected


@pytest.mark.parametrize("text", ["none,a", "+", "++a", "+a,-a", "builtin", "-builtin"])
def test_contradictions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_plugins(text)


def test_an_unknown_name_names_the_nearest_and_where_it_was_looked_for(folder: PluginFolder) -> None:
    folder.add("attention-flashinfer", "")
    with pytest.raises(ConfigError) as error:
        parse_plugins("+attention-flashinfr", folder.discover(), source="TOKENSPEED_PLUGINS")
    text = str(error.value)
    assert "TOKENSPEED_PLUGINS" in text
    assert "did you mean 'attention-flashinfer'?" in text
    assert str(folder.path) in text
    assert "tokenspeed.plugins" in text


def test_a_removed_name_must_exist_too(folder: PluginFolder) -> None:
    with pytest.raises(ConfigError, match="no plugin named 'ghost'"):
        parse_plugins("-ghost", folder.discover())
