"""The plugin host as users meet it: fast listing, helpful errors, broken plugins that stop nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .conftest import tokenspeed


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        tokenspeed(*arguments), capture_output=True, text=True, timeout=60, env=os.environ | (environment or {})
    )


def write_plugin(folder: Path, name: str, source: str) -> None:
    """A distribution with one plugin, importable from ``folder``."""
    module = name.replace("-", "_") + "_plugin"
    (folder / f"{module}.py").write_text(source)
    info = folder / f"dist_{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tokenspeed.plugins]\n{name} = {module}\n")


def test_listing_names_every_plugin_and_imports_no_torch() -> None:
    """The command line's own tests measure how long it takes."""
    done = run("plugins", "list")
    assert done.returncode == 0, done.stderr
    assert "models-llama" in done.stdout
    code = "import sys; from tokenspeed.cli.main import main; status = main(['plugins', 'list']); assert 'torch' not in sys.modules; sys.exit(status)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_an_unknown_plugin_is_refused_naming_the_nearest() -> None:
    done = run("serve", "toy", "--plugins", "models-lama")
    assert done.returncode == 2
    assert "models-llama" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_plugin_stops_nobody_and_is_listed_with_its_cause(tmp_path: Path, serve: Callable[..., Any]) -> None:
    write_plugin(tmp_path, "broken", "raise RuntimeError('the frobnicator is missing')\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    listing = run("plugins", "list", environment=environment)
    assert listing.returncode == 0
    assert "the frobnicator is missing" in listing.stdout
    server = serve("toy", environment=environment)
    assert server.post("/v1/completions", {"model": server.model, "prompt": "a", "max_tokens": 2}).status_code == 200
    assert "the frobnicator is missing" in server.get("/plugins", server.control).text


def test_naming_a_broken_plugin_is_fatal(tmp_path: Path) -> None:
    write_plugin(tmp_path, "broken", "raise RuntimeError('the frobnicator is missing')\n")
    done = run("serve", "toy", "--plugins", "+broken", environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0
    assert "the frobnicator is missing" in done.stderr


def test_core_alone_serves_the_toy_model(serve: Callable[..., Any]) -> None:
    server = serve("toy", "--plugins", "none")
    answer = server.post(
        "/v1/completions", {"model": server.model, "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
    ).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_upstreams_start_command_parses_and_says_what_is_missing() -> None:
    """No installed plugin serves that architecture, or the hub is out of reach: either is said in words, not in a traceback."""
    done = run(
        "serve",
        "openai/gpt-oss-20b",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--tensor-parallel-size",
        "1",
        environment={"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode != 0
    assert "gpt-oss-20b" in done.stderr
    assert "Traceback" not in done.stderr
    assert "unrecognized" not in done.stderr
