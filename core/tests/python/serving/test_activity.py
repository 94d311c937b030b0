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


class Processes:
    """A folder that plays ``/proc``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, pid: int, state: str, ticks: int, children: str = "") -> None:
        task = self.root / str(pid) / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        (self.root / str(pid) / "stat").write_text(f"{pid} (x) {state} 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0")
        (task / "children").write_text(children)


def test_a_process_that_waits_for_a_processor_is_not_idle(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.put(7, "R", 10)
    activity = ProcessActivity([7], tmp_path)
    activity.progressed()
    assert activity.progressed()
    processes.put(7, "S", 10)
    assert not activity.progressed()


def test_one_stopped_process_stops_the_others(tmp_path: Path) -> None:
    """The others may still tick (watchdogs, spinning): they can only wait for it."""
    processes = Processes(tmp_path)
    processes.put(7, "T", 10)
    processes.put(8, "R", 10)
    activity = ProcessActivity([7, 8], tmp_path)
    activity.progressed()
    processes.put(8, "R", 20)
    assert not activity.progressed()


def test_the_work_of_a_child_counts(tmp_path: Path) -> None:
    """A compiler that the engine waits for."""
    processes = Processes(tmp_path)
    processes.put(7, "S", 10, children="9 ")
    processes.put(9, "S", 10)
    activity = ProcessActivity([7], tmp_path)
    activity.progressed()
    processes.put(9, "S", 20)
    assert activity.progressed()


def test_a_thread_that_waits_for_a_processor_counts(tmp_path: Path) -> None:
    """The main thread may sleep while the one that answers is starved; one stopped process is hung all the same."""
    processes = Processes(tmp_path)
    processes.put(7, "S", 10)
    thread = tmp_path / "7" / "task" / "71"
    thread.mkdir()
    line = "71 (x) {} 1 1 1 0 -1 0 0 0 0 0 5 0 0 0 20 0 1 0"
    (thread / "stat").write_text(line.format("S"))
    (thread / "schedstat").write_text("1000 5000 3")
    activity = ProcessActivity([7], tmp_path)
    activity.progressed()
    assert not activity.progressed()
    (thread / "schedstat").write_text("1000 50000 4")  # a wake-up
    assert not activity.progressed()
    (thread / "schedstat").write_text("1000 400050000 5")
    assert activity.progressed()
    assert not activity.progressed()
    (thread / "stat").write_text(line.format("R"))
    assert activity.progressed()
    processes.put(7, "T", 10)
    assert not activity.progressed()
