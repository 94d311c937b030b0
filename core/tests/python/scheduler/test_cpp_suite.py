"""Builds and runs the C++ tests, so that one test command covers both languages.

They are built once into ``build/cpp-tests`` (nothing is compiled again where nothing changed). GoogleTest and a compiler are needed;
without them these tests fail and say what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3000)  # the first build takes minutes on a busy machine

ROOT = Path(__file__).parents[4]
CORE = ROOT / "core"


def tool(name: str) -> str:
    """The program of that name beside this Python, else on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed: pip install {name}")
    return found


def run(*command: str, timeout: int = 2800) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{result.stdout[-8000:]}\n{result.stderr[-4000:]}")
    return result.stdout


def build(name: str, *options: str) -> Path:
    directory = ROOT / "build" / name
    cmake, ninja = tool("cmake"), tool("ninja")
    run(
        cmake, "-S", str(CORE), "-B", str(directory), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DTOKENSPEED_TESTS=ON", "-DTOKENSPEED_BINDINGS=OFF", *options,
    )  # fmt: skip
    jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    run(cmake, "--build", str(directory), "--parallel", jobs)
    return directory


@pytest.fixture(scope="module")
def tests() -> Path:
    """The tests with sanitizers and assertions, at an optimisation level that compiles fast."""
    return build("cpp-tests", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1", "-DTOKENSPEED_SANITIZE=ON")


def test_unit_tests_pass_under_sanitizers(tests: Path) -> None:
    output = run(str(tests / "tests" / "cpp" / "scheduler_tests"))
    assert "[  PASSED  ]" in output


def test_random_operations_keep_the_invariants(tests: Path) -> None:
    output = run(str(tests / "tests" / "cpp" / "fuzz_scheduler"), "--ops", "30000")
    assert "integrity after each" in output


def test_random_operations_on_random_mixes_of_cache_groups_keep_the_invariants(tests: Path) -> None:
    output = run(str(tests / "tests" / "cpp" / "fuzz_scheduler"), "--ops", "30000", "--groups")
    assert "integrity after each" in output


def test_random_operations_on_mixes_with_host_pages_of_each_group_keep_the_invariants(tests: Path) -> None:
    output = run(str(tests / "tests" / "cpp" / "fuzz_scheduler"), "--ops", "30000", "--groups", "--tiers")
    assert "integrity after each" in output


def test_illegal_transitions_and_copies_do_not_compile(tests: Path) -> None:
    output = run(tool("ctest"), "--test-dir", str(tests), "-R", "compile", "--output-on-failure")
    assert "100% tests passed" in output
    assert "out of 6" in output


def test_the_table_of_states_in_the_docs_is_that_of_the_code(tests: Path) -> None:
    table = run(str(tests / "tests" / "cpp" / "print_states")).strip()
    page = (ROOT / "docs" / "scheduler-states.md").read_text()
    begin, end = "<!-- begin table -->\n", "\n<!-- end table -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == table


@pytest.mark.slow
def test_a_million_operations_reach_every_transition_and_refusal_a_thousand_times(tests: Path) -> None:
    fuzz = str(tests / "tests" / "cpp" / "fuzz_scheduler")
    run(fuzz, "--ops", "1000000", "--no-tiers", "--report", "--minimum", "1000")


@pytest.mark.slow
def test_a_million_operations_with_tiers_reach_their_passing_states_fifty_times(tests: Path) -> None:
    """States that last one copy are rare among random operations: some are met once in 10,000."""
    run(str(tests / "tests" / "cpp" / "fuzz_scheduler"), "--ops", "1000000", "--report", "--minimum", "200")


@pytest.mark.slow
def test_a_million_operations_on_mixes_of_cache_groups_reach_everything_two_hundred_times(tests: Path) -> None:
    run(str(tests / "tests" / "cpp" / "fuzz_scheduler"), "--ops", "1000000", "--groups", "--report", "--minimum", "200")


@pytest.mark.slow
def test_a_million_operations_on_mixes_with_host_pages_reach_the_passing_states_ten_times(tests: Path) -> None:
    run(
        str(tests / "tests" / "cpp" / "fuzz_scheduler"),
        "--ops",
        "1000000",
        "--groups",
        "--tiers",
        "--report",
        "--minimum",
        "10",
    )
