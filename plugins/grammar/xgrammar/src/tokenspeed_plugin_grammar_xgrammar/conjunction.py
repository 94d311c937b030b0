"""A schema as what it is: keywords that must all hold, and lists of alternatives of which one must."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tokenspeed_plugin_grammar_xgrammar.keywords import REFUSED, child, modern
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_DEPTH, MAX_NODES, refuse
from tokenspeed_plugin_grammar_xgrammar.values import Evaluator

__all__ = ["Atom", "Choice", "Conjunction", "Document", "Sub"]


@dataclass(frozen=True, slots=True)
class Sub:
    """A schema and where it stands."""

    schema: Any
    path: str


@dataclass(frozen=True, slots=True)
class Atom:
    """Keywords of one schema object beside ``$ref``, ``allOf``, ``anyOf`` and ``oneOf``; ``owner``: it is not inside another's ``allOf`` or alternative."""

    words: dict[str, Any]
    path: str
    owner: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives of an ``anyOf``, or of a ``oneOf`` whose alternatives must be shown to exclude each other."""

    options: tuple[Sub, ...]
    path: str
    exclusive: bool
    active: frozenset[str]  # references on the way here


@dataclass(slots=True)
class Conjunction:
    """All of ``atoms`` and one option of each of ``choices``; ``subs`` are the schemas that this came from."""

    subs: list[Sub] = field(default_factory=list)
    atoms: list[Atom] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def joined(self, other: Conjunction) -> Conjunction:
        """Both."""
        return Conjunction(self.subs + other.subs, self.atoms + other.atoms, self.choices + other.choices)


class Document:
    """One schema text: finds what a reference names, and takes schemas apart."""

    def __init__(self, root: Any, path: str) -> None:
        self.root, self.path = root, path
        self._visited = 0
        self._values = Evaluator(lambda uri: self.resolve(uri, path).schema)

    def resolve(self, uri: str, path: str) -> Sub:
        """What ``uri`` names.

        Raises:
            GrammarError: it names nothing in this schema.
        """
        if uri != "#" and not uri.startswith("#/"):
            raise refuse(
                path,
                f"{uri!r} cannot be followed; refer to a place in the same schema by its path, such as #/$defs/NAME",
            )
        found, where = self.root, self.path
        for raw in uri.split("/")[1:]:
            step = unquote(raw).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found, where = found[step], child(where, step)
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found, where = found[int(step)], child(where, int(step))
            else:
                raise refuse(path, f"{uri!r} names nothing in this schema")
        if not isinstance(found, bool | dict):
            raise refuse(path, f"{uri!r} names no schema")
        return Sub(found, where)

    def holds(self, value: Any, subs: Sequence[Sub]) -> bool:
        """Whether a constant satisfies all of ``subs``."""
        return all(self._values.holds(value, sub.schema, sub.path) for sub in subs)

    def lone_ref(self, subs: Sequence[Sub]) -> tuple[str, str] | None:
        """The reference and its path, where ``subs`` say nothing beside it."""
        words = [(words, sub.path) for sub in subs if sub.schema is not True and (words := self._words(sub)) != {}]
        if len(words) == 1 and words[0][0] is not None and words[0][0].keys() == {"$ref"}:
            return words[0][0]["$ref"], child(words[0][1], "$ref")
        return None

    def _words(self, sub: Sub) -> dict[str, Any] | None:
        return None if isinstance(sub.schema, bool) else modern(sub.schema, sub.path, root=sub.schema is self.root)

    def visit(self, path: str, depth: int) -> None:
        """Count one schema.

        Raises:
            GrammarError: the schema is too deep or has too many combinations.
        """
        self._visited += 1
        if depth > MAX_DEPTH:
            raise refuse(
                path,
                f"schemas nested more than {MAX_DEPTH} deep (a recursive $ref beside other keywords counts as endless)",
            )
        if self._visited > MAX_NODES:
            raise refuse(
                path,
                f"more than {MAX_NODES} schemas once references and alternatives are combined with what stands beside them",
            )

    def flatten(self, subs: Sequence[Sub], active: frozenset[str], *, owner: bool) -> Conjunction | None:
        """``subs`` taken apart, references followed.

        Args:
            active: references on the way here that no array or object lies between.

        Returns:
            The conjunction; ``None``: nothing is valid (``false``, or a reference that leads to itself).
        """
        out, seen = Conjunction(subs=list(subs)), set[int]()
        stack = [(sub, owner, active, 0) for sub in reversed(subs)]
        while stack:
            sub, owns, active, depth = stack.pop()
            self.visit(sub.path, depth)
            words = self._words(sub)
            if words is None:
                if sub.schema is False:
                    return None
                continue
            if id(sub.schema) in seen:
                continue
            seen.add(id(sub.schema))
            if (uri := words.pop("$ref", None)) is not None:
                if uri in active:
                    return None
                stack.append(
                    (self.resolve(uri, child(sub.path, "$ref")), owns and not words, active | {uri}, depth + 1)
                )
            for index, inner in reversed(list(enumerate(words.pop("allOf", ())))):
                stack.append((Sub(inner, child(sub.path, "allOf", index)), False, active, depth + 1))
            for key in ("anyOf", "oneOf"):
                if options := words.pop(key, None):
                    where = child(sub.path, key)
                    branches = tuple(Sub(option, child(where, i)) for i, option in enumerate(options))
                    out.choices.append(Choice(branches, where, key == "oneOf", active))
            if words:
                out.atoms.append(Atom(words, sub.path, owns))
        return out

    @staticmethod
    def refuse_unread(atoms: Sequence[Atom]) -> None:
        """Refuse keywords that are not enforced.

        Raises:
            GrammarError: ``atoms`` have one.
        """
        for atom in atoms:
            for key in atom.words.keys() & REFUSED.keys():
                raise refuse(child(atom.path, key), f"cannot be enforced; {REFUSED[key]}")
