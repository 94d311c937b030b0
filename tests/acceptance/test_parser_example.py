"""The parser that the documentation writes passes the suite that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs/parsers.md"


def example() -> dict[str, Any]:
    text = DOCS.read_text().partition("## Writing one\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"__name__": "example"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, str(DOCS), "exec"), names)  # our own documentation
    return names


FOUND = example()
#: Each rule; how long they take is asked of the families.
TESTS = [
    name for name in dir(FOUND["TestFn"]) if name.startswith("test_") and not re.search("ten_thousand|time_is", name)
]


def test_the_example_is_there() -> None:
    assert FOUND["FnToolParser"].structural_tag([{"function": {"name": "f"}}], required=True, parallel=True)
    assert "test_what_a_structural_tag_lets_through_is_read_as_calls" in TESTS


@pytest.mark.parametrize("name", TESTS)
def test_the_documented_parser_passes_its_suite(name: str) -> None:
    getattr(FOUND["TestFn"](), name)()
