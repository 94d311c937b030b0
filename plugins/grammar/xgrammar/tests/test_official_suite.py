"""JSON Schema's own test suite: nothing that it calls invalid is accepted, and what is not enforced is refused by name.

The suite is not part of this repository. Its ``tests`` folder is also in jsonschema's source distribution::

    pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    JSON_SCHEMA_TEST_SUITE=jsonschema-VERSION/json pytest -m slow plugins/grammar/xgrammar/tests/test_official_suite.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_plugin_grammar_xgrammar.backend import XGrammarBackend
from tokenspeed_plugin_grammar_xgrammar.testing.walks import STOP, TINY

from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import CompiledGrammar, GrammarRequest

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


def spellings(value: Any) -> set[str]:
    return {json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":"))}


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    matcher = compiled.matcher()
    return all(matcher.accept(byte) for byte in text.encode("utf-8", "surrogatepass")) and matcher.accept(STOP)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_instance_is_accepted_and_every_refusal_names_a_keyword(draft: str) -> None:
    root = os.environ.get("JSON_SCHEMA_TEST_SUITE")
    if root is None:
        pytest.skip("JSON_SCHEMA_TEST_SUITE does not name a copy of the suite; the module's text says how to get one")
    backend, counts, wrong, unnamed = XGrammarBackend(TINY), Counter[str](), [], list[str]()
    for file in sorted((Path(root) / "tests" / draft).glob("**/*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            try:
                compiled = backend.compile(GrammarRequest(kind="json_schema", value=json.dumps(group["schema"])))
            except GrammarError as error:
                counts["refused"] += 1
                unnamed += [group["description"]] if "$" not in error.message else []
                continue
            counts["enforced"] += 1
            for case in group["tests"]:
                accepted = any(accepts(compiled, text) for text in spellings(case["data"]))
                counts["valid" if case["valid"] else "invalid"] += 1
                counts["valid taken"] += accepted and case["valid"]
                if accepted and not case["valid"]:
                    wrong.append((file.name, group["description"], case["description"]))
    print(f"\n{draft}: {dict(counts)}")
    assert not wrong
    assert not unnamed, "a refusal names the path of the keyword"
    assert counts["enforced"] > 100
    assert counts["valid taken"] > counts["valid"] / 3
