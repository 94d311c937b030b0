"""Engine processes whose requests have grammars: several ranks mask alike, and the process that compiles ends with them, however they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from tokenspeed import LLM
from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.launch import launch
from tokenspeed.messages import EngineReady, GenerateRequest, Grammar, SamplingParams, decode_from_engine, encode
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.weights.describe import describe_model

WAIT_MS = 120_000
TINY = """
@hookimpl
def tokenspeed_grammar_backends():
    parts = 'tokenspeed.testing.tiny_grammar'
    return [GrammarBackendSpec(name='tiny', target=f'{parts}:TinyGrammarBackend', checker=f'{parts}:check')]
"""
GRAMMARS = [Grammar("regex", "[a-z]+!"), None, Grammar("choice", '["left", "right"]')]


def params(i: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=12, temperature=1.5, seed=i)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin, here and in processes that are started from here."""
    with PluginFolder(tmp_path / "site") as folder:
        folder.add("tiny", TINY)
        monkeypatch.setenv("PYTHONPATH", str(folder.path))
        yield


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_two_ranks_say_under_grammars_what_one_says_and_leave_no_process_behind(tiny: None) -> None:
    prompts = [[1, 2, 3], list(range(40)), [200]]
    with LLM("toy", plugins="tiny", num_threads=1) as llm:
        rids = [
            llm.engine.add_request(prompt, params(i), grammar=grammar)
            for i, (prompt, grammar) in enumerate(zip(prompts, GRAMMARS, strict=True))
        ]
        alone: dict[int, list[int]] = {rid: [] for rid in rids}
        while llm.engine.busy:
            for item in llm.engine.step():
                alone[item.rid] += item.tokens

    parallel = ParallelConfig(tensor_parallel_size=2, world_size=2)
    config = EngineConfig(model="toy", plugins="tiny", num_threads=1, max_total_tokens=4096, parallel=parallel)
    with launch(assemble(config, describe_model("toy"))) as handle, zmq.Context() as context:
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.connect(handle.to_engine)
        pull.connect(handle.from_engine)

        def receive() -> Any:
            assert pull.poll(WAIT_MS), handle.poll()
            return decode_from_engine(pull.recv())

        assert isinstance(receive(), EngineReady)
        deadline = time.monotonic() + 90  # it is started before there is a grammar
        while not psutil.Process(handle.pids[0]).children():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for i, (prompt, grammar) in enumerate(zip(prompts, GRAMMARS, strict=True)):
            tokens = np.array(prompt, dtype="<i4").tobytes()
            push.send(encode(GenerateRequest(i, tokens, params(i), 0.0, 0, b"", grammar)))
        told: dict[int, list[int]] = {i: [] for i in range(3)}
        finished = 0
        while finished < 3:
            for item in receive().items:
                assert item.finish in ("", "stop", "length"), item.error
                told[item.rid] += item.tokens
                finished += bool(item.finish)
        assert list(told.values()) == list(alone.values())

        # The process that compiles is rank 0's; it is in the midst of a grammar as its engine is struck down.
        (worker,) = psutil.Process(handle.pids[0]).children()
        assert not psutil.Process(handle.pids[1]).children()
        packed = np.array([1], dtype="<i4").tobytes()
        push.send(encode(GenerateRequest(9, packed, params(9), 0.0, 0, b"", Grammar("regex", r"\!spin"))))
        time.sleep(0.3)
        os.kill(handle.pids[0], signal.SIGKILL)
        push.close(0)
        pull.close(0)
        deadline = time.monotonic() + 90
        while not ended(worker):
            assert time.monotonic() < deadline
            time.sleep(0.1)
