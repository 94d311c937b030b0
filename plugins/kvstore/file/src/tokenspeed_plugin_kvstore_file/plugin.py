"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import KVStoreSpec, OptionSpec, hookimpl


@hookimpl
def tokenspeed_kv_stores() -> list[KVStoreSpec]:
    """The store."""
    package, text = "tokenspeed_plugin_kvstore_file", "a local directory that many processes may share"
    return [
        KVStoreSpec(
            name="file", target=f"{package}.store:FileStore", checker=f"{package}.place:check", description=text
        )
    ]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Where, how much, how safe."""
    return [
        OptionSpec(name="directory", type=str, default="", help="where the pages are kept; made where it is missing"),
        OptionSpec(name="size_mb", type=int, default=10240, minimum=1, help="cap; the least recently used pages go"),
        OptionSpec(name="fsync", type=bool, default=False, help="wait for the disk at each page"),
        OptionSpec(
            name="group",
            type=bool,
            default=False,
            help="the directory's group may read and write pages, not this user alone",
        ),
    ]
