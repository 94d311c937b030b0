"""Names of properties as regular expressions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.regex import EMPTY, Alt, Cat, Chars, Node, Repeat, matches, search
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse

__all__ = ["named_by", "other_than"]


def named_by(name: str, pattern: str, path: str) -> bool:
    """Whether a pattern is found in a name."""
    return matches(search(parse(pattern, path), path), name)


def other_than(names: Iterable[str]) -> Node:
    """Every name but ``names``, of characters that stand for themselves in JSON: an escaped spelling of a declared name is none either.

    Along the tree of the names' beginnings: a name differs if it ends early, goes on behind an end, or turns off somewhere.
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _off(tree)


def _off(tree: dict[str, Any]) -> Node:
    plain = charsets.JSON_PLAIN
    taken = charsets.merge((ord(char), ord(char)) for char in tree if char)
    anything = Repeat(Chars(plain), 0, None)
    options: list[Node] = [] if "" in tree else [EMPTY]
    options.append(Cat((Chars(charsets.intersect(plain, charsets.invert(taken))), anything)))
    for char, below in tree.items():
        if char and charsets.intersect(((ord(char), ord(char)),), plain):
            options.append(Cat((Chars(((ord(char), ord(char)),)), _off(below))))
    return Alt(tuple(options))
