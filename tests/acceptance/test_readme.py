"""The README's and the examples' code does what it says, against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from .conftest import ROOT


def run(code: list[str], timeout_s: float = 240) -> str:
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_the_streaming_example_streams(smollm2: Any) -> None:
    (example,) = [block for block in blocks() if "OpenAI" in block]
    output = run(["-c", example.replace("http://127.0.0.1:8000", smollm2.url)])
    text, _, summary = output.strip().rpartition("\n")
    assert len(text) > 20
    assert re.fullmatch(r"\d+ tokens, \d+ of the prompt from the cache", summary)


@pytest.mark.parametrize("name", ["stream_chat.py", "agent_session.py"])
def test_examples_against_a_server(smollm2: Any, name: str) -> None:
    output = run([f"examples/{name}", f"{smollm2.url}/v1"])
    assert re.search(r"\d+ (of the prompt from the cache|of \d+ prompt tokens cached)", output)


def test_later_turns_of_a_session_hit_the_cache(smollm2: Any) -> None:
    output = run(["examples/agent_session.py", f"{smollm2.url}/v1"])
    cached = [int(number) for number in re.findall(r"(\d+) of \d+ prompt tokens cached", output)]
    assert len(cached) == 3
    assert cached[1] >= 100
    assert cached[2] > cached[1]


def test_the_offline_example_generates(tmp_path: Any) -> None:
    (example,) = [block for block in blocks() if "LLM(" in block]
    script = tmp_path / "offline.py"
    script.write_text(example)
    assert len(run([str(script)]).strip()) > 20
