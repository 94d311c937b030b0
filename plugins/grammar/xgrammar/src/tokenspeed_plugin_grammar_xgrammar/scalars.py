"""Numbers and strings in the forms that XGrammar enforces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.conjunction import Atom
from tokenspeed_plugin_grammar_xgrammar.formats import ENCODINGS, FORMATS, format_pattern
from tokenspeed_plugin_grammar_xgrammar.keywords import child
from tokenspeed_plugin_grammar_xgrammar.limits import refuse
from tokenspeed_plugin_grammar_xgrammar.regex import NOTHING, Cat, Chars, Node, Repeat, render, restrict, search, width
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse

__all__ = ["number_core", "string_core", "string_tree"]

_MAX_MULTIPLE = 1024  # XGrammar ignores larger ones
_MAX_FREE_MULTIPLE = 100  # without bounds; the work grows with the square: 1024 take 13 s
_MAX_MULTIPLE_RANGE = 10_000  # beside bounds that are farther apart it is ignored
_MAX_BOUND = 10**15
_MAX_DIGITS = 12


def _exact(number: float) -> Fraction:
    return Fraction(str(number))


def number_core(atoms: Sequence[Atom], *, whole: bool) -> dict[str, Any] | None:
    """Numbers; ``whole``: integers only."""
    low: tuple[Fraction, bool] | None = None  # (bound, excluded)
    high: tuple[Fraction, bool] | None = None
    step: Fraction | None = None
    at = ""
    for atom in atoms:
        for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if key not in atom.words:
                continue
            _check_bound(atom.words[key], child(atom.path, key))
            bound = _exact(atom.words[key]), key.startswith("exclusive")
            if key in ("minimum", "exclusiveMinimum"):
                low = bound if low is None else max(low, bound)
            elif high is None or (bound[0], not bound[1]) < (high[0], not high[1]):
                high = bound
        if "multipleOf" in atom.words:
            at = child(atom.path, "multipleOf")
            found = _exact(atom.words["multipleOf"])
            step = (
                found
                if step is None
                else Fraction(math.lcm(step.numerator, found.numerator), math.gcd(step.denominator, found.denominator))
            )
    if step is not None and not whole and step.denominator != 1:
        raise refuse(at, "of numbers with a fraction cannot be enforced; use type integer")
    if step is not None or whole:
        return _integers(low, high, step, at)
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    out: dict[str, Any] = {"type": "number"}
    for bounded, names in ((low, ("minimum", "exclusiveMinimum")), (high, ("maximum", "exclusiveMaximum"))):
        if bounded is not None:
            out[names[bounded[1]]] = int(bounded[0]) if bounded[0].denominator == 1 else float(bounded[0])
    return out


def _integers(
    low: tuple[Fraction, bool] | None, high: tuple[Fraction, bool] | None, step: Fraction | None, at: str
) -> dict[str, Any] | None:
    out: dict[str, Any] = {"type": "integer"}
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    multiple = 1 if step is None else step.numerator
    if multiple > 1:
        top = _MAX_FREE_MULTIPLE if least is None and most is None else _MAX_MULTIPLE
        if multiple > top:
            raise refuse(at, f"{multiple} is more than the {top} that can be enforced here")
        if (least is None) != (most is None) or (
            least is not None and most is not None and most - least >= _MAX_MULTIPLE_RANGE
        ):
            raise refuse(
                at,
                f"beside bounds this is enforced only where both are given and less than {_MAX_MULTIPLE_RANGE} apart",
            )
        out["multipleOf"] = multiple
        least = None if least is None else -(-least // multiple) * multiple
        most = None if most is None else most // multiple * multiple
    if least is not None and most is not None and least > most:
        return None
    out.update({key: value for key, value in (("minimum", least), ("maximum", most)) if value is not None})
    return out


def _check_bound(bound: float, path: str) -> None:
    if abs(bound) > _MAX_BOUND:
        raise refuse(path, f"{bound} is beyond the {_MAX_BOUND} that can be enforced")
    if _exact(bound).denominator != 1 and (_exact(bound) * 10**_MAX_DIGITS).denominator != 1:
        raise refuse(path, f"{bound} has more than the {_MAX_DIGITS} decimal places that can be enforced")


def string_core(atoms: Sequence[Atom], *, spelled: bool) -> dict[str, Any] | None:
    """Strings.

    Args:
        spelled: write lengths as a pattern. XGrammar lets control characters into strings of a bounded length unless the vocabulary keeps them out.
    """
    low, high = _lengths(atoms)
    if high is not None and low > high:
        return None
    if (found := string_tree(atoms, charsets.JSON_PLAIN)) is None:
        if spelled and (low or high is not None):
            where = next(
                child(atom.path, key) for atom in atoms for key in ("maxLength", "minLength") if key in atom.words
            )
            return {"type": "string", "pattern": render(Repeat(Chars(charsets.JSON_PLAIN), low, high), where)}
        return {
            "type": "string",
            **({"minLength": low} if low else {}),
            **({} if high is None else {"maxLength": high}),
        }
    tree, path = found
    return None if tree == NOTHING else {"type": "string", "pattern": render(tree, path)}


def _lengths(atoms: Sequence[Atom]) -> tuple[int, int | None]:
    highs = [int(atom.words["maxLength"]) for atom in atoms if "maxLength" in atom.words]
    return max((int(atom.words["minLength"]) for atom in atoms if "minLength" in atom.words), default=0), min(
        highs, default=None
    )


def string_tree(atoms: Sequence[Atom], allowed: charsets.Ranges) -> tuple[Node, str] | None:
    """The expression that strings of ``allowed`` characters must match as a whole, lengths included, and where it stands; ``None``: there is none.

    Raises:
        GrammarError: two patterns, or a pattern and lengths that it does not have by itself.
    """
    trees: list[tuple[Node, str]] = []
    for atom in atoms:
        for key in ("pattern", "format", "contentEncoding"):
            if key not in atom.words:
                continue
            path, text = child(atom.path, key), atom.words[key]
            if key != "pattern":
                known = FORMATS if key == "format" else ENCODINGS
                if text not in known:
                    raise refuse(path, f"{text!r} cannot be enforced; those that can: {', '.join(known)}")
                tree = format_pattern(text)
            else:
                tree = search(parse(text, path), path)
            if (tree := restrict(tree, allowed)) == NOTHING:
                raise refuse(
                    path,
                    "matches no string, or only ones with quotes, backslashes or control characters, which are not generated",
                )
            if all(tree != other for other, _ in trees):
                trees.append((tree, path))
    if not trees:
        return None
    if len(trees) > 1:
        raise refuse(trees[1][1], f"cannot be enforced together with {trees[0][1]}; write one pattern")
    tree, path = trees[0]
    low, high = _lengths(atoms)
    if low or high is not None:
        if (sized := _sized(tree, low, high)) is None:
            where = next(
                child(atom.path, key) for atom in atoms for key in ("minLength", "maxLength") if key in atom.words
            )
            raise refuse(
                where,
                f"cannot be enforced together with {path}; write the length into the pattern, as in ^[a-z]{{2,8}}$",
            )
        tree = sized
    return tree, path


def _sized(tree: Node, low: int, high: int | None) -> Node | None:
    """``tree`` with its matches bounded to ``low`` to ``high`` characters; ``None``: not known how."""
    least, most = width(tree)
    if least >= low and (high is None or (most is not None and most <= high)):
        return tree
    if (high is not None and least > high) or (most is not None and most < low):
        return NOTHING
    parts = list(tree.parts) if isinstance(tree, Cat) else [tree]
    if len(parts) == 1 and isinstance(parts[0], Cat):
        return _sized(parts[0], low, high)
    loose = [i for i, part in enumerate(parts) if width(part)[0] != width(part)[1]]
    if len(loose) != 1:
        return None
    part = parts[loose[0]]
    if not isinstance(part, Repeat) or width(part.node) != (1, 1):
        return None
    fixed = sum(width(other)[0] for i, other in enumerate(parts) if i != loose[0])
    tops = [top for top in (part.high, None if high is None else high - fixed) if top is not None]
    parts[loose[0]] = Repeat(part.node, max(part.low, low - fixed, 0), min(tops, default=None))
    return Cat(tuple(parts))
