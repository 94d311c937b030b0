"""Regular expressions: read, bounded, and written again in the part of the language that XGrammar applies as it should.

XGrammar 0.2.9 takes look-ahead for nothing, matches a pattern against the whole string, and generates quotes, backslashes and line ends in JSON strings
unescaped. So an expression is read here by ECMAScript's rules (those of JSON Schema), what cannot be kept is refused, and the rest is written from its tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.charsets import Ranges
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_REGEX_SIZE, refuse

__all__ = [
    "EMPTY",
    "NOTHING",
    "Alt",
    "Cat",
    "Chars",
    "Edge",
    "Node",
    "Repeat",
    "literal",
    "matches",
    "render",
    "restrict",
    "search",
    "size",
    "width",
]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set; none of an empty set, which then matches nothing."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat:
    """Parts one behind the other; no parts match the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``node`` from ``low`` to ``high`` times; ``None``: any number."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """``^`` or ``$``; gone after ``search``."""

    begin: bool


Node = Chars | Cat | Alt | Repeat | Edge

#: Matches the empty text, and nothing at all.
EMPTY = Cat(())
NOTHING = Chars(())


def literal(text: str) -> Node:
    """Exactly ``text``."""
    return Cat(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def size(node: Node) -> int:
    """Positions of the automaton, counted repeats written out."""
    match node:
        case Cat(parts) | Alt(parts):
            return 1 + sum(map(size, parts))
        case Repeat(inner, low, high):
            return 1 + size(inner) * max(high if high is not None else low + 1, 1)
    return 1


def width(node: Node) -> tuple[int, int | None]:
    """Fewest and most characters of a match; ``None``: no bound."""
    match node:
        case Chars():
            return 1, 1
        case Cat(parts):
            widths = [width(part) for part in parts]
            highs = [high for _, high in widths]
            return sum(low for low, _ in widths), None if None in highs else sum(
                high for high in highs if high is not None
            )
        case Alt(options):
            widths = [width(option) for option in options]
            highs = [high for _, high in widths]
            return min(low for low, _ in widths), None if None in highs else max(
                high for high in highs if high is not None
            )
        case Repeat(inner, low, high):
            inner_low, inner_high = width(inner)
            return (
                inner_low * low,
                0 if inner_high == 0 else None if inner_high is None or high is None else inner_high * high,
            )
    return 0, 0


def restrict(node: Node, allowed: Ranges) -> Node:
    """The matches that hold no character but ``allowed``; ``NOTHING`` where there are none."""
    match node:
        case Chars(ranges):
            return Chars(charsets.intersect(ranges, allowed))
        case Cat(parts):
            kept = tuple(restrict(part, allowed) for part in parts)
            return NOTHING if NOTHING in kept else Cat(kept)
        case Alt(options):
            kept = tuple(option for option in (restrict(option, allowed) for option in options) if option != NOTHING)
            return Alt(kept) if kept else NOTHING
        case Repeat(inner, low, high):
            inner = restrict(inner, allowed)
            return Repeat(inner, low, high) if inner != NOTHING else EMPTY if low == 0 else NOTHING
    return node


def search(node: Node, path: str, *, anywhere: bool = True) -> Node:
    """The whole texts in which ``node`` is found: anchors become what stands around them.

    Args:
        anywhere: something may stand before and behind where there is no anchor; else the match is the whole text.

    Raises:
        GrammarError: an anchor stands where it is neither the first nor the last part.
    """
    if isinstance(node, Alt):
        return Alt(tuple(search(option, path, anywhere=anywhere) for option in node.options))
    parts = list(node.parts) if isinstance(node, Cat) else [node]
    while len(parts) == 1 and isinstance(parts[0], Cat):
        parts = list(parts[0].parts)
    if len(parts) == 1 and isinstance(parts[0], Alt):
        return search(parts[0], path, anywhere=anywhere)
    anything = Repeat(Chars(charsets.ANY), 0, None)
    begins, ends = (bool(parts) and parts[at] == Edge(begin=at == 0) for at in (0, -1))
    inner = parts[begins : len(parts) - ends]
    if any(_has_edge(part) for part in inner):
        raise refuse(
            path,
            "^ and $ are understood at the beginning and the end of the expression and of its outermost alternatives",
        )
    before, behind = ([] if anchored or not anywhere else [anything] for anchored in (begins, ends))
    return Cat((*before, *inner, *behind))


def _has_edge(node: Node) -> bool:
    match node:
        case Edge():
            return True
        case Cat(parts) | Alt(parts):
            return any(map(_has_edge, parts))
        case Repeat(inner):
            return _has_edge(inner)
    return False


def matches(node: Node, text: str) -> bool:
    """Whether ``node``, without anchors, matches all of ``text``; in time bounded by the product of ``size`` and length."""
    return len(text) in _ends(node, text, {0})


def _ends(node: Node, text: str, starts: set[int]) -> set[int]:
    """Where matches that begin at one of ``starts`` can end."""
    match node:
        case Chars(ranges):
            return {
                at + 1 for at in starts if at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
            }
        case Cat(parts):
            for part in parts:
                starts = _ends(part, text, starts) if starts else starts
            return starts
        case Alt(options):
            return set[int]().union(*(_ends(option, text, starts) for option in options))
        case Repeat(inner, low, high):
            for _ in range(low):
                starts = _ends(inner, text, starts) if starts else starts
            reached, new, left = set(starts), starts, high
            while new and left != low:
                new = _ends(inner, text, new) - reached
                reached |= new
                left = None if left is None else left - 1
            return reached
    raise AssertionError("anchors are gone by now")


def render(node: Node, path: str, *, limited: bool = True) -> str:
    """``node``, without anchors, as an expression for XGrammar, which takes it for the whole text.

    Args:
        limited: refuse more than ``MAX_REGEX_SIZE`` positions.

    Raises:
        GrammarError: it matches nothing, or is larger than ``MAX_REGEX_SIZE``.
    """
    node = restrict(node, charsets.ANY)  # without the parts that match nothing, which cannot be written
    if node == NOTHING:
        raise refuse(path, "the expression matches no text that could be generated")
    if limited and (positions := size(node)) > MAX_REGEX_SIZE:
        raise refuse(
            path, f"the expression has {positions} positions with its repeats written out; {MAX_REGEX_SIZE} are allowed"
        )
    return _render(node)


def _render(node: Node) -> str:
    match node:
        case Chars(ranges):
            return charsets.render(ranges)
        case Cat(parts):
            return "".join(map(_render, parts)) or "()"
        case Alt(options):
            return f"({'|'.join(map(_render, options))})"
        case Repeat(inner, low, high):
            body = _render(inner)
            body = body if isinstance(inner, Chars | Alt) else f"({body})"
            if (low, high) in _SIGNS:
                return body + _SIGNS[low, high]
            return body + (f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}")
    raise AssertionError("anchors are gone by now")


_SIGNS: dict[tuple[int, int | None], str] = {(0, 1): "?", (0, None): "*", (1, None): "+"}
