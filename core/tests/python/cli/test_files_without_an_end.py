"""Files of the command line are regular files: a device is refused by flag and path before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenspeed.cli.config_file import read_config_file
from tokenspeed.errors import ConfigError
from tokenspeed.model_tokenizer import check_tokenizer
from tokenspeed.plugins.kernel_times import KernelTimes


def test_devices_are_refused_by_flag_and_path(tmp_path: Path) -> None:
    device = os.devnull  # ends at once, so that a read that came first would be seen as another message
    with pytest.raises(ConfigError, match=f"--chat-template {device}: is no regular file"):
        check_tokenizer(None, chat_template=device)
    with pytest.raises(ConfigError, match=f"--tokenizer {device}: is neither a regular file nor a directory"):
        check_tokenizer(device)
    with pytest.raises(ConfigError, match=f"--kernel-times {device}: is no regular file"):
        KernelTimes.load(device, "")
    link = tmp_path / "settings.json"
    link.symlink_to(device)
    with pytest.raises(ConfigError, match=r"settings\.json: is no regular file"):
        read_config_file(link)


def test_files_beyond_a_sane_size_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError, match=r"--chat-template .* is larger than"):
        check_tokenizer(None, chat_template=str(large))
    with pytest.raises(ConfigError, match=r"--kernel-times .* is larger than"):
        KernelTimes.load(str(large), "")
