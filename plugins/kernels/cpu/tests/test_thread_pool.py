"""The thread pool by itself, through a small program: what a chunk throws reaches the caller, and the pool works on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "csrc"

PROGRAM = r"""
#include <atomic>
#include <cstdio>
#include <new>
#include <thread>

#include "thread_pool.h"

using tokenspeed::cpu::Scratch;
using tokenspeed::cpu::ThreadPool;

// Runs a job whose chunks throw on workers only or on the submitter only; true when the exception came back to the caller.
bool throws_back(ThreadPool& pool, bool on_worker) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> thrown{false};
  try {
    ThreadPool::Lease lease(pool);
    lease.run(64, [&](int64_t, Scratch&) -> int32_t {
      if ((std::this_thread::get_id() != caller) == on_worker) {
        thrown = true;
        throw std::bad_alloc();
      }
      while (!thrown) std::this_thread::yield();
      return 0;
    });
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

int main() {
  for (const int threads : {2, 4}) {
    ThreadPool pool(threads);
    for (int i = 0; i < 20; ++i) {
      for (const bool on_worker : {true, false}) {
        if (!throws_back(pool, on_worker)) return std::puts("an exception was lost"), 1;
        std::atomic<int> ran{0};
        ThreadPool::Lease lease(pool);
        const int32_t error = lease.run(64, [&](int64_t index, Scratch&) -> int32_t {
          ++ran;
          return index == 40 ? 7 : 0;
        });
        if (error != 7 || ran != 64) return std::puts("the pool does not work on"), 1;
      }
    }
  }
  return 0;
}
"""


def test_what_a_chunk_throws_reaches_the_caller_and_the_pool_works_on(tmp_path: Path) -> None:
    """E25: out of memory in a worker ended the process; in the submitter it left the job open for ever."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    (tmp_path / "main.cpp").write_text(PROGRAM)
    binary = tmp_path / "program"
    sources = [str(tmp_path / "main.cpp"), str(SOURCES / "thread_pool.cpp")]
    command = [compiler, "-std=c++20", "-O1", "-pthread", f"-I{SOURCES}", *sources, "-o", str(binary)]
    subprocess.run(command, check=True)
    ended = subprocess.run([str(binary)], timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
