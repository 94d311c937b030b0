"""End tokens are found wherever a checkpoint names them."""

from __future__ import annotations

import pytest

from tokenspeed.engine.end_tokens import end_token_ids


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
