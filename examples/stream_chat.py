"""Stream a chat completion from a running server: ``python examples/stream_chat.py [BASE_URL]``."""

from __future__ import annotations

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8000/v1", help="of a running server")
client = OpenAI(base_url=parser.parse_args().base_url, api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three rivers."}],
    max_tokens=64,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage and chunk.usage.prompt_tokens_details:
        print(
            f"\n{chunk.usage.completion_tokens} tokens, {chunk.usage.prompt_tokens_details.cached_tokens} of the prompt from the cache"
        )
