"""The first act of every process of a server: decide again, compare with the plan, load its part."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import Assembly, assemble
from tokenspeed.errors import PluginError, TokenSpeedError
from tokenspeed.plugins.events import ProcessInitContext
from tokenspeed.plugins.plan import PluginPlan
from tokenspeed.plugins.selection import load_target

if TYPE_CHECKING:
    from tokenspeed.plugins.manager import PluginHost
    from tokenspeed.weights.describe import ModelDescription

__all__ = ["bootstrap", "verify_plan"]

#: Slots that a process of each role loads: the others stay strings there.
_SLOTS = {
    "engine": ("platform", "model", "attention", "grammar_backend", "kv_store"),
    "server": ("tool_parser", "reasoning_parser", "renderer"),
    "cli": (),
}


def verify_plan(plan: PluginPlan, assembly: Assembly, where: str) -> None:
    """Compare what this process decided with ``plan``.

    Raises:
        PluginError: they differ; every difference is listed, with ``where`` (host, role and rank).
    """
    lines = assembly.plan.differences(plan)
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise PluginError(f"{where} does not arrive at the plan that the server was started with (there):\n{listed}")


def _qualified(plan: PluginPlan, slot: str) -> str | None:
    chosen = plan.slots.get(slot)
    return f"{chosen.plugin}:{chosen.name}" if chosen else None


def bootstrap(
    plan: PluginPlan,
    config: EngineConfig,
    role: str,
    rank: int = 0,
    world_size: int = 1,
    *,
    model: ModelDescription | None = None,
    host: PluginHost | None = None,
) -> Assembly:
    """Arrive at ``plan`` again in this process, load the targets of its role, and tell the plugins.

    Args:
        plan: what the starting process decided.
        config: its settings, as given or as resolved.
        role: ``engine``, ``server`` or ``cli``.
        model: the model's description where the caller has it already; read again otherwise.
        host: plugins that are already loaded.

    Raises:
        PluginError: the plan differs here, a target cannot be loaded, or a plugin that is needed fails.
    """
    where = f"{role} process of rank {rank} on {socket.gethostname()}"
    if model is None:
        from tokenspeed.weights.describe import describe_model

        model = describe_model(config.model, config.load_format)
    parsers = {slot: _qualified(plan, slot) for slot in ("tool_parser", "reasoning_parser", "renderer")}
    try:
        assembly = assemble(
            config,
            model,
            tool_call_parser=parsers["tool_parser"],
            reasoning_parser=parsers["reasoning_parser"],
            renderer=parsers["renderer"],
            host=host,
            announce=False,
        )
    except TokenSpeedError as error:
        raise type(error)(f"{error}\n{where} cannot carry out the plan of the server") from error
    verify_plan(plan, assembly, where)
    for slot, filled in plan.slots.items():
        if slot.partition(".")[0] in _SLOTS[role]:
            load_target(filled.target)
    assembly.events.configure(plan.to_json())
    assembly.events.process_init(ProcessInitContext(role=role, rank=rank, world_size=world_size))
    return assembly
