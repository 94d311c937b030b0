"""An empty value is quoted where a message names it."""

from __future__ import annotations

import socket

import pytest

from tokenspeed.errors import ConfigError
from tokenspeed.serving import sockets


def test_an_empty_host_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("nobody there")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(ConfigError, match="cannot listen on '':19240"):
        sockets._bind("", 19240, "--port")
