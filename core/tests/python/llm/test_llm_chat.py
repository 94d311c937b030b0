"""``tokenspeed.LLM`` and the server make the same prompt of a conversation, and refuse the same ones in the same words."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tokenspeed import LLM
from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parser import ToolParser
from tokenspeed.messages import GenerateRequest
from tokenspeed.plugins.selection import load_target
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.testing.server import Running, running

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}|{{ message.tool_call_id }}|{{ message.content + '' }}"
    "{% for call in message.tool_calls %}<{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}>{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: A model of its own whose calls have ids of the family's, as some families want them.
PLUGIN = """
@hookimpl
def tokenspeed_models():
    return [ModelSpec(name="stamped", target="tokenspeed.builtin.toy:ToyForCausalLM", architectures=("ToyForCausalLM",), tool_parser="stamp")]

@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="stamp", target="stamp_parser:StampParser")]
"""
PARSER = """
from tokenspeed_plugin_parsers_hermes.parser import HermesToolParser

class StampParser(HermesToolParser):
    @classmethod
    def history_id(cls, call_id, name, index):
        return f"{name}:{index}"
"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def stamped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An LLM whose template shows everything that a conversation can hold, with the parser that stamps ids."""
    root = tmp_path_factory.mktemp("chat")
    (root / "all.jinja").write_text(TEMPLATE)
    with PluginFolder(root / "site") as folder:
        folder.add("stamped", PLUGIN, modules={"stamp_parser": PARSER})
        with LLM("toy", plugins="stamped", num_threads=1, chat_template=str(root / "all.jinja")) as made:
            yield made


def served(llm: LLM, seen: list[GenerateRequest]) -> Any:
    """A server with the LLM's tokenizer and the model's parser; ``seen`` gets what its engine is asked."""

    def script(request: GenerateRequest) -> Reply:
        seen.append(request)
        return Reply(tokens=[256])

    parser: type[ToolParser] = load_target("stamp_parser:StampParser")
    return running(script, tokenizer=llm.tokenizer, tool_parser=parser, max_model_len=llm.engine.info.max_model_len)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([USER], []),
        ([{"role": "developer", "content": "Be brief."}, USER], []),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], []),
        ([USER, {"role": "assistant", "content": None}, USER], []),
        ([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "7"}], TOOLS),
        (
            [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "abc", "content": "7"},
            ],
            [],
        ),
    ],
)
async def test_the_server_makes_the_same_prompt(stamped: LLM, messages: list[Any], tools: list[Any]) -> None:
    seen: list[GenerateRequest] = []
    async with served(stamped, seen) as server:
        answer = await server.http.post("/v1/chat/completions", json={"messages": messages, "tools": tools})
        assert answer.status_code == 200, answer.text
        counted = await server.http.post("/tokenize", json={"messages": messages, "tools": tools})
    ids = stamped.render(messages, tools=tools)
    assert np.frombuffer(seen[0].tokens, dtype="<i4").tolist() == ids
    assert counted.json()["tokens"] == ids


def test_what_the_prompt_says(stamped: LLM) -> None:
    """Ids of past calls are the family's, arguments objects, missing content is empty, parts are joined."""
    tool = {
        "role": "tool",
        "tool_call_id": "abc",
        "content": [{"type": "text", "text": "7"}, {"type": "text", "text": "C"}],
    }
    ids = stamped.render([{"role": "developer", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]}, tool])
    assert (
        stamped.tokenizer.decode(ids)
        == "[system||x][assistant||<weather:0 weather Oslo>][tool|weather:0|7\nC][assistant]"
    )
    assert stamped.render((MappingProxyType(USER),)) == stamped.render([USER])  # type: ignore[arg-type]


async def refusal(server: Running, messages: object, tools: object) -> str:
    answer = await server.http.post("/v1/chat/completions", json={"messages": messages, "tools": tools})
    assert answer.status_code == 400
    text: str = answer.json()["error"]["message"]
    return text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([], [], "at least one message"),
        ("hi", [], "messages: Expected `array`"),
        ([[USER]], [], "messages[0]"),
        ([{"role": "bot", "content": "x"}], [], "messages[0].role: must be one of system, developer"),
        ([{"role": "user", "content": None}], [], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], [], "text only"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], [], "only the assistant calls tools"),
        ([{"content": "x"}], [], "messages[0].role"),
        ([USER], [{"type": "function"}], "tools[0].function"),
    ],
)
async def test_the_server_refuses_it_in_the_same_words(stamped: LLM, messages: Any, tools: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        stamped.chat(messages, tools=tools)
    assert says in str(caught.value)
    async with served(stamped, []) as server:
        assert await refusal(server, messages, tools) == str(caught.value)


def test_a_text_that_cannot_be_encoded_and_an_empty_prompt_are_refused(stamped: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="messages: the text cannot be encoded"):
        stamped.chat([{"role": "user", "content": "\ud800"}])
    (tmp_path / "nothing.jinja").write_text("{# nothing #}")
    with (
        LLM("toy", plugins="none", num_threads=1, chat_template=str(tmp_path / "nothing.jinja")) as made,
        pytest.raises(RequestError, match="renders to an empty prompt"),
    ):
        made.chat([USER])


def test_tools_that_the_template_does_not_read_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with LLM("toy", plugins="none", num_threads=1) as made, caplog.at_level(logging.WARNING, "tokenspeed"):
        made.render([USER])
        assert not caplog.records
        assert made.render([USER], tools=TOOLS) == made.render([USER], tools=TOOLS)
    assert [record.getMessage()[:39] for record in caplog.records] == ["the chat template does not read tools: "]


def test_without_a_tokenizer_chat_says_what_to_call() -> None:
    with (
        LLM("toy", plugins="none", num_threads=1, skip_tokenizer_init=True) as made,
        pytest.raises(RequestError, match=r"skip_tokenizer_init\): call generate with token ids"),
    ):
        made.chat([USER])
