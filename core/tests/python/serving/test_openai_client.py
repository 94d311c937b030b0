"""The openai package as a client."""

from __future__ import annotations

import openai
import pytest
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

from tokenspeed.testing.server import MODEL, Running, running

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"k": "a"}}\n</tool_call>'


def client_of(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.sockets.port}/v1", api_key="none", max_retries=0)


async def test_chat_streams_tools_and_usage() -> None:
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "hi"}]
    async with running(CALL, tool_parser=HermesToolParser) as server, client_of(server) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        arguments, usage = "", None
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    arguments += call.function.arguments
    assert whole.choices[0].message.tool_calls[0].function.name == "lookup"
    assert arguments == '{"k": "a"}'
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_completions_and_logprobs() -> None:
    async with running("hello") as server, client_of(server) as client:
        text = await client.completions.create(model=MODEL, prompt="x", logprobs=1, echo=True)
        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1
        )
        models = [model.id async for model in client.models.list()]
    assert text.choices[0].text == "xhello"
    assert text.choices[0].logprobs.text_offset == list(range(7))
    assert chat.choices[0].logprobs.content[0].token == "h"
    assert models == [MODEL]


async def test_errors_arrive_as_the_client_s_exceptions() -> None:
    async with running("hello") as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=1e6
            )
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        await server.engine.fail("gone")
        with pytest.raises((openai.APIStatusError, openai.APIError)):
            await client.completions.create(model=MODEL, prompt="x")
