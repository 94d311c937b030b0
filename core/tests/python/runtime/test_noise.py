"""The counter-based generator is Philox-4x32-10 and depends on nothing but its counter and key."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.builtin.kernels.noise import gumbel_at, gumbel_row, philox, uniform
from tokenspeed.runtime.reference_sampler import philox_words

# Known answers published with the algorithm (counter, key, output).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox(tuple(torch.tensor([w]) for w in counter), tuple(torch.tensor([w]) for w in key))
    assert tuple(int(w) for w in words) == expected
    assert philox_words(counter, key) == expected


def test_noise_of_a_row_does_not_depend_on_the_other_rows():
    seeds, positions = torch.tensor([7, -3, 2**62]), torch.tensor([0, 5, 9])
    together = gumbel_row(seeds, positions, 37)
    for i in range(3):
        assert torch.equal(together[i : i + 1], gumbel_row(seeds[i : i + 1], positions[i : i + 1], 37))
        assert torch.equal(uniform(seeds, positions)[i], uniform(seeds[i : i + 1], positions[i : i + 1])[0])


def test_noise_of_chosen_tokens_equals_that_of_the_whole_row():
    seeds, positions = torch.tensor([11, 12]), torch.tensor([3, 4])
    ids = torch.tensor([[0, 36, 5], [2, 2, 1]])
    assert torch.equal(gumbel_at(seeds, positions, ids), gumbel_row(seeds, positions, 37).gather(1, ids))


def test_noise_has_the_moments_of_a_gumbel_variable():
    noise = gumbel_row(torch.arange(20), torch.zeros(20, dtype=torch.int64), 5000)
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05
