"""Options that were given and that nothing will read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tokenspeed.errors import ConfigError
from tokenspeed.plugins.options import option_owner
from tokenspeed.plugins.specs import KVStoreSpec, Spec

if TYPE_CHECKING:
    from tokenspeed.plugins.manager import PluginHost

__all__ = ["unread_options"]


def unread_options(
    host: PluginHost, given: Mapping[str, str], *, store: str | None, planned: Collection[str]
) -> list[str]:
    """A warning for each option in ``given`` (``plugin.option`` to text) of a plugin that is not in the plan.

    Args:
        given: settings that ``resolve_options`` has taken.
        store: plugin of the chosen KV store.
        planned: plugins in the plan.

    Raises:
        ConfigError: the plugin brings KV stores alone and none of them is chosen: its pages would silently go nowhere.
    """
    declared = host.registry.specs("option")
    warnings = []
    for key in given:
        plugin = option_owner(key, declared)
        stores = [c.spec.name for c in host.records[plugin].contributions if isinstance(c.spec, KVStoreSpec)]
        offered = [c for c in host.records[plugin].contributions if isinstance(c.spec, Spec)]
        if stores and len(stores) == len(offered) and plugin != store:
            raise ConfigError(
                f"--set {key}: it has no effect without KV store {' or '.join(stores)}, which --kvstore {stores[0]} names"
            )
        if plugin not in planned:
            warnings.append(
                f"--set {key}: plugin {plugin} fills no slot and gives no kernel here; nothing reads its options"
            )
    return warnings
