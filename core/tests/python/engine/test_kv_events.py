"""KV events on the wire: their form, their runs, and subscribers over real sockets that lose messages and recover."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tokenspeed.engine.kv_events.batching import events_of
from tokenspeed.engine.kv_events.config import LOOPBACK, KVEventsConfig, parse_kv_events_config
from tokenspeed.engine.kv_events.publisher import KVEventPublisher
from tokenspeed.engine.kv_events.wire import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
    number_frame,
)
from tokenspeed.errors import ConfigError
from tokenspeed.testing.kv_events import KVEventSubscriber, LostEventsError, MirroredPage, PrefixMirror

PAGE = 2
STORED, REMOVED, CLEARED = range(3)


@dataclass
class FakeRecord:
    """The scheduler's record, filled page by page."""

    rows: list[tuple[int, int, int, int, bytes, bytes, int, list[int]]] = field(default_factory=list)

    def stored(
        self,
        key: bytes,
        parent: bytes | None,
        depth: int,
        tokens: list[int],
        *,
        medium: int = 0,
        adapter: int = 0,
        group: int = 0,
    ) -> None:
        self.rows.append((STORED, medium, group, depth, key, parent or bytes(16), adapter, tokens))

    def removed(self, key: bytes, *, medium: int = 0, group: int = 0) -> None:
        self.rows.append((REMOVED, medium, group, 0, key, bytes(16), 0, []))

    def cleared(self) -> None:
        self.rows.append((CLEARED, 0, 0, -1, bytes(16), bytes(16), 0, []))

    def __getattr__(self, name: str) -> np.ndarray:
        if name == "tokens":
            return np.array([token for row in self.rows for token in row[7]], np.int32)
        if name == "token_counts":
            return np.array([len(row[7]) for row in self.rows], np.int32)
        columns = ("kind", "medium", "group", "depth", "hash", "parent", "adapter")
        values = [row[columns.index(name)] for row in self.rows]
        if name in ("hash", "parent"):
            return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)
        return np.array(values, np.int64 if name == "adapter" else np.int32)


class FakeTree:
    """A prefix tree that changes at random and records it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pages: dict[bytes, MirroredPage] = {}
        self.depths: dict[bytes, int] = {}
        self.record = FakeRecord()

    def drain(self) -> FakeRecord:
        record, self.record = self.record, FakeRecord()
        return record

    def change(self) -> None:
        dice = self.random.random()
        if dice < 0.02:
            self.pages.clear()
            self.record.cleared()
        elif dice < 0.5:
            for _ in range(self.random.randrange(1, 4)):
                self.evict()
        else:
            self.store(self.random.randrange(1, 5))

    def store(self, pages: int) -> None:
        parent = self.random.choice([None, *self.pages])
        depth = self.depths[parent] + 1 if parent else 0
        for _ in range(pages):
            tokens = [self.random.randrange(4) for _ in range(PAGE)]
            key = hashlib.sha256((parent or b"") + bytes(tokens)).digest()[:16]
            if key not in self.pages:
                self.record.stored(key, parent, depth, tokens)
                self.pages[key] = MirroredPage(parent, tuple(tokens), None)
                self.depths[key] = depth
            parent, depth = key, depth + 1

    def evict(self) -> None:
        parents = {page.parent for page in self.pages.values()}
        leaves = [key for key in self.pages if key not in parents]
        if leaves:
            key = self.random.choice(leaves)
            del self.pages[key]
            self.record.removed(key)


def take_all(subscriber: KVEventSubscriber, published: int) -> list[KVEventBatch]:
    """What is left of ``published`` batches, however far the publisher's thread is."""
    batches: list[KVEventBatch] = []
    for _ in range(2000):
        if subscriber.next_number == published:
            return batches
        batches += subscriber.poll(0.005) or subscriber.catch_up()
    raise AssertionError(f"{subscriber.next_number} of {published} batches came")


class LossySubscriber(KVEventSubscriber):
    """Loses messages that `loses` names by their number."""

    def __init__(self, *arguments: str, loses: Callable[[int], bool]) -> None:
        super().__init__(*arguments)
        self.loses = loses
        self.lost = 0

    def _receive(self) -> tuple[int, bytes] | None:
        message = super()._receive()
        if message is not None and self.loses(message[0]):
            self.lost += 1
            return None
        return message


Open = Callable[..., KVEventPublisher]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Open]:
    opened: list[KVEventPublisher] = []

    def start(**settings: object) -> KVEventPublisher:
        given = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay", **settings}
        config = msgspec.convert({"enable_kv_cache_events": True, **given}, KVEventsConfig)
        opened.append(KVEventPublisher(config, block_sizes=[PAGE], clock=lambda: 12.5))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def one_page(number: int) -> FakeRecord:
    record = FakeRecord()
    record.stored(key_of(number), None, 0, [number, number])
    return record


# ---- form ----


def test_events_are_arrays_led_by_their_name() -> None:
    stored = BlockStored([key_of(1), key_of(2)], key_of(9), [5, 6, 7, 8], 2, 3, "GPU", None)
    batch = KVEventBatch(1.5, [stored, BlockRemoved([key_of(1)], "CPU"), AllBlocksCleared()], 0)
    assert msgspec.msgpack.decode(encode_batch(batch)) == [
        1.5,
        [
            ["BlockStored", [key_of(1), key_of(2)], key_of(9), [5, 6, 7, 8], 2, 3, "GPU", None, None, None],
            ["BlockRemoved", [key_of(1)], "CPU", None],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    assert decode_batch(encode_batch(batch)) == batch


def test_a_cache_group_is_told_where_the_model_has_several() -> None:
    record = FakeRecord()
    record.stored(key_of(1), None, 0, [1, 2, 3], group=1)
    record.removed(key_of(1), group=1)
    (stored, removed) = events_of(record, [2, 3])
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (stored.group_idx, stored.block_size, removed.group_idx) == (1, 3, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored))[-3:] == [None, None, 1]


def test_fields_stand_where_earlier_and_later_subscribers_of_vllm_read_them() -> None:
    """The structs that such subscribers declare, of two generations: fields are read by place, and further ones are passed over."""

    class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
        pass

    six = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes | int]),
            ("parent_block_hash", bytes | int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
        ],
        bases=(Event,),
    )
    seven = msgspec.defstruct("BlockStored", [("lora_name", str | None)], bases=(six,))
    payload = encode_batch(KVEventBatch(0.0, [BlockStored([key_of(1)], None, [1, 2], 2, None, "GPU", None)], 0))
    for kind in (six, seven):
        decoded = msgspec.msgpack.decode(payload, type=tuple[float, list[kind], int | None])[1][0]
        assert (decoded.block_hashes, decoded.token_ids, decoded.medium) == ([key_of(1)], [1, 2], "GPU")


def test_pages_of_one_chain_stand_in_one_event_and_order_is_kept() -> None:
    record = FakeRecord()
    record.stored(key_of(1), None, 0, [1, 2])
    record.stored(key_of(2), key_of(1), 1, [3, 4])
    record.stored(key_of(3), key_of(1), 1, [5, 6])  # a branch: another parent
    record.removed(key_of(3))
    record.removed(key_of(2))
    record.stored(key_of(1), None, 0, [], medium=1)
    record.stored(key_of(4), key_of(1), 1, [7, 8], adapter=6)
    record.cleared()
    assert events_of(record, [PAGE]) == [
        BlockStored([key_of(1), key_of(2)], None, [1, 2, 3, 4], PAGE, None, "GPU", None),
        BlockStored([key_of(3)], key_of(1), [5, 6], PAGE, None, "GPU", None),
        BlockRemoved([key_of(3), key_of(2)], "GPU"),
        BlockStored([key_of(1)], None, [], PAGE, None, "CPU", None),
        BlockStored([key_of(4)], key_of(1), [7, 8], PAGE, 6, "GPU", None),
        AllBlocksCleared(),
    ]


# ---- sockets ----


@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_that_loses_messages_rebuilds_the_tree(publisher: Open, seed: int) -> None:
    """Events of 400 random changes, a third of the messages lost, those before the subscription among them."""
    source, tree, mirror = publisher(), FakeTree(seed), PrefixMirror()
    losses = random.Random(seed + 100)
    published = 0

    def change() -> None:
        nonlocal published
        tree.change()
        record = tree.drain()
        published += bool(record.rows)
        source.publish(record)

    for _ in range(20):
        change()
    subscriber = LossySubscriber(source.endpoint, str(source.replay_endpoint), loses=lambda _: losses.random() < 0.33)
    with subscriber:
        mirror.apply(take_all(subscriber, published))
        for _ in range(380):
            change()
            mirror.apply(subscriber.poll(0.005))
        mirror.apply(take_all(subscriber, published))
    assert mirror.tier() == tree.pages
    assert subscriber.lost > 20
    assert subscriber.replayed > 20


def test_a_gap_is_closed_before_the_message_that_shows_it(publisher: Open) -> None:
    source = publisher()
    with LossySubscriber(source.endpoint, str(source.replay_endpoint), loses=lambda number: number < 3) as subscriber:
        source.publish(one_page(0))
        assert len(take_all(subscriber, 1)) == 1
        for number in range(1, 400):
            source.publish(one_page(number))
            if batches := subscriber.poll(0.05):
                break
        keys = [event.block_hashes[0] for batch in batches for event in batch.events if isinstance(event, BlockStored)]
        assert keys[0] == key_of(1)
        assert keys == sorted(keys)
        assert len(keys) == len(set(keys)) > 1
        assert batches[0].ts == 12.5
        assert batches[0].data_parallel_rank == 0


def test_batches_that_are_no_longer_kept_are_an_error_not_a_wrong_tree(publisher: Open) -> None:
    source = publisher(buffer_steps=4)
    for number in range(10):
        source.publish(one_page(number))
    with KVEventSubscriber(source.endpoint, source.replay_endpoint) as early:
        early.next_number = 9
        take_all(early, 10)  # the thread has sent them all
    with (
        KVEventSubscriber(source.endpoint, source.replay_endpoint) as subscriber,
        pytest.raises(LostEventsError, match="batch 0 is gone; the oldest one kept is 6"),
    ):
        subscriber.catch_up()


def test_without_a_replay_socket_a_gap_is_an_error(publisher: Open) -> None:
    source = publisher(replay_endpoint=None)
    assert source.replay_endpoint is None

    def receive() -> None:
        for number in range(1000):
            source.publish(one_page(number))
            subscriber.poll(0.01)

    with LossySubscriber(source.endpoint, loses=lambda number: number < 1000) as subscriber:
        subscriber.loses = lambda _: subscriber.lost == 0
        with pytest.raises(LostEventsError, match="was not received and there is no replay socket"):
            receive()


def test_topic_number_and_payload_are_the_frames(publisher: Open, tmp_path: Path) -> None:
    source = publisher(topic="kv@1")
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@1")
    socket.connect(source.endpoint)
    sent = 0
    while not socket.poll(20):
        source.publish(one_page(sent))
        sent += 1
        assert sent < 500
    topic, number, payload = socket.recv_multipart()
    context.destroy(linger=0)
    assert topic == b"kv@1"
    assert len(number) == 8
    (event,) = decode_batch(payload).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [key_of(int.from_bytes(number, "big"))]


def test_a_request_socket_can_ask_and_nonsense_is_ignored(publisher: Open) -> None:
    source = publisher()
    context = zmq.Context()
    dealer, req = context.socket(zmq.DEALER), context.socket(zmq.REQ)
    dealer.connect(str(source.replay_endpoint))
    req.connect(str(source.replay_endpoint))
    for nonsense in ([b"\0" * 8], [b"", b"abc"], [b"x", b"\0" * 8], [b"", b"\0" * 8, b"more"]):
        dealer.send_multipart(nonsense)
    dealer.send_multipart([b"", number_frame(10**9)])
    assert dealer.poll(5000)
    assert dealer.recv_multipart() == [b"", END, b""]
    assert not dealer.poll(50)
    source.publish(one_page(7))
    req.send(number_frame(0))
    assert req.poll(5000)
    number, payload = req.recv_multipart()
    assert (number == END) == (payload == b"")
    context.destroy(linger=0)


def test_nothing_is_sent_for_a_step_that_changed_nothing(publisher: Open) -> None:
    source = publisher()
    source.publish(FakeRecord())
    source.publish(one_page(1))
    with KVEventSubscriber(source.endpoint, source.replay_endpoint) as subscriber:
        (batch,) = take_all(subscriber, 1)
    assert batch.events == [BlockStored([key_of(1)], None, [1, 1], PAGE, None, "GPU", None)]


def test_what_was_handed_over_is_sent_before_the_end(publisher: Open) -> None:
    source = publisher()
    with KVEventSubscriber(source.endpoint, source.replay_endpoint) as subscriber:
        for number in range(500):
            source.publish(one_page(number))
            if subscriber.poll(0.02):
                break
        for more in range(number + 1, number + 200):
            source.publish(one_page(more))
        source.close()
        last = None
        while batches := subscriber.poll(1.0):
            last = batches[-1].events[0]
    assert isinstance(last, BlockStored)
    assert last.block_hashes == [key_of(number + 199)]


def test_a_batch_that_cannot_be_sent_is_a_missing_number(publisher: Open) -> None:
    """The thread goes on; who asks for the batch again is told that it is gone."""
    source = publisher()
    broken = FakeRecord()
    broken.stored(key_of(1), None, 0, [1, 1], group=5)  # no such group
    with KVEventSubscriber(source.endpoint, source.replay_endpoint) as subscriber:
        for record in (one_page(0), broken, one_page(2)):
            source.publish(record)
        with pytest.raises(LostEventsError, match="batch 1"):
            take_all(subscriber, 3)
    assert source.dropped == 1


def test_a_thread_that_fails_holds_nobody_up(
    publisher: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is published after it is dropped and counted, not queued until the queue is full."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of file descriptors")

    monkeypatch.setattr(KVEventPublisher, "_try_to_send", fail)
    source = publisher(max_queue_size=2)
    source.publish(one_page(0))
    source._thread.join(60)
    for number in range(1, 10):
        source.publish(one_page(number))
    source.close()
    assert source.dropped == 9
    assert "out of file descriptors" in caplog.text
    assert "subscribers must begin again: the sending thread has ended" in caplog.text


def test_a_full_queue_costs_batches_and_no_time(publisher: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    proper = KVEventPublisher._try_to_send

    def wait(self: KVEventPublisher, *item: Any) -> None:
        slow.wait(60)
        proper(self, *item)

    monkeypatch.setattr(KVEventPublisher, "_try_to_send", wait)
    source = publisher(max_queue_size=2)
    for number in range(10):
        source.publish(one_page(number))
    assert source.dropped in (7, 8)  # one is with the thread, or still in the queue
    slow.set()
    source.close()


def test_a_client_that_reads_no_replay_is_cut_and_another_is_served(publisher: Open) -> None:
    """What is queued for one client is bounded, whatever it asks for; who reads gets each replay whole, one after another."""
    source = publisher(buffer_steps=50)
    for number in range(50):
        record = FakeRecord()
        record.stored(key_of(number), None, 0, [number] * 1000)
        source.publish(record)
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy, context.socket(zmq.DEALER) as reader:
        greedy.rcvhwm, greedy.linger, reader.linger = 1, 0, 0
        greedy.connect(str(source.replay_endpoint))
        for _ in range(200):
            greedy.send_multipart((b"", number_frame(0)))
        reader.connect(str(source.replay_endpoint))
        for _ in range(5):
            reader.send_multipart((b"", number_frame(0)))
            numbers = []
            while numbers[-1:] != [END]:
                assert reader.poll(5000)
                numbers.append(reader.recv_multipart()[1])
            assert numbers == [*map(number_frame, range(50)), END]
    source.close()
    assert source.replays_cut > 0


def test_the_largest_buffer_can_be_asked_for(publisher: Open) -> None:
    """Twice as many messages as that are no number that a socket takes."""
    with KVEventSubscriber(publisher(buffer_steps=2**31 - 1).endpoint) as subscriber:
        assert subscriber.poll(0) == []


def test_nobody_else_on_the_network_listens_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events hold the tokens of every prompt."""
    monkeypatch.setattr("tokenspeed.engine.kv_events.publisher.LOOPBACK", LOOPBACK.replace("5557", "*"))
    source = KVEventPublisher(parse_kv_events_config('{"enable_kv_cache_events": true}'), block_sizes=[PAGE])
    source.close()
    assert LOOPBACK == "tcp://127.0.0.1:5557"
    assert source.endpoint.startswith("tcp://127.0.0.1:")


def test_an_address_in_use_is_told(publisher: Open) -> None:
    source = publisher(endpoint="tcp://*:0")
    port = source.endpoint.rsplit(":", 1)[1]
    with pytest.raises(ConfigError, match=rf"--kv-events-config: endpoint tcp://\*:{port} cannot be bound"):
        publisher(endpoint=f"tcp://*:{port}")


# ---- settings ----


def test_settings_have_the_names_of_vllm() -> None:
    config = parse_kv_events_config(
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7001", "buffer_steps": 5, "hwm": 6,'
        ' "max_queue_size": 7, "topic": "t", "publisher": "zmq"}'
    )
    assert config.publishes
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (5, 6, 7, "t")
    assert not parse_kv_events_config("{}").publishes
    assert parse_kv_events_config('{"enable_kv_cache_events": true}').publishes
    assert not parse_kv_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').publishes


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", "Expected `object`"),
        ("{", "it is a JSON object such as"),
        ('{"endpont": "x"}', "unknown field `endpont`.*its fields are enable_kv_cache_events, publisher, endpoint"),
        ('{"publisher": "nats"}', "Invalid enum value 'nats'"),
        ('{"buffer_steps": 0}', "buffer_steps is 0; it must be at least 1"),
        ('{"hwm": -1}', "hwm is -1; it must be at least 0"),
        ('{"hwm": 99999999999999}', "hwm is 99999999999999; it must be at most 2147483647"),
        ('{"buffer_steps": 99999999999999}', "buffer_steps is 99999999999999; it must be at most"),
        ('{"endpoint": "tcp://*:99999"}', "a tcp:// address ends in a port, 0 to 65535"),
        ('{"endpoint": "tcp://localhost"}', "a tcp:// address ends in a port"),
        ('{"replay_endpoint": "tcp://*:x"}', "replay_endpoint is 'tcp://.*a tcp:// address ends in a port"),
        ('{"endpoint": "5557"}', "endpoint is '5557'; it must begin with tcp:// or ipc://"),
        ('{"replay_endpoint": "inproc://x"}', "replay_endpoint is 'inproc://x'"),
        ('{"publisher": "zmq"}', "add enable_kv_cache_events"),
    ],
)
def test_wrong_settings_are_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_kv_events_config(text)


# ---- the mirror ----


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([BlockStored([key_of(2)], key_of(1), [1, 2], 2, None, "GPU", None)], "is not there"),
        ([BlockRemoved([key_of(1)], "GPU")], "removed and not there"),
        ([BlockStored([key_of(1), key_of(1)], None, [1, 2, 3, 4], 2, None, "GPU", None)], "stored twice"),
        ([BlockStored([key_of(1)], None, [1], 2, None, "GPU", None)], "1 tokens for 1 pages of 2"),
        (
            [
                BlockStored([key_of(1), key_of(2)], None, [1, 2, 3, 4], 2, None, "GPU", None),
                BlockRemoved([key_of(1)], "GPU"),
            ],
            "others stand on it",
        ),
    ],
)
def test_the_mirror_takes_no_event_that_fits_no_tree(events: list[BlockStored | BlockRemoved], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PrefixMirror().apply([KVEventBatch(0.0, list(events))])


def test_a_clear_leaves_what_a_store_holds() -> None:
    mirror = PrefixMirror()
    stored = [BlockStored([key_of(1)], None, [1, 2] if medium == "GPU" else [], 2, None, medium, None) for medium in ("GPU", "CPU", "STORAGE")]  # fmt: skip
    mirror.apply([KVEventBatch(0.0, [*stored, AllBlocksCleared()])])
    assert [mirror.match([key_of(1)], medium) for medium in ("GPU", "CPU", "STORAGE")] == [0, 0, 1]
    mirror.apply([KVEventBatch(0.0, [stored[0]])])
    assert mirror.match([key_of(1), key_of(2)]) == 1
