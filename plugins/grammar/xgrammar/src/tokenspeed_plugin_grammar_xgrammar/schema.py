"""A JSON schema in the few forms that XGrammar enforces: equivalent to the one asked for, or narrower, never wider.

Narrower is: properties come in the order in which they are declared; where some are declared, others are generated only if ``additionalProperties`` says so;
a schema without ``type`` generates the types that its keywords speak of. ``docs/structured-outputs.md`` has the table, which the tests measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from tokenspeed.errors import GrammarError
from tokenspeed_plugin_grammar_xgrammar.conjunction import Atom, Choice, Conjunction, Document, Sub
from tokenspeed_plugin_grammar_xgrammar.containers import array_core, object_core
from tokenspeed_plugin_grammar_xgrammar.exclusion import ALL_KINDS, exclude_each_other, kinds_of
from tokenspeed_plugin_grammar_xgrammar.keywords import child
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_TOTAL_PROPERTIES, refuse
from tokenspeed_plugin_grammar_xgrammar.scalars import number_core, string_core
from tokenspeed_plugin_grammar_xgrammar.values import json_type, same_key

__all__ = ["Core", "Normaliser", "load", "normalise"]

#: A schema in the forms that are enforced.
Core = dict[str, Any]

_WORDS_OF = {
    "object": "properties required additionalProperties patternProperties propertyNames minProperties maxProperties dependentRequired dependentSchemas "
    "unevaluatedProperties",
    "array": "prefixItems items minItems maxItems uniqueItems contains minContains maxContains unevaluatedItems",
    "string": "minLength maxLength pattern format contentEncoding",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_SPEAKS_OF = {word: kinds_of(kind) for kind, words in _WORDS_OF.items() for word in words.split()}


def normalise(root: Any, path: str = "$") -> Core:
    """``root``, for a text that is nothing but JSON, in the forms that are enforced, self-contained.

    Raises:
        GrammarError: a keyword cannot be enforced, the schema is malformed or too large, or nothing finite is valid against it.
    """
    return Normaliser(root, path).whole()


class Normaliser:
    """Works on one schema text; recursion becomes named definitions.

    Args:
        root: the schema.
        path: where it stands.
        spelled: lengths of strings are written as patterns (see ``string_core``).
    """

    def __init__(self, root: Any, path: str, *, spelled: bool = False) -> None:
        if not isinstance(root, bool | dict):
            raise refuse(path, "a schema is an object, true or false")
        self.document = Document(root, path)
        self.path, self.spelled = path, spelled
        self.properties = 0
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Core | None] = {}
        self._places: dict[str, str] = {}

    def whole(self) -> Core:
        """The schema and the definitions that it reaches."""
        core = self.core([Sub(self.document.root, self.path)], frozenset(), 0)
        if core is None:
            raise refuse(self.path, "no value is valid against this schema")
        self._check_finite(core)
        return {**core, "$defs": self.definitions} if self.definitions else core

    def core(self, subs: Sequence[Sub], active: frozenset[str], depth: int) -> Core | None:
        """All of ``subs`` together; ``None``: no value is valid.

        Args:
            active: references on the way here that no array or object lies between.
            depth: levels of nesting so far.
        """
        path = subs[0].path if subs else self.path
        self.document.visit(path, depth)
        if (lone := self.document.lone_ref(subs)) is not None:
            return self._named(*lone, active, depth)
        conjunction = self.document.flatten(subs, active, owner=len(subs) == 1)
        return None if conjunction is None else self._conjunction(conjunction, path, depth)

    def inner(self, subs: Sequence[Sub], depth: int) -> Core | None:
        """What stands inside an array or object."""
        return self.core(subs, frozenset(), depth + 1)

    def _named(self, uri: str, path: str, active: frozenset[str], depth: int) -> Core | None:
        if uri in active:
            return None
        name = self._names.setdefault(uri, f"d{len(self._names)}")
        self._places.setdefault(name, path)
        if name not in self.definitions:
            self.definitions[name] = None  # in work
            found = self.core([self.document.resolve(uri, path)], active | {uri}, depth + 1)
            if found is None:
                raise refuse(path, "no finite value is valid against what this refers to")
            self.definitions[name] = found
        return {"$ref": f"#/$defs/{name}"}

    def _conjunction(self, conjunction: Conjunction, path: str, depth: int) -> Core | None:
        finite = next((atom for atom in conjunction.atoms if atom.words.keys() & {"const", "enum"}), None)
        if finite is not None:
            return self._constants(finite, conjunction)
        if conjunction.choices:
            return self._alternatives(conjunction, path, depth)
        Document.refuse_unread(conjunction.atoms)
        return self._typed(conjunction.atoms, path, depth)

    def _constants(self, finite: Atom, conjunction: Conjunction) -> Core | None:
        key = "const" if "const" in finite.words else "enum"
        found = [finite.words[key]] if key == "const" else finite.words[key]
        kept: dict[Any, Any] = {}
        for value in found:
            _check_constant(value, child(finite.path, key))
            if self.document.holds(value, conjunction.subs):
                kept.setdefault(same_key(value), value)
        return {"enum": list(kept.values())} if kept else None

    def _alternatives(self, conjunction: Conjunction, path: str, depth: int) -> Core | None:
        choice, *rest = conjunction.choices
        if choice.exclusive:
            self._check_exclusive(choice, conjunction)
        alone = not conjunction.atoms and not rest
        beside = Conjunction(conjunction.subs, conjunction.atoms, rest)
        cores: dict[str, Core] = {}
        for option in choice.options:
            if alone:
                core = self.core([option], choice.active, depth + 1)
            else:
                self.document.visit(option.path, depth)
                found = self.document.flatten([option], choice.active, owner=False)
                core = None if found is None else self._conjunction(beside.joined(found), path, depth + 1)
            for part in [] if core is None else core["anyOf"] if core.keys() == {"anyOf"} else [core]:
                cores.setdefault(json.dumps(part, sort_keys=True), part)
        return _any_of(list(cores.values()))

    def _check_exclusive(self, choice: Choice, conjunction: Conjunction) -> None:
        options = []
        for option in choice.options:
            if (found := self.document.flatten([option], choice.active, owner=False)) is not None:
                options.append(found)
        if (pair := exclude_each_other(self.document, conjunction, options)) is not None:
            raise refuse(
                choice.path,
                f"cannot be enforced: alternatives {pair[0]} and {pair[1]} may both be valid for one value; use anyOf, "
                "or give each a required property with a const of its own",
            )

    def _typed(self, atoms: Sequence[Atom], path: str, depth: int) -> Core | None:
        kinds, spoken = ALL_KINDS, frozenset[str]()
        for atom in atoms:
            if "type" in atom.words:
                kinds &= kinds_of(atom.words["type"])
            for word in atom.words:
                spoken |= _SPEAKS_OF.get(word, frozenset())
        if kinds == ALL_KINDS:
            if not spoken:
                return {}
            kinds = spoken
        cores: list[Core | None] = [{"type": kind} for kind in ("null", "boolean") if kind in kinds]
        if kinds & {"integer", "fraction"}:
            cores.append(number_core(atoms, whole="fraction" not in kinds))
        if "string" in kinds:
            cores.append(string_core(atoms, spelled=self.spelled))
        if "array" in kinds:
            cores.append(array_core(self, atoms, path, depth))
        if "object" in kinds:
            cores.append(object_core(self, atoms, path, depth))
        return _any_of([core for core in cores if core is not None])

    def count_properties(self, number: int, path: str) -> None:
        """Count declared properties of the whole grammar.

        Raises:
            GrammarError: there are too many.
        """
        self.properties += number
        if self.properties > MAX_TOTAL_PROPERTIES:
            raise refuse(path, f"more than {MAX_TOTAL_PROPERTIES} properties in all objects together")

    def _check_finite(self, core: Core) -> None:
        """Refuse definitions of which every value would hold another one of them, without end."""
        finite: set[str] = set()
        while True:
            more = {
                name
                for name, found in self.definitions.items()
                if name not in finite and found is not None and _ends(found, finite)
            }
            if not more:
                break
            finite |= more
        for name in self.definitions.keys() - finite:
            raise refuse(self._places[name], "every value of this holds another one of it, so that none is finite")
        if not _ends(core, finite):
            raise refuse(self.path, "no finite value is valid against this schema")


def _any_of(cores: list[Core]) -> Core | None:
    if not cores:
        return None
    if {} in cores:
        return {}
    return cores[0] if len(cores) == 1 else {"anyOf": cores}


def _ends(core: Core, finite: set[str]) -> bool:
    """Whether ``core`` has a value of bounded depth, given that the definitions in ``finite`` have."""
    if "$ref" in core:
        return core["$ref"].removeprefix("#/$defs/") in finite
    if "anyOf" in core:
        return any(_ends(option, finite) for option in core["anyOf"])
    if core.get("type") == "object":
        needed = [core["properties"][name] for name in core.get("required", ())]
        if len(needed) < core.get("minProperties", 0):
            optional = [
                inner for name, inner in core.get("properties", {}).items() if name not in core.get("required", ())
            ]
            if isinstance(core.get("additionalProperties"), dict):
                optional.append(core["additionalProperties"])
            needed.append({"anyOf": optional})
        return all(_ends(inner, finite) for inner in needed)
    if core.get("type") == "array":
        least = core.get("minItems", 0)
        prefix = core.get("prefixItems", [])[:least]
        return all(_ends(inner, finite) for inner in prefix) and (least <= len(prefix) or _ends(core["items"], finite))
    return True


def _check_constant(value: Any, path: str) -> None:
    """Refuse numbers that XGrammar would write as others."""
    if json_type(value) == "integer" and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise refuse(path, f"{value} is beyond 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise refuse(path, "a number is beyond what a double holds")
    for inner in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        _check_constant(inner, path)


def load(text: str, path: str) -> Any:
    """The JSON in ``text``.

    Raises:
        GrammarError: it is no JSON, or too deep.
    """

    def no_number(name: str) -> None:
        raise refuse(path, f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=no_number)
    except RecursionError:
        raise refuse(path, "nested too deep") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise refuse(path, f"is no JSON: {error}") from None
