"""The engine's sockets take what is there in bounded time, drop what is no message, and never wait for the reader."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokenspeed.engine.channel import LocalChannel, ZmqChannel
from tokenspeed.engine.rate_limit import RateLimitedLog
from tokenspeed.messages import AbortRequest, Outputs, StopRequest, decode_from_engine, encode


class Pair:
    """A channel and the server's sockets to it."""

    def __init__(self, folder: Path) -> None:
        addresses = [f"ipc://{folder}/in", f"ipc://{folder}/out"]
        self.channel = ZmqChannel(*addresses)
        self.context = zmq.Context()
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.push.connect(addresses[0])
        self.pull.connect(addresses[1])

    def take(self, count: int) -> list[object]:
        """Receive until ``count`` messages are there."""
        taken: list[object] = []
        while len(taken) < count:
            more = self.channel.receive(5)
            assert more, f"only {len(taken)} of {count} messages came"
            taken += more
        return taken


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.context.destroy(0)
    made.channel.close(0)


def test_messages_arrive_in_order_and_a_bad_frame_costs_only_itself(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pair.push.send(encode(AbortRequest(1)))
        for _ in range(50):
            pair.push.send(b"\x80\x04\x95pickle")
        pair.push.send(encode(Outputs([], None)))  # a message, but not for an engine
        pair.push.send(encode(StopRequest(2)))
        assert pair.take(2) == [AbortRequest(1), StopRequest(2)]
    assert pair.channel.bad_frames == 51
    assert len(caplog.records) == 1, "a flood of bad frames does not flood the log"


def test_a_flood_is_taken_in_portions(pair: Pair) -> None:
    for number in range(2000):
        pair.push.send(encode(AbortRequest(number)))
    first = pair.channel.receive(5)
    assert 0 < len(first) <= 512
    assert [m.rid for m in [*first, *pair.take(2000 - len(first))]] == list(range(2000))  # type: ignore[attr-defined]


def test_without_messages_it_waits_as_long_as_told(pair: Pair) -> None:
    assert pair.channel.receive(0) == []
    assert pair.channel.receive(0.01) == []


def test_sending_does_not_wait_for_a_reader_that_stands_still(pair: Pair) -> None:
    for _ in range(5000):
        pair.channel.send(Outputs([], None))
    assert decode_from_engine(pair.pull.recv()) == Outputs([], None)


def test_the_last_word_gives_up_where_no_server_is(tmp_path: Path) -> None:
    channel = ZmqChannel(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    channel.send_last(Outputs([], None))
    channel.close(0)


def test_a_local_channel_is_two_queues() -> None:
    channel = LocalChannel()
    channel.to_engine.extend(AbortRequest(i) for i in range(600))
    assert len(channel.receive(None)) == 512
    assert len(channel.receive(None)) == 88
    channel.send(Outputs([], None))
    assert list(channel.from_engine) == [Outputs([], None)]


def test_repeated_lines_are_counted_instead_of_logged(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog(logging.getLogger("limited"), interval_s=0.0)
    slow = RateLimitedLog(logging.getLogger("limited"), interval_s=60.0)
    for number in range(3):
        limited.warning("fault %d", number)
        slow.warning("other %d", number)
    assert [r.getMessage() for r in caplog.records] == ["fault 0", "other 0", "fault 1", "fault 2"]
