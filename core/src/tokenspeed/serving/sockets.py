"""Taking the ports. Imports nothing heavy, so that a conflict shows at once."""

from __future__ import annotations

import socket

from tokenspeed.config import ServingConfig
from tokenspeed.errors import ConfigError

__all__ = ["BACKLOG", "Sockets", "bind_sockets"]

#: Connections that may wait to be accepted.
BACKLOG = 1024


class Sockets:
    """The bound sockets of the API and the control port."""

    def __init__(self, api: socket.socket, control: socket.socket) -> None:
        self.api = api
        self.control = control

    @property
    def port(self) -> int:
        """Of the API."""
        return int(self.api.getsockname()[1])

    @property
    def control_port(self) -> int:
        """Of the control routes."""
        return int(self.control.getsockname()[1])

    def close(self) -> None:
        """Give both ports back."""
        self.api.close()
        self.control.close()


def bind_sockets(config: ServingConfig) -> Sockets:
    """Take both ports. Port 0 takes free ones.

    Raises:
        ConfigError: a port is in use or not allowed; names it.
    """
    api = _bind(config.host, config.port, "--port")
    try:
        wanted = (
            config.control_port if config.control_port is not None else (api.getsockname()[1] + 1 if config.port else 0)
        )
        return Sockets(api, _bind(config.control_host, wanted, "--control-port"))
    except ConfigError:
        api.close()
        raise


def _bind(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host or repr(host)}:{port}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host or repr(host)}:{port}: {error}; choose another with {flag}"
        ) from error
    return bound
