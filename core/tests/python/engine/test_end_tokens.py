"""End tokens are found wherever a checkpoint names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenspeed.engine.end_tokens import end_token_ids, tokenizer_end_ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 9]}, {2, 7, 9}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [4]}}, {"eos_token_id": None}, {4}),
    ],
)
def test_ids_come_from_every_place(config, generation, expected):
    assert end_token_ids(config, generation) == expected


@pytest.mark.parametrize("eos", ["<|turn|>", {"content": "<|turn|>", "special": True}])
def test_gram_07_the_tokenizers_end_counts_too(tmp_path: Path, eos: object) -> None:
    added = [{"id": 3, "content": "</s>", "special": True}, {"id": 7, "content": "<|turn|>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 0}}}))
    assert tokenizer_end_ids(tmp_path) == frozenset()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "chat_template": "x"}))
    assert tokenizer_end_ids(tmp_path) == {7}
    assert tokenizer_end_ids(tmp_path / "nowhere") == frozenset()
