"""``--kv-events-config``: a JSON object with the field names that vLLM uses."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenspeed.config import EngineConfig
from tokenspeed.errors import ConfigError

__all__ = ["LOOPBACK", "KVEventsConfig", "binds", "check_kv_events", "kv_events_of", "parse_kv_events_config"]

_FLAG = "--kv-events-config"
#: The largest number that ZeroMQ takes for a queue.
_MOST = 2**31 - 1
#: Where events are published unless an endpoint is given.
LOOPBACK = "tcp://127.0.0.1:5557"


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the publisher.

    Attributes:
        enable_kv_cache_events: record events at all.
        publisher: ``zmq`` sends them, ``null`` does not; ``None`` is ``zmq`` where events are enabled.
        endpoint: of the PUB socket. It binds where the address has a ``*`` or ``::``, and for ``ipc://``; otherwise it connects. ``None`` binds
            ``LOOPBACK``: events hold the tokens of every prompt, and other hosts read them only where an address says so.
        replay_endpoint: of the socket that answers with past batches; ``None`` for none. It always binds.
        buffer_steps: past batches kept for that.
        hwm: messages kept for a subscriber that does not keep up, before further ones are lost to it; 0 for no bound.
        max_queue_size: batches on their way to the publisher's thread; further ones are dropped, which subscribers see by the numbers.
        topic: first frame of every message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Events are recorded and sent."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events_config(text: str) -> KVEventsConfig:
    """The settings in ``text``.

    Raises:
        ConfigError: not a JSON object, an unknown field, a value of the wrong type or range; the message names it.
    """
    try:
        config = msgspec.json.decode(text, type=KVEventsConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(KVEventsConfig.__struct_fields__)
        raise ConfigError(f"{_FLAG}: {error}; its fields are {fields}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f'{_FLAG}: {error}; it is a JSON object such as {{"enable_kv_cache_events": true}}') from None
    for name, least in (("buffer_steps", 1), ("hwm", 0), ("max_queue_size", 1)):
        if not least <= (value := getattr(config, name)) <= _MOST:
            need = f"at least {least}" if value < least else f"at most {_MOST}"
            raise ConfigError(f"{_FLAG}: {name} is {value}; it must be {need} (accepted: {least} to {_MOST})")
    for name in ("endpoint", "replay_endpoint"):
        address: str | None = getattr(config, name)
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"{_FLAG}: {name} is {address!r}; it must begin with tcp:// or ipc://")
        if address is not None and address.startswith("tcp://"):
            port = address.rpartition(":")[2]
            if port != "*" and not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
                raise ConfigError(f"{_FLAG}: {name} is {address!r}; a tcp:// address ends in a port, 0 to 65535 or *")
    if config.publisher == "zmq" and not config.enable_kv_cache_events:
        raise ConfigError(
            f"{_FLAG}: publisher is zmq but no events are recorded; add enable_kv_cache_events, or leave publisher out"
        )
    return config


def binds(endpoint: str) -> bool:
    """Whether the publisher binds an endpoint that is given; otherwise it connects."""
    return endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint


def kv_events_of(config: EngineConfig) -> KVEventsConfig | None:
    """The settings of an engine's events; ``None`` where it records none."""
    events = parse_kv_events_config(config.kv_events_config) if config.kv_events_config is not None else None
    return events if events is not None and events.publishes else None


def check_kv_events(text: str, *, prefix_caching: bool) -> None:
    """Raises ``ConfigError`` where ``text`` is wrong, or asks for events of a cache that there is not."""
    if parse_kv_events_config(text).publishes and not prefix_caching:
        raise ConfigError(f"{_FLAG} asks for events of the prefix cache, which --no-enable-prefix-caching switches off")
