"""A renderer stands where a chat template would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from tokenspeed_plugin_parsers_base.parsers import PassthroughToolParser

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.renderer import Renderer, RendererContext
from tokenspeed.model_tokenizer import make_tokenizer, renderer_asked
from tokenspeed.serving.chat_template import ChatTemplate
from tokenspeed.testing.byte_tokenizer import ByteTokenizer
from tokenspeed.testing.server import running

pytestmark = pytest.mark.anyio


class Shout(Renderer):
    def __init__(self, ctx: RendererContext) -> None:
        self.ctx = ctx

    def render(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        return "!".join(message["content"] for message in messages)


def test_the_tokenizer_gives_the_renderer_for_every_conversation() -> None:
    tokenizer = make_tokenizer("toy", renderer=Shout)
    for tools in (False, True):
        renderer = tokenizer.template_for(tools)
        assert isinstance(renderer, Shout)
        assert renderer.render([{"content": "a"}, {"content": "b"}]) == "a!b"
    assert isinstance(renderer, Shout)
    assert {"bos_token", "eos_token"} <= set(renderer.ctx.special_tokens)


def test_a_template_that_was_given_stands_for_a_renderer_that_was_not() -> None:
    assert renderer_asked("auto", None) == "auto"
    assert renderer_asked("auto", "mine.jinja") is None
    assert renderer_asked(None, "mine.jinja") is None
    with pytest.raises(ConfigError, match="give one of them"):
        renderer_asked("gpt_oss", "mine.jinja")


class Fragile(Shout):
    """Walks through what it is given as if it were well-formed."""

    def render(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        for tool in given["tools"] or ():
            self.walk(tool["function"]["parameters"])
        return super().render(messages)

    def walk(self, schema: Mapping[str, Any]) -> None:
        self.walk_all(schema.get("anyOf", ()))
        self.walk_all(schema.get("properties", {}).values())

    def walk_all(self, schemas: Iterable[Mapping[str, Any]]) -> None:
        all(self.walk(schema) is None for schema in schemas)


_DEEP = '{"properties": {"a": ' * 380 + "{}" + "}}" * 380


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ('{"anyOf": [1]}', "tools"),
        (_DEEP, "tools"),
        ('{"properties": ["a"]}', "tools[0].function.parameters"),
    ],
    ids=["not a schema", "deep", "properties"],
)
async def test_what_a_renderer_breaks_at_is_the_requests_fault(parameters: str, param: str) -> None:
    tokenizer = make_tokenizer("toy", renderer=Fragile)
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": [{tool}]}}'
    async with running(tokenizer=tokenizer, tool_parser=PassthroughToolParser, max_model_len=50_000) as server:
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await server.http.post(path, content=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_reasoning_effort_reaches_a_template_that_reads_it() -> None:
    template = "{{ reasoning_effort or 'none' }}|{{ messages[0].content }}"
    messages = [{"role": "user", "content": "hi"}]
    async with running(tokenizer=ByteTokenizer(chat_template=template)) as server:
        for fields in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}}):
            answer = await server.http.post("/v1/chat/completions", json={"messages": messages, **fields})
            assert answer.status_code == 200
            assert bytes(server.engine.requests[-1].tokens[::4]) == b"high|hi"
        both = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
        answer = await server.http.post("/v1/chat/completions", json={"messages": messages, **both})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


def test_a_template_tells_whether_it_reads_tools() -> None:
    assert ChatTemplate("{% for tool in tools %}{{ tool.function.name }}{% endfor %}", {}).reads_tools
    assert not ChatTemplate("{{ messages[0].content }}", {}).reads_tools
    assert Shout(RendererContext()).reads_tools
