"""What the answer's text must be: every spelling becomes the engine's grammar, and what cannot be kept is a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenspeed_plugin_parsers_gpt_oss.parsers import HarmonyReasoningParser, HarmonyToolParser
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.parser import ToolParser
from tokenspeed.interfaces.parsing import TagReasoningParser
from tokenspeed.messages import Grammar
from tokenspeed.serving.constraint import CheckedBefore, NoBackend
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import Running, running

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


def check(kind: str, value: str) -> None:
    """Refuses one keyword, as a backend does that cannot enforce it."""
    if "uniqueItems" in value:
        raise GrammarError("$.uniqueItems is not enforced")


class ThinkParser(TagReasoningParser):
    """``<think>`` .. ``</think>``."""


class ThinkTokenizer(ByteTokenizer):
    """Both tags are tokens; templates can open or close a block."""

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__(
            259, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>" + prompt_end
        )
        self.special_tokens = {256: "<256>"}
        for token, text in ((257, b"<think>"), (258, b"</think>")):
            self._pieces[token] = text

    def token_id(self, text: str) -> int | None:
        return {"<think>": 257, "</think>": 258}.get(text)


def refused(response: httpx.Response, param: str) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert isinstance(error["message"], str)
    return str(error["message"])


def sent(server: Running) -> Grammar:
    grammar = server.engine.requests[-1].grammar
    assert grammar is not None
    return grammar


FORMS: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        "json_schema",
        SCHEMA,
    ),
    ({"response_format": {"type": "structural_tag", "format": TAG["format"]}}, "structural_tag", TAG),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", ["yes", "no"]),
    ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "ebnf", 'root ::= "x"'),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", TAG),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False, "disable_fallback": True}}, "regex", "a"),
]


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_every_form_reaches_the_engine_as_a_grammar(route: str) -> None:
    """Chat and text completions alike, each choice of several; a text answer has none."""
    async with running(grammar_checker=check) as server:
        ask = getattr(server, route)
        for fields, kind, value in FORMS:
            response = await ask(**fields, n=2)
            assert response.status_code == 200, response.text
            grammar = sent(server)
            assert grammar == server.engine.requests[-2].grammar
            found = grammar.value if isinstance(value, str) else json.loads(grammar.value)
            assert (grammar.kind, found, grammar.reasoning_end) == (kind, value, ())
        assert (await ask(response_format={"type": "text"})).status_code == 200
        assert server.engine.requests[-1].grammar is None


@pytest.mark.parametrize("status", [0, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_the_engine_refuses_is_an_answer_that_names_the_requests_field(
    status: int, stream: bool
) -> None:
    """It takes too long, or the process that compiles died (503): before any header goes out."""
    reply = Reply(error="the grammar takes longer than 10 s to compile", param="grammar", status=status)
    async with running(lambda _: reply, grammar_checker=check) as server:
        for ask in (server.chat, server.complete):
            response = await ask(structured_outputs={"regex": "a+"}, stream=stream)
            assert response.status_code == (status or 400)
            error = response.json()["error"]
            assert (error["param"], "longer than 10 s" in error["message"]) == ("structured_outputs.regex", True)


async def test_the_native_route_has_its_own_names() -> None:
    """json_schema as text or object, regex, ebnf, structural_tag, and structured_outputs as on the other routes; two of them exclude each other."""
    cases = [
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "x"'}, "ebnf"),
        ({"structural_tag": TAG}, "structural_tag"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
    ]
    async with running(grammar_checker=check) as server:
        for params, kind in cases:
            response = await server.http.post("/generate", json={"text": "hi", "sampling_params": params})
            assert response.status_code == 200, response.text
            assert sent(server).kind == kind
        both = {"regex": "a", "structured_outputs": {"choice": ["a"]}}
        response = await server.http.post("/generate", json={"text": "hi", "sampling_params": both})
        refused(response, "sampling_params.structured_outputs")
        short = {"regex": "a", "min_new_tokens": 3}
        response = await server.http.post("/generate", json={"text": "hi", "sampling_params": short})
        refused(response, "sampling_params.min_new_tokens")
        response = await server.http.post("/generate", json={"text": "x", "sampling_params": {"min_tokens": 3}})
        assert "takes min_new_tokens" in refused(response, "sampling_params.min_tokens")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.structures"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "3"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
]


async def test_forms_that_make_no_sense_are_refused_by_name() -> None:
    """Among them the fields that preceded structured_outputs: each says what replaced it."""
    async with running(grammar_checker=check) as server:
        for fields, param in WRONG:
            refused(await server.chat(**fields, stream=True), param)
            if "structural_tag" not in fields:
                refused(await server.complete(**fields), param)
        assert "structured_outputs" in refused(await server.chat(guided_json={}), "guided_json")
        refused(await server.complete(echo=True, max_tokens=0, structured_outputs={"regex": "a"}), "max_tokens")
        assert server.engine.requests == []


async def test_gram_01_what_the_backend_would_not_enforce_is_refused_with_its_place() -> None:
    """gram-01: the checker's sentence and the field reach the client; nothing reaches the engine."""
    schema = {"type": "array", "uniqueItems": True}
    async with running(grammar_checker=check) as server:
        for ask in (server.chat, server.complete):
            message = refused(await ask(structured_outputs={"json": schema}), "structured_outputs.json")
            assert "$.uniqueItems" in message
        response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        refused(await server.chat(response_format=response_format), "response_format.json_schema.schema")
        assert server.engine.requests == []


async def test_without_a_backend_the_refusal_says_why_there_is_none() -> None:
    why = "--grammar-backend none switched it off; leave that flag out"
    async with running(tool_parser=HermesToolParser, grammar_checker=NoBackend(why)) as server:
        tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
        for fields, param in (
            ({"response_format": {"type": "json_object"}}, "response_format.type"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
            ({"tools": tools}, "tools[0].function.strict"),
            ({"tools": tools, "tool_choice": "required"}, "tool_choice"),
        ):
            assert refused(await server.chat(**fields), param).endswith(f"there is none here: {why}")
        assert (await server.chat(tools=tools, tool_choice="none")).status_code == 200


async def test_reason_06_the_grammar_begins_behind_the_reasoning() -> None:
    """reason-06: behind the end tag where the prompt opens the block; at once where it closes it; else a block may come first. The prompt says which."""
    ask = {"structured_outputs": {"json": SCHEMA}}
    seen = {}
    for end in ("<think>\n", "<think>\n\n</think>\n\n", ""):
        async with running(
            tokenizer=ThinkTokenizer(end), reasoning_parser=ThinkParser, grammar_checker=check
        ) as server:
            assert (await server.chat(**ask)).status_code == 200
            seen[end] = sent(server)
    opened, closed, free = seen.values()
    assert (opened.kind, opened.reasoning_end) == ("json_schema", (258,))
    assert (closed.kind, closed.reasoning_end) == ("json_schema", ())
    assert (free.kind, free.reasoning_end) == ("structural_tag", ())
    first, last = json.loads(free.value)["format"]["elements"]
    assert first["type"] == "optional"
    assert [
        part["token"] for part in (first["content"]["elements"][0]["begin"], first["content"]["elements"][0]["end"])
    ] == ["<think>", "</think>"]
    assert last == {"type": "json_schema", "json_schema": SCHEMA}


async def test_tags_that_are_no_tokens_are_followed_as_text() -> None:
    """Their spelling in tokens is not known, so that the grammar itself holds the open block."""
    template = "{{ messages[0].content }}<|assistant|><think>\n"
    async with running(
        tokenizer=ByteTokenizer(chat_template=template), reasoning_parser=ThinkParser, grammar_checker=check
    ) as server:
        assert (await server.chat(structured_outputs={"regex": "a+"})).status_code == 200
        grammar = sent(server)
    elements = json.loads(grammar.value)["format"]["elements"]
    assert grammar.reasoning_end == ()
    assert (elements[0]["begin"], elements[0]["end"]) == ("", "</think>")
    assert elements[-1] == {"type": "regex", "pattern": "a+"}


async def test_harmony_puts_the_answer_into_its_channel() -> None:
    template = "{{ messages[0].content }}<|start|>assistant"
    async with running(
        tokenizer=ByteTokenizer(chat_template=template),
        tool_parser=HarmonyToolParser,
        reasoning_parser=HarmonyReasoningParser,
        grammar_checker=check,
    ) as server:
        assert (await server.chat(structured_outputs={"choice": ["a", "b"]})).status_code == 200
        last = json.loads(sent(server).value)["format"]["elements"][-1]
    assert last["begin"] == "<|channel|>final<|message|>"
    assert [part["value"] for part in last["content"]["elements"]] == ["a", "b"]


@pytest.mark.parametrize("tool_parser", [HarmonyToolParser, None])
async def test_a_reply_that_does_not_begin_with_its_header_has_no_form(tool_parser: type[ToolParser] | None) -> None:
    """Behind a message that is continued, harmony's grammar would force a header into the text of that message."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    form = {"structured_outputs": {"choice": ["a", "b"]}}
    given = {"tool_parser": tool_parser, "reasoning_parser": HarmonyReasoningParser, "grammar_checker": check}
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    async with running(tokenizer=ByteTokenizer(chat_template=template), **given) as server:
        for field, value in (("continue_final_message", True), ("add_generation_prompt", False)):
            body = {"messages": talk, field: value}
            answer = await server.http.post("/v1/chat/completions", json={**body, **form})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    async with running(tokenizer=ByteTokenizer(chat_template=template), grammar_checker=check) as server:
        body = {"messages": talk, "continue_final_message": True, **form}
        assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_an_empty_expression_or_grammar_is_refused_in_words() -> None:
    async with running(grammar_checker=check) as server:
        for name, what in (("regex", "a regular expression"), ("grammar", "an EBNF grammar")):
            message = refused(await server.complete(structured_outputs={name: ""}), f"structured_outputs.{name}")
            assert message.endswith(f"the text is empty; give {what}, or leave it out")


async def test_what_passed_once_is_not_checked_again() -> None:
    """An agent sends the same tools with every turn; a refusal is found anew each time, and the oldest of too many is forgotten."""
    asked = []

    def slow(kind: str, value: str) -> None:
        asked.append(value)
        check(kind, value)

    checker = CheckedBefore(slow, size=2)
    for value in ("a", "a", "b", "a", "c", "a", "b"):
        checker("regex", value)
    assert asked == ["a", "b", "c", "b"]
    for _ in range(2):
        with pytest.raises(GrammarError):
            checker("json_schema", "uniqueItems")
    assert asked[-2:] == ["uniqueItems", "uniqueItems"]


async def test_a_check_that_breaks_refuses_the_grammar_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(kind: str, value: str) -> None:
        raise OverflowError(f"no such {kind} as {value}")

    async with running(grammar_checker=CheckedBefore(broken)) as server:
        for _ in range(2):
            answer = await server.http.post(
                "/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "a"}}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "structured_outputs.regex")
            assert "the grammar cannot be read: its check ended with OverflowError" in error["message"]
    (record,) = (record for record in caplog.records if "A check of a grammar" in record.message)
    assert record.exc_info is not None
