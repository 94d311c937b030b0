"""What the text of an answer must be: ``response_format``, ``structured_outputs`` and the native fields, as one ``Answer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parsing import structural
from tokenspeed.serving.protocol.parse import Refused, parse_object

__all__ = [
    "Answer",
    "JsonSchemaFormat",
    "ResponseFormat",
    "StructuredOutputs",
    "answer_of",
    "json_text",
    "native_answer",
]

_MAX_CHOICES = 10_000


class Answer(NamedTuple):
    """A form that the answer must have.

    Attributes:
        kind, value: of the engine's ``Grammar``.
        param: the request's field that says so.
        schema: what the value is made of, as plain JSON or a list, where it is either.
    """

    kind: str
    value: str
    param: str
    schema: Any = None

    @property
    def format(self) -> structural.Format:
        """The same as a piece of a structural tag."""
        if self.kind == "json_object":
            return structural.schema({"type": "object"})
        if self.kind == "json_schema":
            return structural.schema(self.schema)
        if self.kind == "regex":
            return {"type": "regex", "pattern": self.value}
        if self.kind == "ebnf":
            return {"type": "grammar", "grammar": self.value}
        if self.kind == "choice":
            return structural.one_of(*map(structural.const, self.schema))
        found: structural.Format = self.schema["format"]
        return found


class JsonSchemaFormat(msgspec.Struct, kw_only=True, frozen=True):
    """``response_format.json_schema``. The schema is enforced or refused, with ``strict`` and without."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, frozen=True):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, frozen=True):
    """``structured_outputs``: exactly one of these.

    Attributes:
        json: a JSON schema, or its text. json_object: any JSON object.
        regex: of the whole text. choice: texts. grammar: EBNF, beginning at ``root``.
        structural_tag: or its text.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


_SPACE = "the grammar backend bounds the white space of JSON to one character between tokens"
_REFUSED: dict[str, Refused] = {
    "disable_any_whitespace": Refused(_SPACE, (False,)),
    "whitespace_pattern": Refused(_SPACE),
    "disable_additional_properties": Refused("write additionalProperties into the schema", (False,)),
    "disable_fallback": Refused("there is one grammar backend", (False, True)),
    "backend": Refused("the server's --grammar-backend says which"),
}
_REFUSED_FORMAT: dict[str, Refused] = {
    "structures": Refused("give format, the present form of structural tags"),
    "triggers": Refused("give format, the present form of structural tags"),
}


def answer_of(response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None) -> Answer | None:
    """The form that a request asks for; ``None``: any text.

    Raises:
        RequestError: naming the field; both are given, or not exactly one of ``structured_outputs``.
    """
    formatted = None if response_format is None else _response_format(response_format)
    found = None if structured is None else _structured_outputs(structured, "structured_outputs.")
    if formatted is not None and found is not None:
        raise RequestError(
            "response_format and structured_outputs both say what the answer must be; give one", param="response_format"
        )
    return formatted or found


def _response_format(value: Mapping[str, Any]) -> Answer | None:
    prefix = "response_format."
    given = parse_object(value, ResponseFormat, _REFUSED_FORMAT, prefix)
    for name, kind in (("json_schema", "json_schema"), ("format", "structural_tag")):
        present, wanted = getattr(given, name) is not None, given.type == kind
        if present != wanted:
            why = f"is missing; type {kind} needs it" if wanted else f"belongs to type {kind}; the type is {given.type}"
            raise RequestError(f"{prefix}{name}: {why}", param=f"{prefix}{name}")
    if given.type == "text":
        return None
    if given.type == "json_object":
        return Answer("json_object", "", f"{prefix}type")
    if given.type == "structural_tag":
        return _tag({"type": "structural_tag", "format": given.format}, f"{prefix}format")
    inner = parse_object(given.json_schema or {}, JsonSchemaFormat, {}, f"{prefix}json_schema.")
    if inner.schema is None:
        raise RequestError(
            f"{prefix}json_schema.schema: is missing; ask for type json_object where any object will do",
            param=f"{prefix}json_schema.schema",
        )
    return _schema(inner.schema, f"{prefix}json_schema.schema")


def _structured_outputs(value: Mapping[str, Any], prefix: str) -> Answer:
    given = parse_object(value, StructuredOutputs, _REFUSED, prefix)
    names = [name for name in StructuredOutputs.__struct_fields__ if getattr(given, name) is not None]
    if given.json_object is False:
        names.remove("json_object")
    if len(names) != 1:
        raise RequestError(
            f"structured_outputs: exactly one of {', '.join(StructuredOutputs.__struct_fields__)} is needed, got {', '.join(names) or 'none'}",
            param="structured_outputs",
        )
    return _one(names[0], getattr(given, names[0]), f"{prefix}{names[0]}")


def native_answer(fields: Mapping[str, Any], structured: Mapping[str, Any] | None, prefix: str) -> Answer | None:
    """The same for the native route, where ``json_schema``, ``regex``, ``ebnf`` and ``structural_tag`` stand among the sampling parameters.

    Raises:
        RequestError: naming the field, or two that exclude each other.
    """
    given = [name for name, value in fields.items() if value is not None]
    if structured is not None:
        given.append("structured_outputs")
    if len(given) > 1:
        raise RequestError(f"{prefix}{given[1]}: excludes {given[0]}; give one of them", param=f"{prefix}{given[1]}")
    if structured is not None:
        return _structured_outputs(structured, f"{prefix}structured_outputs.")
    if not given:
        return None
    names = {"json_schema": "json", "ebnf": "grammar"}
    return _one(names.get(given[0], given[0]), fields[given[0]], f"{prefix}{given[0]}")


def _one(name: str, value: Any, param: str) -> Answer:
    if name == "json":
        return _schema(value, param)
    if name == "json_object":
        return Answer("json_object", "", param)
    if name == "choice":
        return _choice(value, param)
    if name == "structural_tag":
        return _tag(_decoded(value, param), param)
    if not value:
        what = "an EBNF grammar" if name == "grammar" else "a regular expression"
        raise RequestError(f"{param}: the text is empty; give {what}, or leave it out", param=param)
    return Answer("ebnf" if name == "grammar" else "regex", value, param)


def _schema(value: dict[str, Any] | str | bool, param: str) -> Answer:
    schema = _decoded(value, param)
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{param}: a JSON schema is an object, or true or false", param=param)
    return Answer("json_schema", json_text(schema, param), param, schema)


def _choice(value: list[str], param: str) -> Answer:
    choices = list(dict.fromkeys(value))
    if not choices or not all(choices):
        raise RequestError(f"{param}: needs at least one text, and none may be empty", param=param)
    if len(choices) > _MAX_CHOICES:
        raise RequestError(f"{param}: at most {_MAX_CHOICES} texts, got {len(choices)}", param=param)
    return Answer("choice", json_text(choices, param), param, choices)


def _tag(value: Any, param: str) -> Answer:
    if (
        not isinstance(value, dict)
        or value.get("type") != "structural_tag"
        or not isinstance(value.get("format"), dict)
    ):
        raise RequestError(f'{param}: a structural tag is {{"type": "structural_tag", "format": {{..}}}}', param=param)
    return Answer("structural_tag", json_text(value, param), param, value)


def json_text(value: Any, param: str) -> str:
    """``value`` as JSON.

    Raises:
        RequestError: it is nested too deep to be written, though it could be read.
    """
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise RequestError(f"{param}: is nested too deep", param=param) from error


def _decoded(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise RequestError(f"{param}: the text is not valid JSON: {error}", param=param) from error
