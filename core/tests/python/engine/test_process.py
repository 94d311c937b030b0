"""Engine processes: they serve over their sockets, say why they fail, and never outlive those they belong to."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.engine.assembly import Assembly, assemble
from tokenspeed.engine.launch import EngineHandle, launch
from tokenspeed.engine.start import EngineStart, read_failure, read_start, write_failure, write_start
from tokenspeed.messages import (
    ControlReply,
    ControlRequest,
    EngineFailed,
    EngineReady,
    GenerateRequest,
    SamplingParams,
    decode_from_engine,
    encode,
)
from tokenspeed.weights.describe import describe_model

WAIT_S = 120


def toy(size: int = 1, **settings: Any) -> Assembly:
    parallel = ParallelConfig(tensor_parallel_size=size, world_size=size)
    config = EngineConfig(
        model="toy", plugins="none", num_threads=1, max_total_tokens=4096, parallel=parallel, **settings
    )
    return assemble(config, describe_model("toy"))


class Server:
    """The server's end of the sockets."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.context = zmq.Context()
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.push.connect(handle.to_engine)
        self.pull.connect(handle.from_engine)

    def send(self, message: Any) -> None:
        self.push.send(message if isinstance(message, bytes) else encode(message))

    def receive(self) -> Any:
        assert self.pull.poll(WAIT_S * 1000), self.handle.poll()
        return decode_from_engine(self.pull.recv())

    def generate(self, rid: int, prompt: list[int], **params: Any) -> list[int]:
        tokens = np.array(prompt, dtype="<i4").tobytes()
        self.send(GenerateRequest(rid, tokens, SamplingParams(max_new_tokens=6, ignore_eos=True, **params), 0.0))
        answer: list[int] = []
        while True:
            for item in self.receive().items:
                assert item.rid == rid
                answer += item.tokens
                if item.finish:
                    assert item.finish == "length", item.error
                    return answer


@contextmanager
def serving(assembly: Assembly) -> Iterator[Server]:
    with launch(assembly) as handle:
        server = Server(handle)
        try:
            yield server
        finally:
            server.context.destroy(0)


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return true


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_engine_serves_ignores_garbage_and_ends_in_good_order():
    with serving(toy()) as server:
        ready = server.receive()
        assert isinstance(ready, EngineReady)
        assert ready.info.kv_pages == 4096 // ready.info.page_size
        assert stat.S_IMODE(server.handle.directory.stat().st_mode) == 0o700
        # ops-10: random bytes, something pickled, the wrong message
        for frame in (
            b"",
            b"\xff" * 1000,
            b"\x80\x04\x95\x0e\x00.",
            encode(EngineFailed("internal", "not for an engine")),
        ):
            server.send(frame)
        first = server.generate(1, [5, 6, 7], temperature=0.0)
        assert len(first) == 6
        assert server.generate(2, [5, 6, 7], temperature=0.0) == first
        assert not server.handle.poll()
        pid = server.handle.pids[0]
        assert until(lambda: idle_for(pid, 0.5)), "an idle engine sleeps"
        server.send(ControlRequest(7, "shutdown"))
        while not isinstance(reply := server.receive(), ControlReply):
            pass
        assert reply.id == 7
        assert server.handle.wait(WAIT_S)
        assert [process.returncode for process in server.handle.processes] == [0]
    assert not server.handle.directory.exists()


def idle_for(pid: int, seconds: float) -> bool:
    """Whether a process takes next to no processor time for so long; what a request left to do may come first."""
    before = cpu_ticks(pid)
    time.sleep(seconds)
    return cpu_ticks(pid) - before <= 2


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_two_ranks_give_the_tokens_of_one_and_end_together():
    prompts = [[1, 2, 3], list(range(40)), [200]]
    with serving(toy()) as server:
        server.receive()
        alone = [server.generate(i, prompt, temperature=1.5, seed=i) for i, prompt in enumerate(prompts)]
    with serving(toy(2)) as server:
        assert isinstance(server.receive(), EngineReady)
        assert [server.generate(i, prompt, temperature=1.5, seed=i) for i, prompt in enumerate(prompts)] == alone
        server.send(ControlRequest(1, "shutdown"))
        assert server.handle.wait(WAIT_S)
        assert [process.returncode for process in server.handle.processes] == [0, 0]


def test_a_killed_rank_takes_the_others_along():
    with serving(toy(2)) as server:
        server.receive()
        os.kill(server.handle.pids[1], signal.SIGKILL)
        assert until(lambda: all(process.poll() is not None for process in server.handle.processes))
        failure = server.handle.poll()
        assert failure is not None
        assert failure.kind == "internal"
        assert "rank 1" in failure.error
        assert "signal 9" in failure.error


def test_engines_end_when_their_launcher_is_killed():
    code = "import sys, time; sys.path[:0] = [sys.argv[1]]; import test_process as t; "
    code += "handle = t.launch(t.toy(2)); print(*handle.pids, handle.directory, flush=True); time.sleep(600)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    *pids, directory = launcher.stdout.readline().split()
    time.sleep(0.5)  # somewhere in their start
    launcher.kill()
    launcher.communicate()
    assert until(lambda: all(gone(int(pid)) for pid in pids))
    assert until(lambda: not Path(directory).exists())


def test_a_start_that_fails_says_so_with_its_kind_and_ends_with_an_error_status():
    assembly = toy()
    wrong = msgspec.structs.replace(assembly.plan, core="0.0.0")
    with serving(with_plan(assembly, wrong)) as server:
        failed = server.receive()
        assert isinstance(failed, EngineFailed)
        assert failed.kind == "plugin"
        assert "0.0.0" in failed.error
        assert server.handle.wait(WAIT_S)
        assert server.handle.processes[0].returncode == 1
        assert server.handle.poll() == failed == server.handle.poll()


def with_plan(assembly: Assembly, plan: Any) -> Assembly:
    return replace(assembly, plan=plan)


def test_start_and_failure_cross_their_pipes_whole():
    read, write = os.pipe()
    start = EngineStart(
        config=EngineConfig(model="toy"), plan=b"{}", rank=1, world_size=2, directory="d", peers={5: 0}, report=9
    )
    with os.fdopen(write, "wb") as out, os.fdopen(read, "rb") as back:
        write_start(out, start)
        assert read_start(back) == start
        out.close()
        with pytest.raises(EOFError):
            read_start(back)
    read, write = os.pipe()
    write_failure(write, EngineFailed("model", "x" * 200_000))
    os.close(write)
    failure = read_failure(read)
    os.close(read)
    assert failure is not None
    assert failure.kind == "model"
    assert failure.error.startswith("xxx")
