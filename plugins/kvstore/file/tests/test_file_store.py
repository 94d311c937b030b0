"""The file store passes core's suite, keeps its cap, and shares a directory with other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenspeed_plugin_kvstore_file.place import check
from tokenspeed_plugin_kvstore_file.plugin import tokenspeed_kv_stores
from tokenspeed_plugin_kvstore_file.store import FileStore

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.kvstore import KVNamespace, KVStoreContext
from tokenspeed.testing.kv_store import KVStoreSuite
from tokenspeed.testing.kv_store_bench import StoreBench, StoreHost, random_keys, random_pages, save

SPEC = tokenspeed_kv_stores()[0]


class Folder(StoreHost):
    def __init__(self, root: Path) -> None:
        self.root = root
        self.options = {"directory": str(root)}

    def path(self, namespace: KVNamespace, key: bytes) -> Path:
        return self.root / namespace.id / key.hex()[:2] / key.hex()

    def read(self, namespace: KVNamespace, key: bytes) -> bytes:
        return self.path(namespace, key).read_bytes()

    def write(self, namespace: KVNamespace, key: bytes, data: bytes) -> None:
        self.path(namespace, key).write_bytes(data)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("store"))


class TestFile(KVStoreSuite):
    spec = SPEC


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StoreBench]:
    bench = StoreBench(SPEC, {"directory": str(tmp_path), "size_mb": 1}, 10_000, 2.0)
    yield bench
    bench.close()


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def context(**options: Any) -> KVStoreContext:
    return KVStoreContext(staging=np.zeros(4096, dtype=np.uint8), timeout_s=1.0, options=options)


def modes_of(root: Path) -> set[str]:
    found = [root, *root.rglob("*")]
    return {f"{'folder' if path.is_dir() else 'file'} {path.stat().st_mode & 0o7777:o}" for path in found}


@pytest.mark.parametrize(
    ("group", "expected"), [(False, {"folder 700", "file 600"}), (True, {"folder 2770", "file 660"})]
)
@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_pages_are_as_private_as_prompts(tmp_path: Path, group: bool, expected: set[str], umask: int) -> None:
    """Pages, folders, lock and notes; whatever the umask of the engine is."""
    before = os.umask(umask)
    try:
        root = tmp_path / "pages"
        bench = StoreBench(SPEC, {"directory": str(root), "size_mb": 1, "group": group}, 10_000, 2.0)
        store = bench.store()
        assert bench.put(store, bench.namespace(), random_keys(1), [os.urandom(10_000)]) == [True]
        store.close()
        assert (root / "lock").exists()
        assert modes_of(root) == expected
        bench.close()
    finally:
        os.umask(before)


def test_the_cap_holds_and_the_least_recently_used_pages_go(bench: StoreBench, tmp_path: Path) -> None:
    store, space, keys = bench.store(), bench.namespace(), random_keys(200)
    for key in keys:
        assert bench.put(store, space, [key], [os.urandom(10_000)]) == [True]
        store.close()  # waits for an eviction
        assert size_of(tmp_path) <= 1 << 20
        bench.get(store, space, keys[:1], 10_000)
        os.utime(tmp_path / space.id / keys[0].hex()[:2] / keys[0].hex())  # as a reading after half a minute would
    assert store.counters["evicted"] >= 90
    assert store.exists(space, [keys[0], *keys[1:20], *keys[-20:]], 5.0) == [True] + [False] * 19 + [True] * 20


def test_reading_marks_a_page_as_used(bench: StoreBench, tmp_path: Path) -> None:
    store, space, keys = bench.store(), bench.namespace(), random_keys(1)
    bench.put(store, space, keys, [os.urandom(100)])
    path = tmp_path / space.id / keys[0].hex()[:2] / keys[0].hex()
    os.utime(path, (0, time.time() - 3600))
    bench.get(store, space, keys, 100)
    assert time.time() - path.stat().st_mtime < 60


def test_a_page_larger_than_the_cap_is_not_kept(tmp_path: Path) -> None:
    bench = StoreBench(SPEC, {"directory": str(tmp_path), "size_mb": 1}, 2 << 20, 2.0)
    store, space, keys = bench.store(), bench.namespace(), random_keys(1)
    assert bench.put(store, space, keys, [bytes(2 << 20)]) == [False]
    assert store.exists(space, keys, 5.0) == [False]


def test_a_pipe_in_the_place_of_a_page_does_not_block(bench: StoreBench, tmp_path: Path) -> None:
    store, space, keys = bench.store(), bench.namespace(), random_keys(1)
    bench.put(store, space, keys, [os.urandom(100)])
    path = tmp_path / space.id / keys[0].hex()[:2] / keys[0].hex()
    path.unlink()
    os.mkfifo(path)
    assert bench.get(store, space, keys, 100) == [None]


def test_a_folder_in_the_place_of_a_page_costs_that_page_alone(bench: StoreBench, tmp_path: Path) -> None:
    store, space, keys = bench.store(), bench.namespace(), random_keys(3)
    page = tmp_path / space.id / keys[1].hex()[:2] / keys[1].hex()
    page.mkdir(parents=True)
    assert bench.put(store, space, keys, [os.urandom(10_000) for _ in keys]) == [True, False, True]
    assert store.exists(space, keys, 1.0) == [True, False, True]
    assert sum(path.stat().st_size == 10_000 for path in tmp_path.rglob("*") if path.is_file()) == 2, "and no leavings"


def test_a_write_that_fails_leaves_nothing_behind(bench: StoreBench, tmp_path: Path) -> None:
    """The disk is full, or the place cannot be written: the guard counts it, and nothing half written can be found."""
    space, keys = bench.namespace(), random_keys(1)
    guard = bench.guard(space)
    (tmp_path / "incoming").mkdir(exist_ok=True)
    folder = tmp_path / space.id
    folder.mkdir()
    (folder / keys[0].hex()[:2]).write_text("a file where a folder should be")
    assert save(guard, keys, random_pages(1, 10_000)) == 0
    assert guard.lanes[1].stats.failures == 1
    assert list((tmp_path / "incoming").iterdir()) == []


def test_leavings_of_writers_that_died_are_swept(bench: StoreBench, tmp_path: Path) -> None:
    store, space = bench.store(), bench.namespace()
    old, new = tmp_path / "incoming" / "old", tmp_path / "incoming" / "new"
    for path in (old, new):
        path.write_bytes(b"half a page")
    os.utime(old, (0, time.time() - 7200))
    bench.put(store, space, random_keys(1), [os.urandom(100)])
    store.close()
    assert (old.exists(), new.exists()) == (False, True)


WRITER = """
import os, sys
from tokenspeed.plugins.specs import KVStoreSpec
from tokenspeed.testing.kv_store_bench import StoreBench
from tokenspeed_plugin_kvstore_file.plugin import tokenspeed_kv_stores

root, model, seed = sys.argv[1:]
bench = StoreBench(tokenspeed_kv_stores()[0], {"directory": root, "size_mb": 1}, 10_000, 2.0)
store, space = bench.store(), bench.namespace(model=model)
for turn in range(120):
    key = bytes([turn]) * 16
    bench.put(store, space, [key], [bytes([turn]) * 10_000])
    for data in bench.get(store, space, [bytes([turn // 2]) * 16], 10_000):
        assert data is None or data == bytes([turn // 2]) * 10_000
bench.close()
print("done")
"""


def test_processes_share_a_directory_and_its_cap(tmp_path: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), "m", str(seed)], stdout=subprocess.PIPE, text=True
        )
        for seed in range(2)
    ]
    largest = 0
    while any(process.poll() is None for process in running):
        with stopped(running):
            largest = max(largest, bytes_of_pages(tmp_path))
        time.sleep(0.05)
    assert [process.communicate()[0] for process in running] == ["done\n"] * 2
    assert largest <= 1 << 20
    assert bytes_of_pages(tmp_path) > 50_000  # while a count goes on a writer keeps little


@contextmanager
def stopped(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """They do nothing meanwhile: what they write and remove while it is counted would be counted twice."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        if process.returncode is None:  # also one that has ended by now and was not waited for
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    yield
    for process in processes:
        process.send_signal(signal.SIGCONT)


def bytes_of_pages(root: Path) -> int:
    """What all files of pages hold together."""
    total = 0
    for path in root.glob("*/??/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_no_directory_is_said_at_start() -> None:
    with pytest.raises(ConfigError, match=r"--set kvstore-file\.directory"):
        FileStore(context())


def test_a_directory_that_cannot_be_made_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/below cannot be written"):
        FileStore(context(directory=str(tmp_path / "file" / "below")))


def test_options_that_cannot_work_are_refused_without_making_anything(tmp_path: Path) -> None:
    """What ``explain`` and the server ask before weights are read, and in the words of the store itself."""
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"give a directory with --set kvstore-file\.directory=PATH"):
        check({"directory": ""})
    for place in ("file", "file/below", "gone"):
        with pytest.raises(ConfigError, match=f"{place} cannot be written .* is not a directory"):
            check({"directory": str(tmp_path / place)})
    check({"directory": str(tmp_path)})
    check({"directory": str(tmp_path / "new" / "deep")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "gone"]


def test_a_directory_without_the_right_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right is asked for where pages arrive: of a shared directory that may be ``incoming`` alone."""
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path) or False)
    with pytest.raises(ConfigError, match=r"cannot be written \(.*permission denied\)"):
        check({"directory": str(tmp_path / "new")})
    (tmp_path / "incoming").mkdir()
    with pytest.raises(ConfigError, match="permission denied"):
        check({"directory": str(tmp_path)})
    assert asked == [tmp_path, tmp_path / "incoming"]


def test_a_folder_says_what_its_digest_stands_for(bench: StoreBench, tmp_path: Path) -> None:
    store, space = bench.store(), bench.namespace(model="sha256:abc")
    bench.put(store, space, random_keys(1), [os.urandom(100)])
    assert '"model": "sha256:abc"' in (tmp_path / space.id / "namespace.json").read_text()
