"""Conformance suites of KV stores: what every store must keep, and what must not hurt whatever it does.

A plugin subclasses ``KVStoreSuite``, or ``ServedStoreSuite`` where the store is another process, and gives the fixture ``host``::

    @pytest.fixture(scope="module")
    def host(tmp_path_factory):
        return FileHost(tmp_path_factory.mktemp("store"))

    class TestFile(KVStoreSuite):
        spec = tokenspeed_kv_stores()[0]

Every test works in namespaces of its own, so that one host serves them all.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from tokenspeed.plugins.specs import KVStoreSpec
from tokenspeed.runtime.kv_frames import HEADER_BYTES, frame_bytes
from tokenspeed.testing.kv_store_bench import (
    LONG_S,
    StoreBench,
    StoreHost,
    StoreServer,
    count,
    eventually,
    load,
    random_keys,
    random_pages,
    save,
)

__all__ = ["KVStoreSuite", "ServedStoreSuite"]


class KVStoreSuite:
    """Subclass it with the attributes below, beside a fixture ``host``; every test states one rule.

    Attributes:
        spec: the plugin's spec.
        page_bytes: size of most pages; not a power of two.
        timeout_s: deadline of a call.
    """

    spec: ClassVar[KVStoreSpec]
    page_bytes: ClassVar[int] = 48_040
    timeout_s: ClassVar[float] = 2.0

    @pytest.fixture
    def bench(self, host: StoreHost) -> Iterator[StoreBench]:
        """Makes stores at the host."""
        bench = StoreBench(self.spec, host.options, self.page_bytes, self.timeout_s)
        yield bench
        bench.close()

    # ---- what a store keeps

    @pytest.mark.parametrize("sizes", [(1,), (64, 4096, 4097), (48_104,) * 12])
    def test_frames_come_back_as_they_went(self, bench: StoreBench, sizes: tuple[int, ...]) -> None:
        """Small ones, large ones, and sizes that are no multiple of anything."""
        store, space, keys = bench.store(), bench.namespace(), random_keys(len(sizes))
        contents = [os.urandom(size) for size in sizes]
        assert bench.put(store, space, keys, contents) == [True] * len(sizes)
        assert store.exists(space, keys, LONG_S) == [True] * len(sizes)
        for key, data in zip(keys, contents, strict=True):
            assert bench.get(store, space, [key], len(data)) == [data]

    def test_what_was_never_put_is_a_miss_and_disturbs_no_other(self, bench: StoreBench) -> None:
        """A batch of hits and misses."""
        store, space, keys = bench.store(), bench.namespace(), random_keys(4)
        data = os.urandom(frame_bytes(bench.page_bytes))
        bench.put(store, space, [keys[1], keys[3]], [data, data])
        assert store.exists(space, keys, LONG_S) == [False, True, False, True]
        assert bench.get(store, space, keys) == [None, data, None, data]

    def test_calls_about_nothing_answer_nothing(self, bench: StoreBench) -> None:
        """Empty batches."""
        store, space = bench.store(), bench.namespace()
        assert store.exists(space, [], LONG_S) == []
        assert store.get_into(space, [], [], LONG_S) == []
        assert store.put(space, [], [], LONG_S) == []

    @pytest.mark.parametrize("count", [1, 3])
    def test_answers_are_lists_of_bool_and_counts_are_int(self, bench: StoreBench, count: int) -> None:
        """One ``bool`` for each key, hit or miss: the engine takes ``None``, statuses and short lists for failures, and bypasses the store."""
        store, space, keys = bench.store(), bench.namespace(), random_keys(count)
        answers: list[object] = [bench.put(store, space, keys, [os.urandom(100)] * count)]
        for asked in (keys, random_keys(count)):
            answers += [
                store.exists(space, asked, LONG_S),
                store.get_into(space, asked, bench.frames(store, count, 100), LONG_S),
            ]
        for answer in answers:
            assert isinstance(answer, list), f"{type(answer).__name__} is no list"
            assert [type(one) for one in answer] == [bool] * count
        removed = store.delete(space, LONG_S)
        assert type(removed) is int
        assert removed >= 0

    def test_a_second_put_replaces_the_first(self, bench: StoreBench) -> None:
        """A damaged page must be replaceable."""
        store, space, keys = bench.store(), bench.namespace(), random_keys(1)
        first, second = (os.urandom(1000) for _ in range(2))
        bench.put(store, space, keys, [first])
        assert bench.put(store, space, keys, [second]) == [True]
        assert bench.get(store, space, keys, 1000) == [second]

    @pytest.mark.parametrize("asked", [999, 1001, 64])
    def test_a_frame_of_another_length_is_a_miss(self, bench: StoreBench, asked: int) -> None:
        """A shorter and a longer one."""
        store, space, keys = bench.store(), bench.namespace(), random_keys(1)
        bench.put(store, space, keys, [os.urandom(1000)])
        assert bench.get(store, space, keys, asked) == [None]

    def test_namespaces_do_not_see_each_other(self, bench: StoreBench) -> None:
        """Two models, two ranks, two element types, two adapters, two tenants: equal hashes, other pages."""
        store, base, keys = bench.store(), bench.namespace(), random_keys(2)
        others = [
            bench.namespace(**{"model": base.model, **change})
            for change in ({"rank": 1}, {"dtype": "bfloat16"}, {"adapter": "a"}, {"salt": "b"}, {"revision": "2"})
        ]
        bench.put(store, base, keys, [os.urandom(100)] * 2)
        for other in others:
            assert store.exists(other, keys, LONG_S) == [False, False]
            assert bench.get(store, other, keys, 100) == [None, None]

    def test_deleting_a_namespace_removes_all_of_it_and_nothing_else(self, bench: StoreBench) -> None:
        """And the namespace can be used again."""
        store, one, other, keys = bench.store(), bench.namespace(), bench.namespace(), random_keys(12)
        for space in (one, other):
            bench.put(store, space, keys, [os.urandom(100)] * 12)
        assert store.delete(one, LONG_S) in (0, 12)
        assert store.exists(one, keys, LONG_S) == [False] * 12
        assert store.exists(other, keys, LONG_S) == [True] * 12
        assert store.delete(bench.namespace(), LONG_S) == 0
        assert bench.put(store, one, keys[:1], [os.urandom(100)]) == [True]
        assert store.exists(one, keys[:1], LONG_S) == [True]

    def test_another_object_finds_what_was_put(self, bench: StoreBench) -> None:
        """The engine makes one for loads and one for saves."""
        one, other, space, keys = bench.store(), bench.store(), bench.namespace(), random_keys(3)
        contents = [os.urandom(500) for _ in keys]
        bench.put(one, space, keys, contents)
        assert bench.get(other, space, keys, 500) == contents

    def test_a_durable_store_keeps_what_was_put_when_it_is_closed(self, bench: StoreBench, host: StoreHost) -> None:
        """A restart: another engine, later. One that is not durable says so in its spec and loses it."""
        space, keys = bench.namespace(), random_keys(3)
        contents = [os.urandom(500) for _ in keys]
        bench.put(bench.store(), space, keys, contents)
        bench.close()
        later = StoreBench(self.spec, host.options, self.page_bytes, self.timeout_s)
        found = later.get(later.store(), space, keys, 500)
        later.close()
        assert found == (contents if self.spec.durable else [None] * 3)

    def test_many_writers_and_readers_see_whole_frames(self, bench: StoreBench) -> None:
        """Everyone writes the same keys with contents of its own: a reader gets one of them, never a mixture."""
        space, keys, workers, rounds = bench.namespace(), random_keys(4), 4, 12
        stores = [bench.store() for _ in range(2 * workers)]
        size = frame_bytes(self.page_bytes)

        def write(index: int) -> None:
            for turn in range(rounds):
                value = bytes([16 * index + turn % 16])
                bench.put(stores[index], space, keys, [value * size] * 4)  # may be refused while another one writes

        def read(index: int) -> int:
            seen = 0
            for _ in range(rounds):
                for data in bench.get(stores[index], space, keys):
                    seen += data is not None
                    assert data is None or data == data[:1] * size
            return seen

        bench.put(stores[0], space, keys, [bytes(size)] * 4)
        with ThreadPoolExecutor(2 * workers) as pool:
            writing = [pool.submit(write, i) for i in range(workers)]
            reading = [pool.submit(read, workers + i) for i in range(workers)]
            for written in writing:
                written.result()
            assert sum(seen.result() for seen in reading) > 0
        last = os.urandom(size)
        assert bench.put(stores[0], space, keys, [last] * 4) == [True] * 4
        assert bench.get(stores[1], space, keys) == [last] * 4

    def test_counters_are_numbers_by_name(self, bench: StoreBench) -> None:
        """They are added up and shown as metrics."""
        assert all(isinstance(value, int) and value >= 0 for value in bench.store().counters.values())

    # ---- what must not hurt

    @pytest.mark.parametrize(
        "damage",
        [
            pytest.param(lambda data: data[: len(data) // 2], id="torn in the middle"),
            pytest.param(lambda data: data[:10], id="torn in the header"),
            pytest.param(lambda data: data[:0], id="empty"),
            pytest.param(lambda data: data + b"\0" * 8, id="longer"),
            pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), id="last bit changed"),
            pytest.param(lambda data: data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES), id="zeros"),
            pytest.param(lambda data: bytes(len(data)), id="all zeros"),
        ],
    )
    def test_a_damaged_page_ends_the_hit_before_it_and_is_replaced(
        self, bench: StoreBench, host: StoreHost, damage: Callable[[bytes], bytes]
    ) -> None:
        """Torn writes, changed bytes, wrong lengths."""
        space, keys, pages = bench.namespace(), random_keys(4), random_pages(4, self.page_bytes)
        guard = bench.guard(space)
        assert save(guard, keys, pages) == 4
        host.write(space, keys[2], damage(host.read(space, keys[2])))
        loaded, into = load(guard, keys, self.page_bytes)
        assert loaded == 2
        np.testing.assert_array_equal(into[:2], pages[:2])
        assert guard.counters.bad + guard.counters.lost == 1
        assert count(guard, keys) == 2
        assert eventually(
            lambda: save(guard, keys, pages) == 4
        )  # a store may hold a page for a reader that it was just given to
        loaded, into = load(guard, keys, self.page_bytes)
        assert loaded == 4
        np.testing.assert_array_equal(into, pages)

    def test_a_page_of_another_key_is_not_taken(self, bench: StoreBench, host: StoreHost) -> None:
        """A store that mixes up its keys."""
        space, keys, pages = bench.namespace(), random_keys(2), random_pages(2, self.page_bytes)
        guard = bench.guard(space)
        save(guard, keys, pages)
        host.write(space, keys[0], host.read(space, keys[1]))
        assert load(guard, keys, self.page_bytes)[0] == 0
        assert guard.counters.bad == 1

    def test_more_pages_than_staging_holds_travel_in_turns(self, bench: StoreBench) -> None:
        """A long prefix of small pages."""
        space, keys, pages = bench.namespace(), random_keys(300), random_pages(300, 512)
        guard = bench.guard(bench.namespace(model=space.model, page_bytes=512))
        assert save(guard, keys, pages) == 300
        assert count(guard, keys) == 300
        loaded, into = load(guard, keys, 512)
        assert loaded == 300
        np.testing.assert_array_equal(into, pages)

    def test_loads_and_saves_at_once(self, bench: StoreBench) -> None:
        """As an engine does: two threads, two objects, one guard."""
        space = bench.namespace()
        guard = bench.guard(space)
        chains = [(random_keys(4), random_pages(4, self.page_bytes, seed)) for seed in range(8)]
        with ThreadPoolExecutor(1) as saving:
            saved = saving.map(lambda chain: save(guard, *chain), chains)
            for keys, pages in chains:
                loaded, into = load(guard, keys, self.page_bytes)
                np.testing.assert_array_equal(into[:loaded], pages[:loaded])
            assert list(saved) == [4] * 8
        for keys, pages in chains:
            loaded, into = load(guard, keys, self.page_bytes)
            assert loaded == 4
            np.testing.assert_array_equal(into, pages)


class ServedStoreSuite(KVStoreSuite):
    """For stores that are a process of their own: killed, hung and slow servers. The fixture ``host`` gives a ``StoreServer``."""

    @pytest.fixture
    def server(self, host: StoreHost) -> Iterator[StoreServer]:
        """The server; after the test it runs again, whatever the test did to it."""
        assert isinstance(host, StoreServer)
        yield host
        host.resume()
        host.start()

    @pytest.mark.parametrize("call", ["count", "load", "save", "delete"])
    def test_a_killed_server_is_a_miss_and_is_used_again_when_it_is_back(
        self, bench: StoreBench, server: StoreServer, call: str
    ) -> None:
        """Whatever is asked of it first."""
        space, keys, pages = bench.namespace(), random_keys(2), random_pages(2, self.page_bytes)
        guard = bench.guard(space)
        assert save(guard, keys, pages) == 2
        assert load(guard, keys, self.page_bytes)[0] == 2
        server.kill()
        calls: dict[str, Callable[[], object]] = {
            "count": lambda: count(guard, keys),
            "load": lambda: load(guard, keys, self.page_bytes)[0],
            "save": lambda: save(guard, random_keys(2), pages),
            "delete": lambda: guard.delete(0, time.monotonic() + LONG_S),
        }
        for _ in range(3):  # a client may answer one call from what it remembers
            began = time.monotonic()
            answer = calls[call]()
            assert time.monotonic() - began < 2 * self.timeout_s + 1
        assert not answer
        server.start()

        def works() -> bool:
            fresh = random_keys(2)
            return save(guard, fresh, pages) == 2 and load(guard, fresh, self.page_bytes)[0] == 2

        assert eventually(works, 60)

    def test_a_server_that_is_not_there_at_start_is_used_when_it_comes(
        self, bench: StoreBench, server: StoreServer
    ) -> None:
        """The engine starts without it."""
        server.kill()
        guard = bench.guard(bench.namespace())
        keys, pages = random_keys(1), random_pages(1, self.page_bytes)
        assert save(guard, keys, pages) == 0
        server.start()
        assert eventually(lambda: save(guard, keys, pages) == 1, 60)

    def test_a_hung_server_costs_one_deadline_and_no_other_thread_its_time(
        self, bench: StoreBench, server: StoreServer
    ) -> None:
        """A call that hangs with the interpreter's lock would stop the whole engine."""
        space, keys, pages = bench.namespace(), random_keys(4), random_pages(4, self.page_bytes)
        guard = bench.guard(space)
        save(guard, keys, pages)
        load(guard, keys, self.page_bytes)
        server.suspend()
        ticks, stop = itertools.count(), threading.Event()

        def tick() -> None:
            while not stop.wait(0.01):
                next(ticks)

        ticking = threading.Thread(target=tick)
        ticking.start()
        began = time.monotonic()
        for _ in range(10):
            count(guard, keys)
            load(guard, keys, self.page_bytes)
        took = time.monotonic() - began
        stop.set()
        ticking.join()
        assert took < 2 * self.timeout_s + 1
        assert next(ticks) > took / 0.01 / 5
        assert guard.lanes[0].stats.bypassed > 0
        server.resume()
        assert eventually(lambda: load(guard, keys, self.page_bytes)[0] == 4, 60)

    def test_a_slow_answer_within_the_deadline_is_taken(self, bench: StoreBench, server: StoreServer) -> None:
        """Half a second, where there are twenty."""
        space, keys, pages = bench.namespace(), random_keys(2), random_pages(2, self.page_bytes)
        guard = bench.guard(space, timeout_s=20.0)
        save(guard, keys, pages)
        load(guard, keys, self.page_bytes)
        server.suspend()
        later = threading.Timer(0.5, server.resume)
        later.start()
        loaded, into = load(guard, keys, self.page_bytes)
        later.join()
        assert loaded == 2
        np.testing.assert_array_equal(into, pages)

    def test_a_server_killed_in_the_midst_of_loads_gives_no_wrong_page(
        self, bench: StoreBench, server: StoreServer
    ) -> None:
        """What arrives is whole or not taken."""
        space, keys, pages = bench.namespace(), random_keys(12), random_pages(12, self.page_bytes)
        guard = bench.guard(space)
        assert save(guard, keys, pages) == 12
        killer = threading.Timer(0.1, server.kill)
        killer.start()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            loaded, into = load(guard, keys, self.page_bytes)
            np.testing.assert_array_equal(into[:loaded], pages[:loaded])
        killer.join()
