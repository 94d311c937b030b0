"""Every process arrives at the plan by itself, or says what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import assemble
from tokenspeed.engine.bootstrap import bootstrap, verify_plan
from tokenspeed.errors import PluginError
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.weights.describe import describe_model

CORE_SRC = str(Path(__file__).resolve().parents[3] / "src")

DEMO = """
import json, os

@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="demo", target="demo_parser:Demo")]

@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="file", type=str, default="", help="where to write")]

@hookimpl
def tokenspeed_configure(context):
    global file
    file = context.options["file"]

@hookimpl
def tokenspeed_process_init(context):
    with open(file, "a") as out:
        out.write(json.dumps({"pid": os.getpid(), "role": context.role, "rank": context.rank}) + "\\n")
"""

CHILD = """
import sys, msgspec
from pathlib import Path
from tokenspeed.config import EngineConfig
from tokenspeed.engine.bootstrap import bootstrap
from tokenspeed.errors import TokenSpeedError
from tokenspeed.plugins.plan import PluginPlan
plan, config, role, rank = sys.argv[1:5]
try:
    assembly = bootstrap(PluginPlan.decode(plan), msgspec.json.decode(config, type=EngineConfig), role, int(rank), 2)
except TokenSpeedError as error:
    sys.exit(str(error))
print("torch" in sys.modules, assembly.tool_parser.name)
"""


def child(
    folder: PluginFolder | None, plan: bytes, config: EngineConfig, role: str, rank: int
) -> subprocess.CompletedProcess[str]:
    path = [str(folder.path), CORE_SRC] if folder else [CORE_SRC]
    arguments = [plan.decode(), msgspec.json.encode(config).decode(), role, str(rank)]
    return subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def demo(folder: PluginFolder) -> PluginFolder:
    folder.add("demo", DEMO, modules={"demo_parser": "class Demo: pass"})
    return folder


def start(folder: PluginFolder, tmp_path: Path, plugins: str = "demo") -> Any:
    config = EngineConfig(
        model="toy", device="cpu", plugins=plugins, plugin_options={"demo.file": str(tmp_path / "seen")}
    )
    return assemble(config, describe_model("toy"), tool_call_parser="demo", host=folder.load(plugins), announce=False)


def test_plug_01_a_plugin_is_active_in_every_process_and_reports_its_pid_and_role_from_each(
    demo: PluginFolder, tmp_path: Path
) -> None:
    """``cli/test_serve.py`` has the same through the command that starts server and engine."""
    assembly = start(demo, tmp_path)
    bootstrap(assembly.plan, assembly.config, "cli", host=demo.load("demo"))
    for role, rank in (("server", 0), ("engine", 0), ("engine", 1)):
        run = child(demo, assembly.plan.encode(), assembly.config, role, rank)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == [str(role == "engine"), "demo"], "only engines load torch"
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [(one["role"], one["rank"]) for one in seen] == [("cli", 0), ("server", 0), ("engine", 0), ("engine", 1)]
    assert len({one["pid"] for one in seen}) == 4


def test_plug_01_a_process_that_lacks_the_plugin_says_so_and_where(demo: PluginFolder, tmp_path: Path) -> None:
    assembly = start(demo, tmp_path)
    run = child(None, assembly.plan.encode(), assembly.config, "engine", 1)
    assert run.returncode == 1
    assert "no plugin named 'demo' is installed" in run.stderr
    assert "engine process of rank 1 on " in run.stderr


def test_another_version_of_a_contributing_plugin_is_a_difference(demo: PluginFolder, tmp_path: Path) -> None:
    assembly = start(demo, tmp_path)
    other = PluginFolder(tmp_path / "other")
    other.add("demo", DEMO, version="2.0", modules={"demo_parser": "class Demo: pass"})
    run = child(other, assembly.plan.encode(), assembly.config, "engine", 0)
    assert run.returncode == 1
    assert 'plugins.demo.version: here "2.0", there "1.0"' in run.stderr


def test_a_plugin_that_contributes_nothing_is_no_difference(demo: PluginFolder, tmp_path: Path) -> None:
    assembly = start(demo, tmp_path)
    demo.add(
        "idle", "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='idle', target='a:b')]"
    )
    again = bootstrap(assembly.plan, assembly.config, "cli", host=demo.load("demo"))
    assert again.plan == assembly.plan


def test_every_difference_is_listed(demo: PluginFolder, tmp_path: Path) -> None:
    assembly = start(demo, tmp_path)
    settings = assembly.plan.settings | {"page_size": 99, "kv_layout": "HND"}
    with pytest.raises(PluginError) as error:
        verify_plan(
            msgspec.structs.replace(assembly.plan, settings=settings), assembly, "engine process of rank 0 on h"
        )
    assert "settings.page_size: here 16, there 99" in str(error.value)
    assert "settings.kv_layout" in str(error.value)


def test_a_target_that_cannot_be_loaded_fails_the_process_before_its_work(demo: PluginFolder, tmp_path: Path) -> None:
    demo.write_module("demo_parser", "raise OSError('no model')")
    assembly = start(demo, tmp_path)
    with pytest.raises(PluginError, match="OSError: no model"):
        bootstrap(assembly.plan, assembly.config, "server", host=demo.load("demo"))
    assert not (tmp_path / "seen").exists()


def test_assembly_of_the_built_ins_imports_no_torch() -> None:
    code = (
        "import sys\nfrom tokenspeed.config import EngineConfig\nfrom tokenspeed.engine.assembly import assemble\n"
        "from tokenspeed.weights.describe import describe_model\n"
        "a = assemble(EngineConfig(model='toy', plugins='none', device='cpu'), describe_model('toy'))\n"
        "a.explain(verbose=True); a.to_json(); a.kernel_registry()\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    env = os.environ | {"PYTHONPATH": CORE_SRC}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 0
