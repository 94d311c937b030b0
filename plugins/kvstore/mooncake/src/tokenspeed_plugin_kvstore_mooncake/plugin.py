"""What the plugin contributes. Imports nothing heavy."""

from __future__ import annotations

from tokenspeed.plugins import KVStoreSpec, OptionSpec, hookimpl


@hookimpl
def tokenspeed_kv_stores() -> list[KVStoreSpec]:
    """The store. Several distributions bring its library; what of the system that one lacks in turn the constructor says."""
    target, text = "tokenspeed_plugin_kvstore_mooncake.store:MooncakeStore", "the memory of a Mooncake cluster"
    needs = ("import:mooncake of mooncake-transfer-engine or mooncake-transfer-engine-non-cuda",)
    return [KVStoreSpec(name="mooncake", target=target, requires=needs, description=text)]


@hookimpl
def tokenspeed_options() -> list[OptionSpec]:
    """Where the cluster is, and what this process adds to it."""
    return [
        OptionSpec(name="master", type=str, default="127.0.0.1:50051", help="HOST:PORT of mooncake_master"),
        OptionSpec(name="metadata", type=str, default="P2PHANDSHAKE", help="metadata server, or P2PHANDSHAKE for none"),
        OptionSpec(
            name="hostname", type=str, default="127.0.0.1", help="this host as the others of the cluster see it"
        ),
        OptionSpec(name="protocol", type=str, default="tcp", choices=("tcp", "rdma"), help="how pages travel"),
        OptionSpec(name="devices", type=str, default="", help="RDMA devices, separated by commas"),
        OptionSpec(
            name="segment_mb", type=int, default=0, minimum=0, help="memory that this process adds to the cluster"
        ),
    ]
