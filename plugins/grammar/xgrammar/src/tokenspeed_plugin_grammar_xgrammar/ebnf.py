"""Bounds on EBNF grammars, told from their text; XGrammar itself reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenspeed_plugin_grammar_xgrammar.limits import MAX_DEPTH, MAX_EBNF_CHARS, MAX_EBNF_REPEAT, refuse

__all__ = ["check_ebnf"]

# A string, a character class, a comment, a counted repeat, a bracket, the beginning of a rule, a name, or anything else.
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\{\s*(?P<low>\d*)\s*(?P<comma>,?)\s*(?P<high>\d*)\s*\}'
    r"|(?P<open>\()|(?P<close>\))|(?P<rule>[A-Za-z_][\w.-]*)\s*::=|(?P<name>[A-Za-z_][\w.-]*)|[\s\S]"
)


def check_ebnf(text: str, path: str) -> None:
    """Refuse a grammar that is too large or that repeats too much.

    Raises:
        GrammarError: more characters, depth or repeats than allowed, look-ahead, no rule ``root``, a rule that is not there, or one that no text ends.
    """
    if len(text) > MAX_EBNF_CHARS:
        raise refuse(path, f"a grammar of {len(text)} characters; {MAX_EBNF_CHARS} are allowed")
    rules, names = set[str](), set[str]()
    repeats = [1]  # for each open bracket, the most that its content is repeated inside
    closed = 1  # the same of the element just read
    for token in _TOKEN.finditer(text):
        if token["open"]:
            if text.startswith("=", token.end()):
                raise refuse(path, "look-ahead (= cannot be enforced")
            repeats.append(1)
            if len(repeats) > MAX_DEPTH:
                raise refuse(path, f"brackets nested more than {MAX_DEPTH} deep")
        elif token["close"]:
            if len(repeats) == 1:
                raise refuse(path, f"unmatched ) at character {token.start()}")
            closed = repeats.pop()
            repeats[-1] = max(repeats[-1], closed)
        elif token["low"] is not None:
            counts = [int(count[:9]) for count in (token["low"], token["high"]) if count]
            closed *= max(counts, default=1)
            repeats[-1] = max(repeats[-1], closed)
            if closed > MAX_EBNF_REPEAT:
                raise refuse(
                    path, f"repeats of {closed} in all at character {token.start()}; {MAX_EBNF_REPEAT} are allowed"
                )
        elif token["rule"]:
            rules.add(token["rule"])
        elif token["name"]:
            names.add(token["name"])
            closed = 1
        elif not token[0].isspace():
            closed = 1
    if len(repeats) > 1:
        raise refuse(path, "a bracket is not closed")
    if "root" not in rules:
        raise refuse(path, "has no rule root ::= ...")
    if missing := sorted(names - rules - _MACROS):
        raise refuse(path, f"rule {missing[0]!r} is used and not defined")
    for name in _endless(text):
        raise refuse(
            path,
            f"no finite text matches rule {name!r}: each of its alternatives leads back to it, or to an empty class []",
        )


# Alternatives of a rule or bracket, each the rules and brackets that it needs; what else stands in it is always found.
_Needs = list[list[Any]]


def _endless(text: str) -> list[str]:
    """Rules that no finite text matches, in their order: those that the least fixed point of "some alternative needs only rules that end" leaves out."""
    rules = _needs(text)
    users: dict[str, list[str]] = {name: [] for name in rules}
    for token, name in _uses(text):
        if token in users:
            users[token].append(name)
    ending, waiting = set[str](), dict.fromkeys(rules)
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        if _ends(rules[name], ending):
            ending.add(name)
            waiting.update(dict.fromkeys(user for user in users[name] if user not in ending))
    return [name for name in rules if name not in ending]


def _ends(options: _Needs, ending: set[str]) -> bool:
    return any(
        all(need in ending if isinstance(need, str) else _ends(need, ending) for need in option) for option in options
    )


def _uses(text: str) -> Iterator[tuple[str, str]]:
    """Each name with the rule in which it stands."""
    rule = ""
    for token in _TOKEN.finditer(text):
        rule = token["rule"] or rule
        if token["name"]:
            yield token["name"], rule


def _needs(text: str) -> dict[str, _Needs]:
    """What each rule needs, of a text whose brackets are known to match."""
    rules: dict[str, _Needs] = {}
    open_: list[_Needs] = [[[]]]
    macro = False  # the bracket that follows holds a macro's arguments, which are taken for found
    for token in _TOKEN.finditer(text):
        last = open_[-1][-1]
        if token["rule"]:
            open_ = [rules.setdefault(token["rule"], [])]
            open_[0].append([])
        elif token["open"]:
            group: _Needs = [[]]
            last.append([[]] if macro else group)
            open_.append(group)
        elif token["close"]:
            open_.pop()
        elif token[0] == "|":
            open_[-1].append([])
        elif token[0] in "*?" or (token["low"] is not None and not int(token["low"][:9] or 0)):
            del last[-1:]
        elif token["name"]:
            last.append([[]] if token["name"] in _MACROS else token["name"])
        elif token[0][0] in '"[':
            last.append([] if token[0] == "[]" else [[]])
        macro = (token["name"] or "") in _MACROS or (macro and token[0].isspace())
    return rules


# Names that the notation itself uses.
_MACROS = frozenset(
    (
        "TagDispatch",
        "TokenTagDispatch",
        "Token",
        "ExcludeToken",
        "true",
        "false",
        "stop_eos",
        "stop_str",
        "loop_after_dispatch",
        "excludes",
    )
)
