"""Event hooks: called for each plugin of the plan on its own; what one raises is reported once, by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tokenspeed.errors import PluginError
from tokenspeed.plugins.events import EngineReadyContext, ModelLoadedContext, ProcessInitContext, ShutdownContext

RECORDER = """
seen = []

@hookimpl
def tokenspeed_configure(context): seen.append(("configure", dict(context.options), context.plan["core"]))
@hookimpl
def tokenspeed_process_init(context): seen.append(("process_init", context.role, context.rank))
@hookimpl
def tokenspeed_model_loaded(context): seen.append(("model_loaded", context.model_path))
@hookimpl
def tokenspeed_engine_ready(context): seen.append(("engine_ready", context.kv_pages))
@hookimpl
def tokenspeed_shutdown(context): seen.append(("shutdown", context.reason))
@hookimpl
def tokenspeed_doctor(context): return [DoctorFinding(status="ok", what=str(context.options))]
@hookimpl
def tokenspeed_options(): return [OptionSpec(name="n", type=int, default=1, help="")]
"""

FAILING = """
calls = []
def fail(event):
    calls.append(event)
    raise {what}

@hookimpl
def tokenspeed_configure(context): fail("configure")
@hookimpl
def tokenspeed_process_init(context): fail("process_init")
@hookimpl
def tokenspeed_engine_ready(context): fail("engine_ready")
@hookimpl
def tokenspeed_shutdown(context): fail("shutdown")
@hookimpl
def tokenspeed_doctor(context): fail("doctor")
@hookimpl
def tokenspeed_attention_backends():
    return [AttentionBackendSpec(name="failing", target="mini_parts:Attention", opt_in=True)]
"""


def all_events(events: Any) -> None:
    events.configure({"core": "1"})
    events.process_init(ProcessInitContext(role="engine", rank=1, world_size=2))
    events.model_loaded(ModelLoadedContext(model=None, model_path="m", rank=1, seconds=0.1))
    events.engine_ready(EngineReadyContext(model_name="m", kv_pages=9, seconds=0.2))
    events.shutdown(ShutdownContext(role="engine", reason="drained"))


def test_every_event_reaches_a_named_plugin_with_its_own_options(core: Any) -> None:
    import importlib

    module = core.folder.add("recorder", RECORDER)
    assembly = core.assemble("+recorder", plugin_options={"recorder.n": "7"})
    all_events(assembly.events)
    assert importlib.import_module(module).seen == [
        ("configure", {"n": 7}, "1"),
        ("process_init", "engine", 1),
        ("model_loaded", "m"),
        ("engine_ready", 9),
        ("shutdown", "drained"),
    ]
    assert assembly.events.doctor()["recorder"][0].what == "{'n': 7}"


def test_a_plugin_that_only_happens_to_be_installed_is_not_called(core: Any) -> None:
    import importlib

    module = core.folder.add("recorder", RECORDER)
    all_events(core.assemble().events)
    assert importlib.import_module(module).seen == []


@pytest.mark.parametrize("what", ["ValueError('boom')", "SystemExit(1)", "type('Odd', (BaseException,), {})('boom')"])
def test_plug_03_a_plugin_that_raises_in_every_hook_is_reported_once_and_not_called_again(
    core: Any, caplog: Any, what: str
) -> None:
    """Only shutdown is still called: it may hold something outside the process."""
    import importlib

    module = core.folder.add("failing", FAILING.format(what=what))
    core.folder.add("recorder", RECORDER)
    host = core.load("+recorder")
    from tokenspeed.plugins.dispatch import EventCalls

    events = EventCalls(host.manager, ["failing", "recorder"])
    with caplog.at_level(logging.WARNING):
        all_events(events)
    assert importlib.import_module(module).calls == ["configure", "shutdown"]
    assert [entry[0] for entry in importlib.import_module("recorder_plugin").seen][-1] == "shutdown"
    (text,) = [record.getMessage() for record in caplog.records]
    assert "plugin 'failing' raised in tokenspeed_configure" in text
    assert set(events.failed) == {"failing"}


def test_a_named_plugin_that_fails_to_configure_ends_the_start_cause_first(core: Any) -> None:
    core.folder.add("failing", FAILING.format(what="ValueError('boom')"))
    with pytest.raises(PluginError) as error:
        core.assemble("+failing").events.configure({})
    assert str(error.value).startswith("ValueError: boom")
    assert "'failing'" in str(error.value)


def test_a_plugin_that_fills_a_slot_is_needed_too(core: Any) -> None:
    core.folder.add("failing", FAILING.format(what="ValueError('boom')"))
    with pytest.raises(PluginError, match="boom"):
        core.assemble(attention_backend="failing").events.configure({})


def test_no_failure_after_the_start_is_fatal(core: Any) -> None:
    core.folder.add("failing", FAILING.format(what="ValueError('boom')"))
    events = core.assemble("+failing").events
    events.engine_ready(EngineReadyContext(model_name="m", kv_pages=1, seconds=0.1))
    events.shutdown(ShutdownContext(role="engine", reason="x"))
    assert "boom" in events.failed["failing"]


def test_an_interrupt_in_a_hook_is_the_users(core: Any) -> None:
    core.folder.add("failing", FAILING.format(what="KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        core.assemble("+failing").events.configure({})


def test_a_doctor_that_raises_becomes_a_finding(core: Any) -> None:
    core.folder.add("failing", FAILING.format(what="ValueError('boom')"))
    (finding,) = core.assemble("+failing").events.doctor()["failing"]
    assert finding.status == "error"
    assert "boom" in finding.what
