"""The plan is plain data: it survives a trip through JSON, and tells how two of them differ."""

from __future__ import annotations

import json
from typing import Any

from tokenspeed.plugins.plan import PluginPlan


def test_a_plan_survives_json_and_is_plain(core: Any) -> None:
    plan = core.assemble().plan
    assert PluginPlan.decode(plan.encode()) == plan
    assert json.loads(plan.encode()) == plan.to_json()
    assert PluginPlan.decode(plan.encode()).encode() == plan.encode()


def test_differences_name_the_path_and_both_sides(core: Any) -> None:
    core.folder.add(
        "extra",
        "@hookimpl\ndef tokenspeed_attention_backends():\n    return [AttentionBackendSpec(name='extra', target='mini_parts:Attention')]\n"
        "@hookimpl\ndef tokenspeed_options():\n    return [OptionSpec(name='n', type=int, default=1, help='')]\n",
    )
    plain, extra = core.assemble().plan, core.assemble("+extra", plugin_options={"extra.n": "2"}).plan
    assert plain.differences(plain) == []
    lines = plain.differences(extra)
    assert 'slots.attention.decode.name: here "torch", there "extra"' in lines
    assert 'options.extra: here nothing, there {"n":2}' in lines
    assert any(line.startswith("plugins.extra: here nothing, there {") for line in lines)


def test_only_what_contributes_is_in_the_plan(core: Any) -> None:
    """Hosts may have different plugins lying around; that is no difference between plans."""
    before = core.assemble().plan
    core.folder.add(
        "idle", "@hookimpl\ndef tokenspeed_tool_parsers():\n    return [ToolParserSpec(name='idle', target='a:b')]"
    )
    core.folder.add("sick", "raise ImportError")
    assert core.assemble().plan == before
