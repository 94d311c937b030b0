"""Runs the interpreted cases in a process of their own: Triton reads ``TRITON_INTERPRET`` when it is first imported."""

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_equal_their_definitions_under_the_interpreter():
    cases = Path(__file__).parent / "interpreted"
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-o",
            "python_files=cases_*.py",
            str(cases),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
