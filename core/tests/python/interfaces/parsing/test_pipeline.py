"""Where reasoning and tool calls meet: one choice through both parsers."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tokenspeed.interfaces.parser import ParserContext
from tokenspeed.interfaces.parsing import ChoiceParser, ElementParser, ElementSyntax, TagReasoningParser, is_complete


class Think(TagReasoningParser):
    """``<think>`` .. ``</think>``."""


class Calls(ElementParser):
    """``<calls><call NAME><arg KEY>VALUE</arg></call></calls>``."""

    syntax = ElementSyntax(
        wrapper_begin=("<calls>",),
        wrapper_end=("</calls>",),
        call_begin="<call ",
        call_end="</call>",
        argument_begin="<arg ",
        argument_end="</arg>",
        call_header=re.compile(r"(?P<name>\w+)"),
        argument_header=re.compile(r"(?P<name>\w+)"),
        bare=True,
    )
    announcements = ("<calls>", "<call ")


TOOLS = (
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"k": {"type": "string"}}}},
    },
)
LOOK = "<calls><call look><arg k>a</arg></call></calls>"
OPEN = "<think>\n"


def read(
    pieces: list[str], prompt: str = OPEN, reasoning: Any = Think, tools: Any = Calls
) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, finished calls)."""
    parser = ChoiceParser(reasoning, tools, ParserContext(tools=TOOLS, prompt_tail=prompt))
    thought = content = ""
    calls: list[list[str]] = []
    for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        thought += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return thought, content, [(name, arguments) for name, arguments in calls if is_complete(arguments)]


CASES = [
    # (text, reasoning, content, calls)
    (f"hm</think>{LOOK}", "hm", "", 1),
    (f"let me look\n{LOOK}\n</think>", "let me look\n", "", 1),
    (f"let me look{LOOK} and {LOOK}", "let me look", "and", 2),
    (f"hm {LOOK[:-20]}", f"hm {LOOK[:-20]}", "", 0),
    ("hm <call look><arg k>v</think>So.", "hm <call look><arg k>v", "So.", 0),
    (f"hm {LOOK.replace('look', 'other')} so</think>So.", f"hm {LOOK.replace('look', 'other')} so", "So.", 0),
    ("about <calls> in prose</think>So.", "about <calls> in prose", "So.", 0),
    (f"hm</think>See {LOOK.replace('>a<', '>quotes </think> and <think><')}", "hm", "See ", 1),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
def test_reason_04_a_call_inside_reasoning(text: str, reasoning: str, content: str, calls: int) -> None:
    """reason-04: a complete call of a declared tool ends the reasoning and is returned; anything less stays reasoning. Arguments may quote tags."""
    whole = read([text])
    assert (whole[0], whole[1].strip(), len(whole[2])) == (reasoning, content.strip(), calls)
    assert read(list(text)) == whole
    rng = random.Random(len(text))
    for _ in range(200):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 8)))
        assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_the_quoted_tags_reach_the_arguments() -> None:
    _, _, calls = read([f"hm</think>{LOOK.replace('>a<', '>quotes </think> and <think><')}"])
    assert calls == [("look", '{"k": "quotes </think> and <think>"}')]


def test_either_parser_may_be_missing() -> None:
    """Without a reasoning parser its tags are text; without a tool parser so are calls."""
    text = f"hm</think>{LOOK}"
    assert read([text], reasoning=None) == ("", "hm</think>", [("look", '{"k": "a"}')])
    assert read([text], tools=None) == ("hm", LOOK, [])
    assert read([text], reasoning=None, tools=None) == ("", text, [])


def test_where_tokens_are_known_only_they_are_tags() -> None:
    """Spelled tags are text on both sides; a real one decides an attempt."""
    parser = ChoiceParser(Think, Calls, ParserContext(tools=TOOLS, prompt_tail=OPEN))
    first = parser.feed("it says </think> ", [])
    second = parser.feed("<call look><arg k>v</think>So </think> it is. " + LOOK, [(19, 27)])
    last = parser.finish()
    assert first.reasoning + second.reasoning == "it says </think> <call look><arg k>v"
    assert (first.content + second.content + last.content).strip() == "So </think> it is."
    assert [call.name for call in (*second.calls, *last.calls) if call.name] == ["look"]


def test_a_spelled_tag_in_an_attempt_that_the_end_decides_stays_text() -> None:
    """Also when the text ends in the middle of a call inside reasoning."""
    parser = ChoiceParser(Think, Calls, ParserContext(tools=TOOLS, prompt_tail=OPEN))
    first, last = parser.feed("hm <call look><arg k>a </think> b", []), parser.finish()
    assert (first.reasoning + last.reasoning, first.content + last.content) == ("hm <call look><arg k>a </think> b", "")


def test_reasoning_is_told_as_it_comes() -> None:
    """Only a possible call is held back, and only until it is decided."""
    parser = ChoiceParser(Think, Calls, ParserContext(tools=TOOLS, prompt_tail=OPEN))
    told = 0
    for at, char in enumerate("thinking about a < b and <cal or <call", 1):
        told += len(parser.feed(char).reasoning)
        assert at - told < len("</think>")
