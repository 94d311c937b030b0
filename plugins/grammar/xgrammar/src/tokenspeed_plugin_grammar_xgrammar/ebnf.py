"""Bounds on EBNF grammars, told from their text; XGrammar itself reads them."""

from __future__ import annotations

import re

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
        GrammarError: more characters, depth or repeats than allowed, look-ahead, no rule ``root``, or a rule that is not there.
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
