"""Log probabilities: one entry per token, each with its own alternatives, in the shape of its route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenspeed.messages import GenerateRequest
from tokenspeed.serving.protocol.completions import LogprobsBuilder
from tokenspeed.testing.fake_engine import Reply
from tokenspeed.testing.server import events, running

pytestmark = pytest.mark.anyio

P, Q = b"pqr", b"uvw"


def three_at_once(_: GenerateRequest) -> Reply:
    return Reply(tokens=[*P, 256], chunk=3, alternatives=[[P[i], Q[i]] for i in range(3)])


@pytest.mark.parametrize("stream", [False, True])
async def test_api_09_each_token_of_a_step_has_its_own_alternatives_in_chat(stream: bool) -> None:
    """api-09: three tokens in one output."""
    async with running(three_at_once) as server:
        response = await server.chat(logprobs=True, top_logprobs=2, stream=stream)
    bodies = events(response.text) if stream else [response.json()]
    entries = [entry for body in bodies for entry in (body["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries[:3]] == ["p", "q", "r"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries[:3]] == [
        ["p", "u"],
        ["q", "v"],
        ["r", "w"],
    ]
    assert [entry["logprob"] for entry in entries[:3]] == [-0.5, -1.5, -2.5]


@pytest.mark.parametrize("stream", [False, True])
async def test_api_09_each_token_of_a_step_has_its_own_alternatives_in_completions(stream: bool) -> None:
    """api-09: the completions side, with offsets into the text."""
    async with running(three_at_once) as server:
        response = await server.complete(logprobs=2, stream=stream)
    bodies = events(response.text) if stream else [response.json()]
    text = "".join(body["choices"][0]["text"] for body in bodies)
    found = [body["choices"][0]["logprobs"] for body in bodies if body["choices"][0]["logprobs"]]
    tokens = [token for entry in found for token in entry["tokens"]]
    offsets = [offset for entry in found for offset in entry["text_offset"]]
    tops = [top for entry in found for top in entry["top_logprobs"]]
    assert text == "pqr"
    assert tokens[:3] == ["p", "q", "r"]
    assert offsets[:3] == [0, 1, 2]
    assert [list(top) for top in tops[:3]] == [["p", "u"], ["q", "v"], ["r", "w"]]


async def test_api_10_each_route_answers_in_its_own_shape() -> None:
    """api-10: chat lists content entries, with an empty list where no alternatives were asked for; completions list tokens and offsets."""
    async with running("hi") as server:
        for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
            content = (await server.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
            assert content[0] == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
        zero = (await server.complete(logprobs=0)).json()["choices"][0]["logprobs"]
        two = (await server.complete(logprobs=2)).json()["choices"][0]["logprobs"]
        alone = await server.chat(top_logprobs=2)
        plain = (await server.complete()).json()["choices"][0]
    assert set(zero) == set(two) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert zero["top_logprobs"][0] == {"h": -0.5}
    assert alone.status_code == 400
    assert alone.json()["error"]["param"] == "top_logprobs"
    assert plain["logprobs"] is None


async def test_api_10_bytes_rebuild_a_split_character() -> None:
    """api-10: tokens that are parts of a character carry their bytes."""
    async with running("😀") as server:
        content = (await server.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content[:4] for byte in entry["bytes"]).decode() == "😀"
    assert content[0]["token"] == "bytes:\\xf0"


@pytest.mark.parametrize(
    ("prompts", "chars"), [(12, 3), (1, 2000), (3, 700)], ids=["many prompts", "a long prompt", "some of both"]
)
async def test_others_get_their_turn_while_many_log_probabilities_are_written(
    prompts: int, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer may hold hundreds of thousands of them: no more than 256 are written between two turns of the loop."""
    written: list[int] = []  # by turn of the loop
    proper = LogprobsBuilder._add

    def counted(self: LogprobsBuilder, *arguments: Any) -> None:
        written[-1] += 1
        proper(self, *arguments)

    async def other() -> None:
        while True:
            written.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(LogprobsBuilder, "_add", counted)
    async with running(lambda _: Reply(tokens=[97] * 300, chunk=300), max_model_len=4096) as server:
        beside = asyncio.create_task(other())
        rows = ["x" * chars] * prompts
        response = await server.complete(rows, echo=True, logprobs=1, max_tokens=300)
        beside.cancel()
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(prompts))
    assert {len(choice["logprobs"]["tokens"]) for choice in choices} == {chars + 300}
    assert {choice["logprobs"]["text_offset"][-1] for choice in choices} == {chars + 299}
    assert sum(written) == prompts * (chars + 300)
    assert max(written) <= 256
