"""``tokenspeed serve`` as a whole: the server process, its engine process, and the plugins in both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenspeed.testing.plugins import PluginFolder

CORE_SRC = str(Path(__file__).resolve().parents[3] / "src")
MAIN = "import sys; from tokenspeed.cli.main import main; sys.exit(main(sys.argv[1:]))"

WITNESS = """
import json, os

@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="witness", target="witness_parser:Parser")]

@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="file", type=str, default="", help="where to write"),
            OptionSpec(name="fail", type=str, default="", help="role that cannot begin")]

@hookimpl
def tokenspeed_configure(context):
    global file, fail
    file, fail = context.options["file"], context.options["fail"]
    note("configure", plan=sorted(context.plan["slots"]))

@hookimpl
def tokenspeed_process_init(context):
    if context.role == fail:
        raise RuntimeError("no licence here")
    note("process_init", role=context.role, rank=context.rank)

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
