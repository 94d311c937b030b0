"""Attention backends of one rank, and the pages and states that its layers read and write."""

from __future__ import annotations

from tokenspeed.engine.assembly import Assembly
from tokenspeed.engine.attention_choice import missing_kind
from tokenspeed.engine.settings import resolved
from tokenspeed.errors import PluginError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.interfaces.platform import Platform
from tokenspeed.layers.attention import PagedLayer, bind_kv
from tokenspeed.layers.dtypes import dtype_from_name
from tokenspeed.layers.recurrent import bind_states
from tokenspeed.plugins.kernel_select import KernelRegistry
from tokenspeed.plugins.selection import load_target
from tokenspeed.runtime.executor import ModelExecutor
from tokenspeed.runtime.kv_pool import KVPool

__all__ = ["BackendPairs", "bind_pool", "make_backends"]

#: Backends of both phases by the number of their cache group.
BackendPairs = dict[int, tuple[AttentionBackend, AttentionBackend]]


def make_backends(
    assembly: Assembly,
    platform: Platform,
    model: CausalLM,
    pool: KVPool,
    kernels: KernelRegistry,
    max_tokens: int,
) -> BackendPairs:
    """A backend for each phase and cache group with attention, by the group's number; one for both phases where they are the same.

    Raises:
        PluginError: a group has layers of a kind that ``config.json`` does not tell, and what was chosen cannot serve them.
    """
    config = assembly.config
    modules = {module.layer_index: module for module in model.modules() if isinstance(module, PagedLayer)}
    pairs: BackendPairs = {}
    for index, group in enumerate(pool.groups):
        if group.kind == "recurrent" or not group.layers:
            continue
        windows = any(modules[layer].layer.window for layer in group.layers)
        slots = assembly.attention_slots("mla" if group.kind == "mla" else "window" if windows else "full")
        chosen = {phase: assembly.choices[slot].spec for phase, slot in slots.items()}
        made: dict[str, AttentionBackend] = {}
        for phase, spec in chosen.items():
            if lacks := missing_kind(spec, group, windows=windows):
                raise PluginError(f"attention backend {spec.name} cannot serve {type(model).__name__}: {lacks}")
            if spec.target not in made:
                made[spec.target] = load_target(spec.target)(
                    AttentionContext(
                        q_heads=modules[group.layers[0]].q_heads,
                        group=group,
                        group_index=index,
                        layout=pool.layout,
                        page_size=pool.page_sizes[index],
                        dtype=dtype_from_name(config.dtype),
                        kv_dtype=dtype_from_name(config.kv_cache_dtype),
                        device=platform.device,
                        max_rows=resolved(config.max_num_seqs),
                        max_tokens=max_tokens,
                        max_model_len=resolved(config.max_model_len),
                        select_kernel=kernels.select,
                        options=assembly.options_of(slots[phase]),
                    )
                )
        pairs[index] = (made[chosen["extend"].target], made[chosen["decode"].target])
    return pairs


def bind_pool(model: CausalLM, pool: KVPool, backends: BackendPairs, executor: ModelExecutor) -> None:
    """Let the layers read and write ``pool``."""
    bind_kv(model, pool, backends)
    bind_states(model, pool)
    if any(group.kind == "recurrent" for group in pool.groups):
        executor.use_states(pool)
