"""A process that works is told from one that stands still."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tokenspeed.serving.activity import ProcessActivity


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="CPU time of other processes is read from /proc")
def test_cpu_time_counts_as_progress() -> None:
    activity = ProcessActivity([os.getpid()])
    assert not activity.progressed()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert activity.progressed()


def test_names_with_blanks_and_processes_that_are_gone(tmp_path: Path) -> None:
    stat = tmp_path / "7" / "stat"
    stat.parent.mkdir()
    line = "7 (a ) b) S 1 1 1 0 -1 0 0 0 0 0 {} 5 0 0 20 0 1 0"
    stat.write_text(line.format(10))
    activity = ProcessActivity([7, 8], tmp_path)
    activity.progressed()
    assert not activity.progressed()
    stat.write_text(line.format(11))
    assert activity.progressed()
    stat.unlink()
    assert not activity.progressed()
