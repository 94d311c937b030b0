"""What the server asks before it sends a grammar to the engine. Imports neither torch nor xgrammar.

``check`` lets pass what the backend enforces to the letter and compiles in bounded time; it refuses the rest with the keyword and its place.
"""

from __future__ import annotations

from typing import Any

from tokenspeed_plugin_grammar_xgrammar.ebnf import check_ebnf
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_CHOICE_CHARS, MAX_CHOICES, MAX_SCHEMA_CHARS, refuse
from tokenspeed_plugin_grammar_xgrammar.regex import Alt, literal, render
from tokenspeed_plugin_grammar_xgrammar.schema import load, normalise
from tokenspeed_plugin_grammar_xgrammar.tags import normalise_tag, plain_regex

__all__ = ["check", "normal_form"]


def check(kind: str, value: str) -> None:
    """Refuse a grammar that would not be enforced to the letter, or would take long to compile.

    Args:
        kind: of ``interfaces.grammar.GRAMMAR_KINDS``.
        value: its text.

    Raises:
        GrammarError: the message names keyword and path.
    """
    normal_form(kind, value)


def normal_form(kind: str, value: str) -> Any:
    """What the backend compiles: a schema for ``json_object`` and ``json_schema``, a structural tag, or the text of a regular expression or EBNF.

    Raises:
        GrammarError: as in ``check``.
    """
    if len(value) > MAX_SCHEMA_CHARS:
        raise refuse("$", f"a grammar of {len(value)} characters; {MAX_SCHEMA_CHARS} are allowed")
    try:
        return _form(kind, value)
    except RecursionError:
        raise refuse("$", "it is nested too deep, or refers to itself endlessly") from None


def _form(kind: str, value: str) -> Any:
    match kind:
        case "json_object":
            return normalise({"type": "object"})
        case "json_schema":
            return normalise(load(value, "$"))
        case "regex":
            return plain_regex(value, "$")
        case "ebnf":
            check_ebnf(value, "$")
            return value
        case "choice":
            return _choices(load(value, "$"))
        case "structural_tag":
            return normalise_tag(load(value, "$"))
    raise refuse("$", f"grammars of kind {kind!r} are not known")


def _choices(choices: Any) -> str:
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise refuse("$", "choices are a list of strings, none empty")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_CHOICE_CHARS:
        raise refuse("$", f"more than {MAX_CHOICES} choices or {MAX_CHOICE_CHARS} characters of them together")
    for index, choice in enumerate(choices):
        if any(0xD800 <= ord(char) < 0xE000 for char in choice):
            raise refuse(f"$[{index}]", "holds half of a surrogate pair, which is no text")
    return render(Alt(tuple(literal(choice) for choice in dict.fromkeys(choices))), "$", limited=False)
