"""A renderer stands where a chat template would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

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
