"""The load client's decoders: any cut of the bytes gives the same result, and a broken peer is an error."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.benchmark.wire import ResponseDecoder, SseDecoder, Target, WireError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
BODY = b'data: {"a": 1}\n\n: comment\n\ndata: [DONE]\n\n'


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces)
        + b"0\r\n\r\n"
    )


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(size=st.integers(1, 50), places=st.lists(st.integers(0, 10_000), max_size=12))
def test_a_chunked_body_survives_any_cut(size: int, places: list[int]) -> None:
    decoder = ResponseDecoder()
    body = b"".join(decoder.feed(piece) for piece in cut(chunked(BODY, size), places))
    assert body == BODY
    assert decoder.done
    assert decoder.status == 200
    decoder.end()


@given(places=st.lists(st.integers(0, 10_000), max_size=12))
def test_events_survive_any_cut(places: list[int]) -> None:
    decoder = SseDecoder()
    assert [event for piece in cut(BODY, places) for event in decoder.feed(piece)] == [b'{"a": 1}', b"[DONE]"]


def test_a_body_of_known_length_ends_without_the_connection() -> None:
    decoder = ResponseDecoder()
    assert decoder.feed(b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nabc") == b"abc"
    assert (decoder.status, decoder.done) == (400, True)


def test_a_body_of_unknown_length_ends_with_the_connection() -> None:
    decoder = ResponseDecoder()
    assert decoder.feed(HEAD + b"\r\nabc") == b"abc"
    assert not decoder.done
    decoder.end()
    assert decoder.done


@pytest.mark.parametrize("sent", [b"", HEAD, chunked(BODY, 10)[:-6], HEAD + b"content-length: 9\r\n\r\nabc"])
def test_a_connection_that_ends_early_is_an_error(sent: bytes) -> None:
    decoder = ResponseDecoder()
    decoder.feed(sent)
    with pytest.raises(WireError, match="in the middle"):
        decoder.end()


@pytest.mark.parametrize(
    "sent", [b"SSH-2.0-x\r\n\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"x" * 70_000]
)
def test_a_peer_that_speaks_something_else_is_an_error(sent: bytes) -> None:
    with pytest.raises(WireError):
        ResponseDecoder().feed(sent)


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("http://127.0.0.1:8000/v1/", "127.0.0.1", 8000, False, ""),
        ("localhost:9", "localhost", 9, False, ""),
        ("https://example.org/llm/v1", "example.org", 443, True, "/llm"),
        ("http://[::1]:80", "::1", 80, False, ""),
    ],
)
def test_addresses_are_read_with_and_without_v1(url: str, host: str, port: int, tls: bool, prefix: str) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.tls, target.prefix) == (host, port, tls, prefix)


def test_an_address_of_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="not an http address"):
        Target.parse("ftp://x")


def test_the_request_names_its_host_and_key() -> None:
    request = Target.parse("http://[::1]:80", "k").request("POST", "/v1/completions", b"{}")
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: [::1]:80\r\nauthorization: Bearer k\r\n")
    assert request.endswith(b"content-length: 2\r\nconnection: close\r\n\r\n{}")
