"""``tokenspeed serve`` as a whole: the server process, its engine process, and the plugins in both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenspeed.cli import serve
from tokenspeed.config import ServingConfig
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.testing.ports import ReservedPorts

#: How long anything may take on a machine that is busy with other things.
PATIENCE_S = 60.0
CORE_SRC = str(Path(__file__).resolve().parents[3] / "src")
MAIN = "import sys; from tokenspeed.cli.main import main; sys.exit(main(sys.argv[1:]))"

WITNESS = """
import json, os, time

@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="witness", target="witness_parser:Parser")]

@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="file", type=str, default="", help="where to write"),
            OptionSpec(name="hang", type=str, default="", help="role that does not get on"),
            OptionSpec(name="fail", type=str, default="", help="role that cannot begin")]

@hookimpl
def tokenspeed_configure(context):
    global file, fail, hang
    file, fail, hang = context.options["file"], context.options["fail"], context.options["hang"]
    note("configure", plan=sorted(context.plan["slots"]))

@hookimpl
def tokenspeed_process_init(context):
    if context.role == fail:
        raise RuntimeError("no licence here")
    note("process_init", role=context.role, rank=context.rank)
    if context.role == hang:
        time.sleep(600)

@hookimpl
def tokenspeed_model_loaded(context):
    note("model_loaded")

@hookimpl
def tokenspeed_engine_ready(context):
    note("engine_ready", pages=context.kv_pages)

@hookimpl
def tokenspeed_shutdown(context):
    note("shutdown", role=context.role, reason=context.reason)

def note(event, **more):
    with open(file, "a") as out:
        out.write(json.dumps({"event": event, "pid": os.getpid(), **more}) + "\\n")
"""

PARSER = """
from tokenspeed.interfaces.parser import ToolParser

class Parser(ToolParser):
    pass
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    with PluginFolder(tmp_path / "site") as folder:
        folder.add("witness", WITNESS, modules={"witness_parser": PARSER})
        return folder.path


def start(site: Path, file: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, "serve", "toy", "--plugins", "witness", "--port", "0"]
    command += ["--num-threads", "1", "--tool-call-parser", "witness", "--set", f"witness.file={file}", *flags]
    path = os.pathsep.join([str(site), CORE_SRC])
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_plug_01_a_plugin_sees_the_life_of_the_server_process_and_of_the_engine_s(site: Path, tmp_path: Path) -> None:
    """plug-01: options, start, readiness and end reach it in both, through the command that users start."""
    file = tmp_path / "seen"
    process = start(site, file)
    try:
        assert process.stdout is not None
        serving = next(line for line in process.stdout if line.startswith("Serving "))
        base = serving.split()[3].removesuffix("/v1")
        assert httpx.get(f"{base}/health", timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    lines = told(file)
    server = [line for line in lines if line["pid"] == process.pid]
    engine = [line for line in lines if line["pid"] != process.pid]
    assert [line["event"] for line in server] == ["configure", "process_init", "engine_ready", "shutdown"]
    assert [line["event"] for line in engine] == [
        "configure",
        "process_init",
        "model_loaded",
        "engine_ready",
        "shutdown",
    ]
    assert [line["role"] for line in server if "role" in line] == ["server", "server"]
    assert {line["role"] for line in engine if "role" in line} == {"engine"}
    assert server[-1]["reason"] == "drained"
    assert all("tool_parser" in line["plan"] for line in lines if line["event"] == "configure")
    assert Counter(line["pages"] for line in lines if line["event"] == "engine_ready").most_common(1)[0][1] == 2


def until_health(port: int, status: int) -> None:
    """Ask the server until its health is ``status``."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status_code == status:
                return
        time.sleep(0.05)
    raise AssertionError(f"/health is not {status}")


def engine_of(file: Path) -> int:
    """The engine's process id, once its plugins have begun."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        lines = told(file) if file.exists() else []
        for line in lines:
            if line["event"] == "process_init" and line["role"] == "engine":
                return int(str(line["pid"]))
        time.sleep(0.05)
    raise AssertionError("no engine began")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_signal_while_the_engine_starts_ends_both(site: Path, tmp_path: Path) -> None:
    """The engine, which reads no messages yet, is not waited for, and says nothing on a terminal that is another's already."""
    file = tmp_path / "seen"
    with contextlib.closing(ReservedPorts()) as reserved:
        process = start(site, file, "--port", str(reserved.ports[0]), "--set", "witness.hang=engine")
        try:
            until_health(reserved.ports[0], 503)
            engine = engine_of(file)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert gone(engine)
    assert "server process is gone" not in errors
    assert Counter(line["event"] for line in told(file))["shutdown"] == 1  # the server's own


class Handle:
    """An engine's, of which is asked only how it ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.calls.append("close")

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self, timeout_s: float) -> bool:
        self.calls.append("wait")
        return timeout_s > 0

    def poll(self) -> None:
        return None


@pytest.mark.parametrize(
    ("code", "ready", "killed"),
    [(0, True, False), (0, False, True), (130, True, True), (130, False, True), (1, False, False)],
)
def test_an_engine_is_waited_for_only_where_it_was_asked_to_end(
    monkeypatch: pytest.MonkeyPatch, code: int, ready: bool, killed: bool
) -> None:
    """One that still starts reads no messages, and a forced end waits for nothing; a failed one ends by itself and has last words."""
    handle, announced = Handle(), []

    def serving(*arguments: Any) -> tuple[int, str]:
        if ready:
            arguments[-1]("info")
        return code, "why"

    monkeypatch.setattr("tokenspeed.engine.launch.launch", lambda *_, **__: handle)
    for name, stand_in in (("tokenizer_of", None), ("unread_tools", None), ("_serve", serving)):
        monkeypatch.setattr(serve, name, stand_in or (lambda *_: None))
    assert serve._launch_and_serve(None, ServingConfig(), None, announced.append) == (code, "why")  # type: ignore[arg-type]
    assert handle.calls == [*(["kill"] if killed else []), "wait", "close"]
    assert announced == (["info"] if ready else [])


def test_a_plugin_that_cannot_begin_in_the_server_ends_the_start_before_an_engine_is_launched(
    site: Path, tmp_path: Path
) -> None:
    process = start(site, tmp_path / "seen", "--set", "witness.fail=server")
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "no licence here" in errors
    assert "Traceback" not in errors
    assert {line["pid"] for line in told(tmp_path / "seen")} == {process.pid}


def test_what_the_engine_made_of_the_memory_is_printed_before_it_serves(site: Path, tmp_path: Path) -> None:
    process = start(site, tmp_path / "seen", "--max-total-tokens", "1000", "--kvstore-ratio", "2")
    printed = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(" ".join(line.split()))
            if line.startswith("Serving "):
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "kv pool 1000 tokens, 63 pages (--max-total-tokens)" in printed
    assert "host tier 2 times the KV pool, write-through" in printed
    pool, tier, sessions = printed[-4:-1]
    assert pool.startswith("kv pool 63 pages of 16 tokens: 1008 tokens, ")
    assert tier.startswith("host tier 126 pages, ")
    assert sessions == "sessions keep at most 31 pages between their turns (50 %)"


@pytest.mark.parametrize("flag", ["--tokenizer", "--chat-template"])
def test_a_missing_file_is_told_before_the_engine_is_launched(
    flag: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr("tokenspeed.engine.launch.launch", launch)
    outcome = run("serve", "toy", "--plugins", "none", "--port", "0", flag, "/nope")
    assert outcome.code == 2
    assert f"{flag} /nope" in outcome.err


def test_a_setting_that_the_engine_refuses_ends_the_server_with_2(site: Path, tmp_path: Path) -> None:
    process = start(site, tmp_path / "seen", "--kv-cache-memory-bytes", "1")
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "raise --kv-cache-memory-bytes" in errors
    assert "Traceback" not in errors
