"""A plugin that hangs while it is loaded is named, and cannot block a start for ever."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.plugins.watchdog import LoadLimits, Watchdog

CORE_SRC = str(Path(__file__).resolve().parents[3] / "src")

START = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from tokenspeed.plugins.watchdog import LoadLimits
from tokenspeed.testing.plugins import PluginFolder
from pathlib import Path
folder = PluginFolder(Path(sys.argv[1]))
folder.load(builtin="mini_builtin", limits=LoadLimits(warn_s=0.2, end_s=0.6))
print("started")
"""


@pytest.mark.parametrize("body", ["import time; time.sleep(600)", "while True: pass"], ids=["sleep", "loop"])
@pytest.mark.parametrize("where", ["import", "hook"])
def test_plug_07_a_plugin_that_hangs_is_named_and_the_start_ends(core: Any, body: str, where: str) -> None:
    source = body if where == "import" else f"@hookimpl\ndef tokenspeed_models():\n    {body}"
    core.folder.add("hanging", source)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(core.folder.path), CORE_SRC])}
    run = subprocess.run(
        [sys.executable, "-c", START, str(core.folder.path)], env=env, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 1
    assert re.search(r"plugin 'hanging' has been loading for \d+ s", run.stderr.splitlines()[0])
    assert "--plugins=-hanging" in run.stderr
    assert "started" not in run.stdout


class Clock:
    """Goes on only where a test says so: how busy the machine is makes no plugin slow."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_slow_plugin_is_named_once_and_goes_on(caplog: Any) -> None:
    ended: list[str] = []
    clock = Clock()
    limits = LoadLimits(warn_s=0.02, end_s=30, end=ended.append)
    with caplog.at_level(logging.WARNING), Watchdog(limits, clock=clock) as watchdog:
        with watchdog.watching("slow"):
            clock.now_s = 7.0
            end = time.monotonic() + 60
            while not caplog.records:
                assert time.monotonic() < end
                time.sleep(0.01)
            clock.now_s = 9.0
        with watchdog.watching("quick"):
            pass
    assert [record.getMessage() for record in caplog.records] == ["plugin 'slow' has been loading for 7 s"]
    assert ended == []


def test_nothing_is_said_while_nothing_is_loaded() -> None:
    ended: list[str] = []
    clock = Clock()
    with Watchdog(LoadLimits(warn_s=0.01, end_s=0.02, end=ended.append), clock=clock) as watchdog:
        with watchdog.watching("quick"):
            pass
        clock.now_s = 100.0
        time.sleep(0.1)
    assert ended == []
