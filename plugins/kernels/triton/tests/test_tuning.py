"""Tiles: whose they are, that they fit, and what is said of them."""

import argparse
import json

import pytest
from tokenspeed_plugin_kernels_triton.limits import shared_memory_limit
from tokenspeed_plugin_kernels_triton.search import candidates, compiled, processes, read_shape
from tokenspeed_plugin_kernels_triton.tuning import GemmConfig, Tuning, load_tuning, tells, tells_gated

from tokenspeed.errors import ConfigError, EngineError

BIG = {"us": 1.0, "bm": 16, "bn": 64, "bk": 256, "split_k": 1, "warps": 4, "stages": 4, "ahead": 3, "programs": 0}
SMALL = {**BIG, "us": 2.0, "bk": 64, "stages": 3}
LARGE, LITTLE = shared_memory_limit((9, 0)), shared_memory_limit((12, 0))


def record(**changes):
    shape = {"rows": 8, "n": 4096, "k": 4096, "gated": False, "best": [BIG, SMALL]}
    head = {"device": "Card A", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-29"}
    return {**head, "measured": [shape], **changes}


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(record()))
    return str(path)


def test_searched_tiles_are_taken_on_their_own_card_alone():
    searched, other = load_tuning("NVIDIA H200", LARGE), load_tuning("NVIDIA H100 80GB HBM3", LARGE)
    assert searched.gemm(8, 4096, 4096) == GemmConfig(16, 64, 128, 1, 4, 6, ahead=3)
    assert other.gemm(8, 4096, 4096) == GemmConfig(16, 64, 64, 1, 4, 3)
    assert (searched.device, other.device) == ("NVIDIA H200", "")


@pytest.mark.parametrize("capability", [(9, 0), (10, 3), (12, 0), (8, 9), (9, 4, 2), (9, 5, 0), ()])
@pytest.mark.parametrize("device", ["NVIDIA H200", "another"])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32])
def test_no_tile_needs_more_shared_memory_than_there_is(capability, device, rows):
    limit = shared_memory_limit(capability)
    tuning = load_tuning(device, limit)
    for n, k in ((6144, 4096), (4096, 12288), (151936, 4096), (100, 72)):
        assert tuning.gemm(rows, n, k).shared_bytes <= limit
    assert tuning.gemm(1, 24576, 4096, gated=True).shared_bytes <= limit


def test_the_best_that_fits_is_taken_and_what_did_not_is_kept_to_be_told():
    assert Tuning(record(), LARGE).gemm(8, 4096, 4096).bk == 256
    less = Tuning(record(), LITTLE)
    assert less.gemm(8, 4096, 4096).bk == 64
    assert [tile.bk for tile in less.refused] == [256]


def test_a_shape_without_a_tile_that_fits_is_as_one_that_was_not_searched():
    none = Tuning(record(measured=[{"rows": 8, "n": 64, "k": 64, "gated": False, "best": [BIG]}]), LITTLE)
    assert none.gemm(8, 64, 64) == Tuning(None, LITTLE).gemm(8, 64, 64)


def test_a_file_of_this_card_goes_before_the_packages_and_one_of_another_is_refused(kept):
    assert load_tuning("Card A", LARGE, kept).gemm(8, 4096, 4096).bk == 256
    with pytest.raises(ConfigError, match="are of Card A, this device is Card B"):
        load_tuning("Card B", LARGE, kept)


@pytest.mark.parametrize("text", ["{", "{}", "[]", json.dumps(record(measured=[{"n": 1}]))])
def test_a_file_that_the_search_did_not_write_is_refused_by_name(tmp_path, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tiles\.json: not written by `tokenspeed tune-gemm`"):
        load_tuning("Card A", LARGE, str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tuning("Card A", LARGE, str(tmp_path / "none.json"))


def test_it_is_told_whose_tiles_are_taken_and_which_are_refused(kept):
    shape = {"n": 6144, "k": 4096}
    there = tells((9, 0), "", shape, {})
    assert "on NVIDIA H200 (2026-11-29, torch 2.11.0, triton 3.6.0): 1 row 8x512;" in there
    assert "on a card that was not searched: 1 row 4x1024;" in there
    other = tells((12, 0), "", shape, {})
    assert "a program has 99 KiB" in other
    assert "those searched on NVIDIA H200 are for that card alone, and 10 of them would not fit" in other
    named = tells((9, 0), "cuda (NVIDIA H200, sm_90, 141 GiB); torch 2.11.0", shape, {})
    assert "not searched" not in named
    own = tells((12, 0), "", shape, {"tiles": kept})
    assert "on Card A (2026-11-29" in own
    assert "refused for want of shared memory: 64x256 in 4 stages (165 KiB)" in own
    assert "more rows: gemm.linear, then the activation" in tells_gated((9, 0), "", shape, {})


def test_the_search_tries_nothing_that_cannot_fit():
    shapes = [(4096, 4096, False)]
    for limit in (LARGE, LITTLE, 1 << 16):
        found = candidates(8, shapes, limit)
        assert found
        assert all(tile.shared_bytes <= limit for _, tile in found)
    assert len(candidates(8, shapes, LITTLE)) < len(candidates(8, shapes, LARGE))


def test_shapes_are_read_from_text():
    assert read_shape("24576x4096:gated") == (24576, 4096, True)
    assert read_shape("64x64") == (64, 64, False)
    for text in ("64", "64x", "65x64:gated", "64x64:fused", "8x64"):
        with pytest.raises(argparse.ArgumentTypeError, match="no shape"):
            read_shape(text)


def test_a_process_that_dies_ends_the_search(monkeypatch, capfd):
    """Its share was compared with nothing: a wrong tile must not be timed, let alone kept."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EngineError, match="2 of 2 processes that compile ended with 1"):
        compiled([1], [(16, 256, False)], 2)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(("free", "count"), [(0, 1), (8 << 30, 2), (140 << 30, 16)])
def test_no_more_processes_compile_than_the_device_has_memory_for(free, count):
    assert processes([(151936, 4096, False), (4096, 4096, False)], 16, free) == count
