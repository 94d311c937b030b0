"""An agent's turns: one system prompt with a tool, a growing history, and how much of each prompt came from the cache."""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8000/v1", help="of a running server")
    client = OpenAI(base_url=parser.parse_args().base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [
        {"role": "system", "content": "You answer in one sentence. Use the tool for words that you do not know. " * 8}
    ]
    for question in ("What is a page table?", "And a radix tree?", "How do the two meet in a KV cache?"):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=48, temperature=0
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"meaning": "unknown"})})
        usage = reply.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        print(
            f"{question} -> {message.content!r}\n  {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
        )


if __name__ == "__main__":
    main()
