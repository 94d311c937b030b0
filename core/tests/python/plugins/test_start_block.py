"""The start-up block beyond its slots: where KV goes, what sessions keep, what is published; and what the running engine adds."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.engine.report import capacity_text
from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.messages import EngineInfo

STORE = """
@hookimpl
def tokenspeed_kv_stores():
    return [KVStoreSpec(name="shelf", target="shelf_parts:Shelf", checker="shelf_parts:check")]
@hookimpl
def tokenspeed_options():
    return [OptionSpec(name="place", type=str, default="", help="where")]
"""
CHECK = """
from tokenspeed.errors import ConfigError
def check(options):
    if options["place"] == "crash":
        raise OSError("no shelf")
    if not options["place"]:
        raise ConfigError("KV store shelf: give a place with --set s.place=WHERE")
"""


def block(core: Any, **config: Any) -> dict[str, str]:
    """Lines of the block by their first words."""
    lines = core.assemble(**config).explain().splitlines()[1:]
    return {line[2:19].strip(): line[20:] for line in lines}


@pytest.mark.parametrize(
    ("config", "pool"),
    [
        ({}, "sized from memory when the engine starts"),
        ({"max_total_tokens": 1000}, "1000 tokens, 63 pages (--max-total-tokens)"),
        ({"kv_cache_memory_bytes": 3 << 30}, "3.0 GiB (--kv-cache-memory-bytes)"),
        ({"kv_cache_memory_bytes": 1000}, "1000 bytes (--kv-cache-memory-bytes)"),
    ],
)
def test_the_block_says_what_sizes_the_kv_pool(core: Any, config: dict[str, int], pool: str) -> None:
    assert block(core, **config)["kv pool"] == pool


@pytest.mark.parametrize(
    ("config", "tier"),
    [
        ({"kvstore_ratio": 2.5}, "2.5 times the KV pool, write-through"),
        ({"kvstore_size": 512 << 20, "kvstore_write_policy": "selective"}, "512.0 MiB a process, selective"),
        ({"kvstore_ratio": 0.0}, None),
        ({}, None),
    ],
)
def test_the_block_shows_a_host_tier_where_there_is_one(core: Any, config: dict[str, Any], tier: str | None) -> None:
    assert block(core, **config).get("host tier") == tier


def test_the_block_shows_the_store_and_the_host_tier_that_it_brings(core: Any) -> None:
    core.folder.add("s", STORE, modules={"shelf_parts": CHECK}, first_party=True)
    options = {"s.place": "here"}
    lines = block(core, kvstore="shelf", plugin_options=options, kvstore_timeout_ms=250.0, prefetch_threshold=99)
    assert lines["kv_store"] == "s:shelf 1.0, 250 ms a call, asked for 99 tokens and more (--kvstore shelf)"
    assert lines["host tier"] == "1 times the KV pool, write-through"


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ('{"enable_kv_cache_events": true}', "bound tcp://127.0.0.1:5557"),
        (
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7001"}',
            "bound tcp://*:7000, replay tcp://*:7001",
        ),
        (
            '{"enable_kv_cache_events": true, "endpoint": "tcp://router:7000"}',
            "connected to tcp://router:7000",
        ),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', None),
        (None, None),
    ],
)
def test_the_block_shows_where_kv_events_go(core: Any, events: str | None, line: str | None) -> None:
    assert block(core, kv_events_config=events).get("kv events") == line


def test_the_block_shows_the_share_of_sessions_where_they_keep_one(core: Any) -> None:
    assert block(core)["sessions"] == "keep at most 50 % of the KV pool between their turns"
    assert "sessions" not in block(core, session_retain_percent=0)
    off = block(core, enable_prefix_caching=False)
    assert "sessions" not in off
    assert off["prefix caching"] == "off"


def info(**changes: Any) -> EngineInfo:
    fields = {"max_model_len": 512, "vocab_size": 300, "page_size": 16, "kv_pages": 65, "kv_bytes": 3 << 20}
    rest = {"weight_bytes": 0, "dtype": "float32", "device": "cpu", "load_seconds": 0.0, "plan": {}, "config": {}}
    return EngineInfo(**fields | rest | changes)


def test_the_running_engine_says_what_it_has(core: Any) -> None:
    config = core.assemble(kvstore_ratio=2.0, kvstore_write_policy="write-on-evict", session_retain_percent=10).config
    lines = [
        line.split(maxsplit=2) for line in capacity_text(config, info(host_pages=130, host_bytes=6 << 20)).splitlines()
    ]
    assert lines == [
        ["kv", "pool", "65 pages of 16 tokens: 1040 tokens, 3.0 MiB"],
        ["host", "tier", "130 pages, 6.0 MiB, write-on-evict"],
        ["sessions", "keep", "at most 6 pages between their turns (10 %)"],
    ]


def test_without_tiers_and_sessions_there_is_the_pool_alone(core: Any) -> None:
    config = core.assemble(session_retain_percent=0).config
    assert len(capacity_text(config, info()).splitlines()) == 1


def test_the_running_engine_says_how_fast_its_weights_came_what_was_captured_and_where_memory_went(core: Any) -> None:
    config = core.assemble(session_retain_percent=0).config
    memory = {"weights": 3 << 30, "kv": 4 << 30, "graphs": 0, "steps": 1 << 30, "free": 2 << 30, "total": 10 << 30}
    told = info(weight_bytes=3 << 30, load_seconds=2.0, graphs="off (--enforce-eager)", memory=memory)
    assert [line.split(maxsplit=1) for line in capacity_text(config, told).splitlines()][:1] == [
        ["weights", "3.0 GiB in 2.0 s, 1.5 GiB/s"]
    ]
    assert [line.split(maxsplit=1) for line in capacity_text(config, told).splitlines()][2:] == [
        ["graphs", "off (--enforce-eager)"],
        ["memory", "weights 3.0 GiB, kv 4.0 GiB, steps 1.0 GiB, free 2.0 GiB of 10.0 GiB"],
    ]


def test_sizes_are_no_part_of_what_get_plugins_answers(core: Any) -> None:
    """Which plugin fills which slot is the same whatever the memory."""
    sized = core.assemble(kvstore_ratio=2.0, max_total_tokens=1000, session_retain_percent=7).to_json()
    assert sized == core.assemble().to_json()


def test_a_store_whose_options_cannot_work_ends_the_start_before_anything_is_loaded(core: Any) -> None:
    core.folder.add("s", STORE, modules={"shelf_parts": CHECK}, first_party=True)
    with pytest.raises(ConfigError, match=r"give a place with --set s\.place=WHERE"):
        core.assemble(kvstore="shelf")
    with pytest.raises(PluginError, match=r"OSError: no shelf\nthe options of KV store s:shelf cannot be checked"):
        core.assemble(kvstore="shelf", plugin_options={"s.place": "crash"})
    assert core.assemble().kv_store is None, "a store that nobody asks for needs no options"
