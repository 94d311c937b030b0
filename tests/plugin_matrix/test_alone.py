"""Each plugin works beside core alone: it imports, contributes through the manager, and its targets load with every other plugin out of reach."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "plugins").glob("**/pyproject.toml") if "build" not in path.parts)


def write_metadata(folder: Path, target: Path) -> str:
    """A ``.dist-info`` that says what the plugin's pyproject says; returns the plugin's name."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["tokenspeed.plugins"]
    version = project.get("version", "0")
    info = target / f"{project['name'].replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        "[tokenspeed.plugins]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
    )
    (name,) = points
    return str(name)


def test_there_are_plugins() -> None:
    assert len(FOLDERS) >= 3


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT / "plugins").as_posix())
def test_a_plugin_works_alone(folder: Path, tmp_path: Path) -> None:
    name = write_metadata(folder, tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("alone.py")), str(tmp_path), str(folder / "src"), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["status"] == "active", report["cause"]
    assert report["contributions"] > 0
    assert report["heavy"] == [], "registering imported something heavy"
    assert report["off"] == []
    assert report["loaded"] or report["left"]
