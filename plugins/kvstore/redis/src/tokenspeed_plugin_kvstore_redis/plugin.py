"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import KVStoreSpec, OptionSpec, hookimpl


@hookimpl
def tokenspeed_kv_stores() -> list[KVStoreSpec]:
    """The store."""
    target, needs = "tokenspeed_plugin_kvstore_redis.store:RedisStore", ("redis>=5",)
    return [KVStoreSpec(name="redis", target=target, requires=needs, description="a Redis or Valkey server")]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Which server, and how long pages live there."""
    return [
        OptionSpec(
            name="url",
            type=str,
            default="redis://127.0.0.1:6379/0",
            help="redis://, rediss:// or unix://, with user and password where the server wants them",
            secret=True,
        ),
        OptionSpec(name="prefix", type=str, default="tokenspeed", help="what every key begins with"),
        OptionSpec(
            name="ttl_s", type=int, default=0, minimum=0, help="seconds that a page lives; 0 leaves it to the server"
        ),
    ]
