"""What a request's tokens are held to: its answer's form, its tools' calls, or both, as the ``Grammar`` that the engine applies.

The grammar backend's own checker runs here, before the engine is asked, so that what cannot be enforced is a 400 that names the field.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenspeed.errors import GrammarError, RequestError
from tokenspeed.interfaces.parser import ToolParser
from tokenspeed.interfaces.parsing import structural
from tokenspeed.interfaces.reasoning import ReasoningParser
from tokenspeed.messages import Grammar, SamplingParams
from tokenspeed.serving.protocol.sampling import SamplingFields
from tokenspeed.serving.protocol.structured import Answer, json_text
from tokenspeed.serving.protocol.tool_choice import ToolChoice

__all__ = [
    "CheckedBefore",
    "Constraint",
    "GrammarChecker",
    "HeldCalls",
    "NoBackend",
    "answer_grammar",
    "chat_grammar",
    "check_fields",
]

#: ``(kind, value) -> None``; raises ``GrammarError``. ``NoBackend`` or ``None`` in its place: there is no grammar backend.
GrammarChecker = Callable[[str, str], None]

_log = logging.getLogger(__name__)

_ANY_OBJECT = {"type": "object"}
#: Tools of one request whose calls are held to their parameters, and characters of these together.
_MAX_HELD = 256
_MAX_HELD_CHARS = 262_144
#: Seconds of processor time that the checks of one request may take together.
_CHECK_S = 2.0


class NoBackend(NamedTuple):
    """Stands for a checker where there is no grammar backend.

    Attributes:
        why: a clause that says why, and what to do about it.
    """

    why: str


class CheckedBefore:
    """A checker that lets pass at once what it let pass before: an agent sends the same tools with every turn.

    What a checker raises beside ``GrammarError`` refuses the grammar too, and is logged, each type once.

    Args:
        checker: asked for the rest, from any thread.
        size: how many grammars are remembered, by their digests.
    """

    def __init__(self, checker: GrammarChecker, size: int = 4096) -> None:
        self._checker = checker
        self._size = size
        self._passed: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._logged: set[type[Exception]] = set()
        self._lock = threading.Lock()

    def __call__(self, kind: str, value: str) -> None:
        key = kind, hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._passed:
                self._passed.move_to_end(key)
                return
        try:
            self._checker(kind, value)
        except RequestError:
            raise
        except Exception as error:
            self._log(kind, error)
            text = f"the grammar cannot be read: its check ended with {type(error).__name__}"
            raise GrammarError(text, code="unsupported_grammar") from error
        with self._lock:
            self._passed[key] = None
            if len(self._passed) > self._size:
                self._passed.popitem(last=False)

    def _log(self, kind: str, error: Exception) -> None:
        with self._lock:
            known = type(error) in self._logged
            self._logged.add(type(error))
        if not known:
            _log.error("A check of a grammar of kind %s broke; it is refused", kind, exc_info=error)


class _Bounded:
    """A checker that one request may ask for a while. ``GrammarError`` would let a tool pass as any object; this is the request's end."""

    def __init__(self, checker: GrammarChecker, param: str) -> None:
        self._checker, self._param = checker, param
        self._spent_s = 0.0

    def __call__(self, kind: str, value: str) -> None:
        if self._spent_s > _CHECK_S:
            raise RequestError(
                f"{self._param}: its grammars take longer than {_CHECK_S:g} s to check; give fewer tools, or smaller parameters",
                param=self._param,
                code="unsupported_grammar",
            )
        began = time.thread_time()
        try:
            self._checker(kind, value)
        finally:
            self._spent_s += time.thread_time() - began


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a chat may be held to.

    Attributes:
        answer: the form of the answer's content, or ``None``.
        choice: which tools may and must be called.
        tools: the request's tools, checked.
        parallel: whether there may be more than one call.
        parser: the tool parser's class.
    """

    answer: Answer | None
    choice: ToolChoice
    tools: Sequence[Mapping[str, Any]]
    parallel: bool
    parser: type[ToolParser] | None

    @property
    def strict(self) -> int | None:
        """Place of the first tool that is ``strict``."""
        marked = (at for at, tool in enumerate(self.tools) if tool["function"].get("strict"))
        return next(marked, None) if self.choice.active else None

    @property
    def holds_calls(self) -> bool:
        """Calls are constrained, not only looked for."""
        choice = self.choice
        return choice.active and (choice.required or choice.names is not None or self.strict is not None)

    @property
    def ends_text(self) -> bool:
        """The grammar says where the text ends; around calls that are free to come, any text goes on."""
        return self.answer is not None or (self.choice.active and self.choice.required)

    @property
    def param(self) -> str:
        """The field that asks for a grammar; empty where none does."""
        if self.answer is not None:
            return self.answer.param
        if self.choice.active and (self.choice.required or self.choice.names is not None):
            return "tool_choice"
        return "" if self.strict is None else f"tools[{self.strict}].function.strict"


def check_fields(
    fields: SamplingFields | SamplingParams, param: str, *, prefix: str = "", minimum: str = "min_tokens"
) -> None:
    """Raises ``RequestError`` for fields that cannot be kept beside the grammar that ``param`` asks for.

    Args:
        prefix: of the fields' names. minimum: the name of ``min_tokens``.
    """
    if fields.ignore_eos:
        raise RequestError(
            f"{prefix}ignore_eos: the text ends where {param} is complete; there is nothing to go on with",
            param=f"{prefix}ignore_eos",
        )
    if fields.min_tokens:
        raise RequestError(
            f"{prefix}{minimum}: {param} says where the text ends; put a least length into it instead",
            param=f"{prefix}{minimum}",
        )


def answer_grammar(answer: Answer, checker: GrammarChecker | NoBackend | None) -> Grammar:
    """The grammar of a text without a conversation.

    Raises:
        RequestError: there is no backend, or it would not enforce this.
    """
    _check(_needed(checker, answer.param), answer.kind, answer.value, answer.param)
    return Grammar(answer.kind, answer.value)


class HeldCalls(NamedTuple):
    """Calls that a grammar holds the model to.

    Attributes:
        format: of the structural tag.
        functions: those whose arguments are held to their declared parameters; of others they are any object.
    """

    format: structural.Format
    functions: frozenset[str]


def chat_grammar(
    wanted: Constraint,
    checker: GrammarChecker | NoBackend | None,
    reasoning: ReasoningParser | None,
    token_ids: Mapping[str, int],
) -> tuple[Grammar | None, HeldCalls | None]:
    """The grammar of a chat's reply, ``None``: any text; and how it holds calls, ``None``: not at all.

    Where the prompt leaves the model inside its reasoning, the grammar begins behind the end marker. Elsewhere the model may reason first if its format
    lets it begin by itself.

    Args:
        wanted: what the request asks for.
        checker: of the grammar backend.
        reasoning: the parser of the reply, before its first text; ``None`` where there is none.
        token_ids: ids of its markers where each is one token; else empty.

    Raises:
        RequestError: there is no backend; it would not enforce this; the tool parser cannot be constrained; or the request asks for two things that
            exclude each other.
    """
    if not wanted.param:
        return None, None
    check = _Bounded(_needed(checker, wanted.param), wanted.param)
    answer, choice = wanted.answer, wanted.choice
    if answer is not None:
        if choice.active and choice.required:
            raise RequestError(
                f"{answer.param}: tool_choice makes every answer a call, so that none can have this form; give one of the two",
                param=answer.param,
            )
        _check(check, answer.kind, answer.value, answer.param)
    calls = _calls(wanted, check) if choice.active and (wanted.holds_calls or answer is not None) else None
    return _behind_reasoning(wanted, calls, check, reasoning, token_ids), calls


def _behind_reasoning(
    wanted: Constraint,
    calls: HeldCalls | None,
    check: GrammarChecker,
    reasoning: ReasoningParser | None,
    token_ids: Mapping[str, int],
) -> Grammar:
    """The grammar of calls, or of an answer, or of either, where the reply's reasoning leaves it to begin."""
    answer, param = wanted.answer, wanted.param
    end: tuple[int, ...] = ()
    if reasoning is not None and reasoning.inside and reasoning.end_marker in token_ids:
        end = (token_ids[reasoning.end_marker],)
        reasoning = None
    form = None if answer is None else answer.format
    if calls is None:
        assert answer is not None
        assert form is not None
        framed = form if reasoning is None else reasoning.answer_format(form, token_ids)
        return Grammar(answer.kind, answer.value, end) if framed is form else _tagged(framed, check, param)
    if wanted.parser is not None and wanted.parser.reads_reasoning:  # its calls come with the reasoning before them
        form = form if form is None or reasoning is None else reasoning.answer_format(form, token_ids)
        return _tagged(calls.format if form is None else structural.one_of(calls.format, form), check, param, end)
    either = calls.format if form is None else structural.one_of(calls.format, form)
    return _tagged(either if reasoning is None else reasoning.answer_format(either, token_ids), check, param, end)


def _needed(checker: GrammarChecker | NoBackend | None, param: str) -> GrammarChecker:
    if checker is None or isinstance(checker, NoBackend):
        why = "see --grammar-backend" if checker is None else checker.why
        raise RequestError(
            f"{param}: needs a grammar backend, and there is none here: {why}",
            param=param,
            code="unsupported_parameter",
        )
    return checker


def _check(checker: GrammarChecker, kind: str, value: str, param: str) -> None:
    try:
        checker(kind, value)
    except GrammarError as error:
        raise GrammarError(f"{param}: {error}", param=param, code=error.code or "unsupported_grammar") from error


def _tagged(format: structural.Format, check: GrammarChecker, param: str, end: tuple[int, ...] = ()) -> Grammar:
    value = json_text(structural.structural_tag(format), param)
    _check(check, "structural_tag", value, param)
    return Grammar("structural_tag", value, end)


def _calls(wanted: Constraint, check: GrammarChecker) -> HeldCalls:
    """The calls. They are all of the reply where it must be calls, or else has a form of its own."""
    choice, parser = wanted.choice, wanted.parser
    assert parser is not None
    alone = choice.required or wanted.answer is not None
    _check_size(wanted)
    tools = [_held(wanted, parser, at, check) for at in range(len(wanted.tools))]
    tag = parser.structural_tag(tools, names=choice.names, required=alone, parallel=wanted.parallel)
    if tag is None:
        instead = "without strict tools" if wanted.answer is None else "none"
        raise RequestError(
            f"{wanted.param}: calls of this model's format ({parser.__name__}) cannot be constrained; take tool_choice "
            f"{'auto ' if wanted.answer is None else ''}{instead}, or start the server with another --tool-call-parser",
            param=wanted.param,
            code="unsupported_parameter",
        )
    as_declared = (tool for tool, held in zip(wanted.tools, tools, strict=True) if tool is held)
    return HeldCalls(tag["format"], frozenset(tool["function"]["name"] for tool in as_declared))


def _is_held(wanted: Constraint, function: Mapping[str, Any]) -> bool:
    """Whether calls of this tool may be made and are held to its parameters."""
    choice = wanted.choice
    if choice.names is not None and function["name"] not in choice.names:
        return False
    return bool(function.get("strict")) or choice.required


def _check_size(wanted: Constraint) -> None:
    """Raises ``RequestError`` where the tools are so many or so large that checking them one by one would take long."""
    held = [tool["function"] for tool in wanted.tools if _is_held(wanted, tool["function"])]
    if len(held) > _MAX_HELD:
        raise RequestError(
            f"{wanted.param}: {len(held)} tools whose calls are held to their parameters; {_MAX_HELD} are allowed",
            param=wanted.param,
            code="unsupported_grammar",
        )
    size = sum(len(json_text(function.get("parameters"), "tools")) for function in held)
    if size > _MAX_HELD_CHARS:
        raise RequestError(
            f"{wanted.param}: parameters of {size} characters in all that calls are held to; {_MAX_HELD_CHARS} are allowed",
            param=wanted.param,
            code="unsupported_grammar",
        )


def _held(wanted: Constraint, parser: type[ToolParser], at: int, check: GrammarChecker) -> Mapping[str, Any]:
    """One tool with the parameters that its calls are held to.

    ``strict`` is a promise: all of the schema, or a refusal. Without it a call that must be made is held to the schema where all of it can be enforced, and
    any other only to being an object.
    """
    tool, choice = wanted.tools[at], wanted.choice
    function: Mapping[str, Any] = tool["function"]
    if choice.names is not None and function["name"] not in choice.names:
        return tool
    if not function.get("strict") and not choice.required:
        return _with(tool, _ANY_OBJECT)
    param = f"tools[{at}].function.parameters"
    parameters = function.get("parameters")
    try:
        if parameters is not None:
            _check(check, "json_schema", json_text(parameters, param), param)
        alone = parser.structural_tag(wanted.tools, names=(function["name"],), required=True, parallel=False)
        if alone is not None:
            _check(check, "structural_tag", json_text(alone, param), param)
    except GrammarError as error:
        if function.get("strict") or error.param != param:
            raise
        return _with(tool, _ANY_OBJECT)
    return tool


def _with(tool: Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**tool, "function": {**tool["function"], "parameters": parameters}}
