"""The scanner finds markers however the text is cut, and holds nothing back that cannot become one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.interfaces.parsing import Markers, Scanner, last_marker

MARKERS = Markers(("<a>", "<ab>", "</a>", "\n<a>", "[A]"))


def tokens(pieces: list[str]) -> list[tuple[str, str]]:
    """All (text, marker) pairs, neighbouring texts joined."""
    scan, found, text = Scanner(), [], ""
    for piece in [*pieces, None]:
        if piece is None:
            scan.closed = True
        else:
            scan.append(piece)
        while True:
            before, marker = scan.until(MARKERS)
            text += before
            if not marker:
                break
            found.append((text, marker))
            text = ""
    return [*found, (text, "")]


@given(
    st.lists(
        st.sampled_from(["<a>", "<ab>", "</a>", "\n<a>", "[A]", "<", "a", "b", ">", "/", "\n", "[", "x"]), max_size=20
    )
)
def test_any_partition_finds_the_same(parts: list[str]) -> None:
    text = "".join(parts)
    assert tokens(list(text)) == tokens([text])


def test_the_longer_marker_is_meant() -> None:
    """At one place the longer one wins, and a marker that may grow is awaited."""
    markers = Markers(("<a", "<ab"))
    scan = Scanner()
    scan.append("x<a")
    assert scan.until(markers) == ("x", "")
    scan.append("b")
    assert scan.until(markers) == ("", "<ab")


@pytest.mark.parametrize("text", ["a < b", "<<", "[1, 2]", "<x", "\n\n"])
def test_only_a_possible_beginning_is_held(text: str) -> None:
    """What is held back is a proper beginning of a marker, and the end of the text releases it."""
    scan = Scanner()
    scan.append(text)
    before, _ = scan.until(MARKERS)
    held = text[len(before) :]
    assert held == "" or any(marker.startswith(held) for marker in MARKERS.texts)
    scan.closed = True
    assert before + scan.until(MARKERS)[0] == text


def test_a_set_needs_markers() -> None:
    with pytest.raises(ValueError, match="marker"):
        Markers(())


def test_the_last_marker_counts() -> None:
    assert last_marker("<a> x </a> y", ("<a>", "</a>")) == ("</a>", 10)
    assert last_marker("nothing", ("<a>",)) == ("", 0)
