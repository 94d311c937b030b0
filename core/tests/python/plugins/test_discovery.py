"""Plugins are found without being imported; copies that can never be used are named; the result does not depend on the file system."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tokenspeed.plugins.discovery import discover
from tokenspeed.plugins.first_party import FIRST_PARTY
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.testing.plugins import PluginFolder


def test_an_entry_point_is_found_and_not_imported(folder: PluginFolder) -> None:
    module = folder.add("acme", "raise RuntimeError('imported')", version="2.1")
    (found,) = folder.discover().found
    assert (found.name, found.value, found.distribution, found.version) == ("acme", module, "dist-acme", "2.1")
    assert not found.first_party
    assert module not in sys.modules


def test_a_distribution_of_another_group_is_not_a_plugin(folder: PluginFolder) -> None:
    folder.write_metadata("other", "1.0", {})
    assert folder.discover().found == ()


def test_a_copy_later_on_the_path_is_named_as_shadowed(tmp_path: Path) -> None:
    first, second = PluginFolder(tmp_path / "a"), PluginFolder(tmp_path / "b")
    first.add("acme", "", version="1.0")
    second.add("acme", "", version="2.0")
    found = discover([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [one.version for one in found.found] == ["1.0"]
    (shadowed,) = found.shadowed
    assert (shadowed.version, shadowed.location) == ("2.0", str((tmp_path / "b").resolve()))
    assert str(tmp_path / "a") in shadowed.by


def test_of_two_versions_in_one_folder_the_newer_is_used_whatever_the_listing_order(folder: PluginFolder) -> None:
    for version in ("1.9", "1.10", "1.2"):
        folder.add("acme", "", version=version)
    found = folder.discover()
    assert [one.version for one in found.found] == ["1.10"]
    assert {copy.version for copy in found.shadowed} == {"1.9", "1.2"}


def test_one_folder_listed_twice_shadows_nothing(folder: PluginFolder) -> None:
    folder.add("acme", "")
    path = str(folder.path)
    assert discover([path, path + "/", path]).shadowed == ()


def test_differently_spelt_names_are_one_distribution(tmp_path: Path) -> None:
    first, second = PluginFolder(tmp_path / "a"), PluginFolder(tmp_path / "b")
    first.add("acme", "", distribution="Dist_Acme")
    second.add("acme", "", distribution="dist-acme")
    assert len(discover([str(tmp_path / "a"), str(tmp_path / "b")]).found) == 1


def test_first_party_is_a_list_of_the_plugins_in_this_repository() -> None:
    """A plugin that is added to ``plugins/`` and forgotten here would never be chosen automatically."""
    plugins = Path(__file__).resolve().parents[4] / "plugins"
    if not plugins.is_dir():
        pytest.skip("the tests were taken out of the repository")
    projects = [*plugins.glob("*/pyproject.toml"), *plugins.glob("*/*/pyproject.toml")]
    shipped = {tomllib.loads(path.read_text())["project"]["name"] for path in projects}
    assert shipped - FIRST_PARTY == set()


def test_a_message_names_only_folders_that_hold_distributions(folder: PluginFolder, tmp_path: Path) -> None:
    folder.add("acme", "")
    (tmp_path / "empty").mkdir()
    told = discover([str(tmp_path / "empty"), str(folder.path), str(tmp_path / "python.zip")]).where()
    assert told.endswith(f"of the distributions in {folder.path.resolve()}")


def test_of_three_letters_two_alike_are_no_hint() -> None:
    assert did_you_mean("tpu", ["cpu", "cuda"]) == ""
    assert "'cuda'" in did_you_mean("cud", ["cpu", "cuda"])
