"""The command line in this process, with plugins from a folder beside the installed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tokenspeed.cli.main import main
from tokenspeed.testing.plugins import PluginFolder


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PluginFolder]:
    with PluginFolder(tmp_path / "site") as folder:
        yield folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs ``tokenspeed ARGUMENTS``; argparse leaves by SystemExit, which counts as its exit code."""
    monkeypatch.delenv("TOKENSPEED_PLUGINS", raising=False)
    monkeypatch.delenv("TOKENSPEED_API_KEY", raising=False)

    def run(*arguments: str) -> Outcome:
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
