"""Arrays and objects in the forms that XGrammar enforces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.conjunction import Atom, Sub
from tokenspeed_plugin_grammar_xgrammar.keywords import child
from tokenspeed_plugin_grammar_xgrammar.limits import (
    MAX_COUNTED_OPTIONAL,
    MAX_EXCLUDED_NAMES_CHARS,
    MAX_PROPERTIES,
    refuse,
)
from tokenspeed_plugin_grammar_xgrammar.names import named_by, other_than
from tokenspeed_plugin_grammar_xgrammar.regex import (
    NOTHING,
    Alt,
    Chars,
    Node,
    Repeat,
    literal,
    render,
    restrict,
    search,
)
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse

if TYPE_CHECKING:
    from tokenspeed_plugin_grammar_xgrammar.schema import Core, Normaliser

__all__ = ["array_core", "object_core"]


def _most(atoms: Iterable[Atom], word: str) -> int | None:
    return min((int(atom.words[word]) for atom in atoms if word in atom.words), default=None)


def _least(atoms: Iterable[Atom], word: str) -> int:
    return max((int(atom.words[word]) for atom in atoms if word in atom.words), default=0)


def _check_unevaluated(atoms: Iterable[Atom], word: str) -> bool:
    """Whether ``word`` is false: the rest is closed then.

    Raises:
        GrammarError: it is a schema, or stands inside ``allOf`` or an alternative, where it speaks of less than what is generated.
    """
    closed = False
    for atom in atoms:
        if (wanted := atom.words.get(word, True)) is not True:
            if wanted is not False or not atom.owner:
                raise refuse(child(atom.path, word), "is enforced only as false, outside allOf, anyOf and oneOf")
            closed = True
    return closed


def array_core(work: Normaliser, atoms: Sequence[Atom], path: str, depth: int) -> Core | None:
    """Arrays."""
    least, most = _least(atoms, "minItems"), _most(atoms, "maxItems")
    prefixes = [(atom.words.get("prefixItems", []), atom) for atom in atoms]
    prefix: list[Core] = []
    rest: Core | None = None  # the items behind the prefix; none may follow
    for at in range(max(len(schemas) for schemas, _ in prefixes)):
        if most is not None and at >= most:
            break
        subs = [
            Sub(schemas[at], child(atom.path, "prefixItems", at)) for schemas, atom in prefixes if at < len(schemas)
        ]
        subs += [
            Sub(atom.words["items"], child(atom.path, "items"))
            for schemas, atom in prefixes
            if at >= len(schemas) and "items" in atom.words
        ]
        if (core := work.inner(subs, depth)) is None:
            break
        prefix.append(core)
    else:
        subs = [Sub(atom.words["items"], child(atom.path, "items")) for atom in atoms if "items" in atom.words]
        closed = _check_unevaluated(atoms, "unevaluatedItems") and not subs
        if not closed and (most is None or most > len(prefix)):
            rest = work.inner(subs or [Sub(True, path)], depth)
    if rest is None:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None and least > most:
        return None
    for atom in atoms:
        if atom.words.get("uniqueItems") and (most is None or most > 1):
            raise refuse(
                child(atom.path, "uniqueItems"),
                "cannot be enforced for more than one item; bound maxItems to 1, or check the items yourself",
            )
    out: Core = {"type": "array", "items": False if rest is None else rest}
    if prefix:
        out["prefixItems"] = prefix
    if least:
        out["minItems"] = least
    if most is not None and rest is not None:
        out["maxItems"] = most
    return out


def object_core(work: Normaliser, atoms: Sequence[Atom], path: str, depth: int) -> Core | None:
    """Objects."""
    required = dict.fromkeys(name for atom in atoms for name in atom.words.get("required", ()))
    names = dict.fromkeys([name for atom in atoms for name in atom.words.get("properties", {})] + list(required))
    if len(names) > MAX_PROPERTIES:
        raise refuse(path, f"{len(names)} properties of one object; {MAX_PROPERTIES} are allowed")
    properties: dict[str, Core] = {}
    for name in names:
        core = work.inner(subs, depth) if (subs := _subs_of(work, atoms, name)) is not None else None
        if core is not None:
            properties[name] = core
        elif name in required:
            return None
    work.count_properties(len(properties), path)
    out: Core = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    free = (
        None
        if _check_unevaluated(atoms, "unevaluatedProperties") and not _says_more(atoms)
        else _free_names(work, atoms, names)
    )
    if free is not None:
        pattern, subs = free
        core = work.inner(subs or [Sub(True, path)], depth)
        if core is not None and pattern is not None and pattern[0] != NOTHING:
            out["additionalProperties"] = core
            out["propertyNames"] = {"pattern": render(*pattern)}
        elif core is not None and pattern is None:
            out["additionalProperties"] = core
    _check_dependent(atoms, out)
    return _counted(out, atoms, path)


def _subs_of(work: Normaliser, atoms: Sequence[Atom], name: str) -> list[Sub] | None:
    """What the value of a property must be valid against; ``None``: it cannot be there."""
    subs: list[Sub] = []
    for atom in atoms:
        words, before = atom.words, len(subs)
        if "propertyNames" in words and not work.document.holds(
            name, [Sub(words["propertyNames"], child(atom.path, "propertyNames"))]
        ):
            return None
        if name in words.get("properties", {}):
            subs.append(Sub(words["properties"][name], child(atom.path, "properties", name)))
        for pattern, schema in words.get("patternProperties", {}).items():
            where = child(atom.path, "patternProperties", pattern)
            if named_by(name, pattern, where):
                subs.append(Sub(schema, where))
        if len(subs) == before and "additionalProperties" in words:
            subs.append(Sub(words["additionalProperties"], child(atom.path, "additionalProperties")))
    return subs or [Sub(True, atoms[0].path)]


def _says_more(atoms: Iterable[Atom]) -> bool:
    return any(
        atom.words.get("additionalProperties", False) is not False or "patternProperties" in atom.words
        for atom in atoms
    )


def _free_names(
    work: Normaliser, atoms: Sequence[Atom], names: Iterable[str]
) -> tuple[tuple[Node, str] | None, list[Sub]] | None:
    """Names beside those declared: the expression that they match (``None``: any) and the schemas of their values; ``None``: there are none."""
    declared = list(names)
    additional = [
        (atom.words["additionalProperties"], child(atom.path, "additionalProperties"))
        for atom in atoms
        if "additionalProperties" in atom.words
    ]
    patterns = {
        (pattern, child(atom.path, "patternProperties", pattern)): schema
        for atom in atoms
        for pattern, schema in atom.words.get("patternProperties", {}).items()
    }
    conditions = [
        Sub(atom.words["propertyNames"], child(atom.path, "propertyNames"))
        for atom in atoms
        if "propertyNames" in atom.words
    ]
    subs = [Sub(schema, where) for schema, where in additional]
    if patterns:
        if declared:
            return None
        if len(patterns) > 1 or conditions:
            where = list(patterns)[-1][1] if len(patterns) > 1 else conditions[0].path
            raise refuse(
                where,
                f"cannot be told apart from {next(iter(patterns))[1]}, which one name may match as well; use one pattern, or declare properties",
            )
        ((text, where), schema) = next(iter(patterns.items()))
        elsewhere = [
            sub
            for sub, atom in zip(subs, (a for a in atoms if "additionalProperties" in a.words), strict=True)
            if "patternProperties" not in atom.words
        ]
        tree = restrict(search(parse(text, where), where), charsets.JSON_PLAIN)
        return (tree, where), [Sub(schema, where), *elsewhere]
    speaks = any("properties" in atom.words or "required" in atom.words for atom in atoms)
    if any(schema is False for schema, _ in additional) or (speaks and not additional):
        return None
    if conditions:
        return None if declared else (_names_under(work, conditions), subs)
    if not declared:
        return None, subs
    if sum(map(len, declared)) > MAX_EXCLUDED_NAMES_CHARS:
        return None
    return (other_than(declared), additional[0][1]), subs


def _names_under(work: Normaliser, conditions: Sequence[Sub]) -> tuple[Node, str]:
    """The names that ``propertyNames`` allow, where nothing is declared beside them."""
    joined = Sub({"allOf": [sub.schema for sub in conditions], "type": "string"}, conditions[0].path)
    core = type(work)(joined.schema, joined.path).whole()
    where = joined.path
    if "enum" in core:
        return restrict(Alt(tuple(literal(name) for name in core["enum"])), charsets.JSON_PLAIN), where
    if "pattern" in core:
        return parse(core["pattern"], where), where
    if core.get("type") == "string":
        return Repeat(Chars(charsets.JSON_PLAIN), core.get("minLength", 0), core.get("maxLength")), where
    raise refuse(where, "is enforced for one pattern, format, enum, or lengths")


def _check_dependent(atoms: Iterable[Atom], core: Core) -> None:
    """``dependentRequired`` is fulfilled where its property is not generated, or what it asks for always is."""
    for atom in atoms:
        for name, wanted in atom.words.get("dependentRequired", {}).items():
            generated = name in core["properties"] or core["additionalProperties"] is not False
            if generated and not set(wanted) <= set(core["required"]):
                raise refuse(
                    child(atom.path, "dependentRequired", name),
                    "cannot be enforced for a property that may be there or not; require what it asks for, or write the cases as anyOf",
                )


def _counted(core: Core, atoms: Sequence[Atom], path: str) -> Core | None:
    """``core`` with ``minProperties`` and ``maxProperties``."""
    least, most = _least(atoms, "minProperties"), _most(atoms, "maxProperties")
    declared, required = len(core["properties"]), len(core["required"])
    free = core["additionalProperties"] is not False
    if (most is not None and most < max(least, required)) or (not free and least > declared):
        return None
    if least <= required:
        least = 0
    if most is not None and not free and most >= declared:
        most = None
    if free and least > required + 1:
        where = next(child(atom.path, "minProperties") for atom in atoms if "minProperties" in atom.words)
        raise refuse(
            where,
            f"cannot be enforced above {required + 1} here, since names that are not declared may repeat; declare the properties",
        )
    if (least or most is not None) and declared - required > MAX_COUNTED_OPTIONAL:
        word = "minProperties" if least else "maxProperties"
        raise refuse(
            child(path, word),
            f"beside {declared - required} optional properties takes too long; {MAX_COUNTED_OPTIONAL} are allowed",
        )
    if least:
        core["minProperties"] = least
    if most is not None:
        core["maxProperties"] = most
    return core
