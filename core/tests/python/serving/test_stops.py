"""Stop strings: hold back what may still match, lose nothing, find the first end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.serving.stops import StopMatcher


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + (matcher.finish() if matcher.matched is None else ""), matcher.matched


@pytest.mark.parametrize(
    ("pieces", "want"),
    [(["ab", "c STO", "P", "PED"], ("abc ", "STOPPED")), (["ab", "c STO", "RM"], ("abc STORM", None))],
)
def test_api_04_prefixes_are_held_back_until_they_are_decided(pieces: list[str], want: tuple[str, str | None]) -> None:
    """api-04: the two runs of the report."""
    assert run(["STOPPED"], pieces) == want


def test_only_true_prefixes_are_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("no match S") == "no match "
    assert matcher.feed("O ") == "SO "


def test_the_matched_string_stays_when_asked_for() -> None:
    assert run(["END"], ["a E", "ND b"], include=True) == ("a END", "END")


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_any_cut_of_the_text_gives_what_a_plain_search_gives(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, "".join(pieces))


def test_repeated_near_matches_take_linear_time() -> None:
    stops = ["a" * 1000 + "b", "a" * 999 + "c"]
    begin = time.process_time()
    run(stops, ["a"] * 20_000)
    assert time.process_time() - begin < 1.0
