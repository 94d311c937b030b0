"""Sessions: whose turn a request is, and how long its pages are kept for the next one. From the body or from headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from tokenspeed.errors import RequestError

__all__ = ["MAX_RETAIN_S", "NO_SESSION", "Session", "check_session_id", "session_number", "session_of"]

#: The longest time that a request may ask for, in seconds.
MAX_RETAIN_S = 3600

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NUMBER = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?")


class Session(NamedTuple):
    """The engine's form: a number that stands for id and tenant, -1 for none, and microseconds."""

    number: int = -1
    retain_us: int = 0


#: Of a request that belongs to none.
NO_SESSION = Session()


def session_number(session_id: str, salt: bytes) -> int:
    """63 bits of a hash (BLAKE2b) of the tenant's salt and the id: the same in every process, and nobody finds a session without its salt."""
    hashed = hashlib.blake2b(session_id.encode(), digest_size=8, key=hashlib.blake2b(salt).digest(), person=b"session")
    return int.from_bytes(hashed.digest(), "little") >> 1


def check_session_id(session_id: str, param: str = "session_id") -> None:
    """Raises ``RequestError`` for an id that could not stand in a header and a path."""
    if not _ID.fullmatch(session_id):
        raise RequestError(
            f"{param}: 1 to 128 letters, digits and ._:-, a letter or digit first; got {session_id[:40]!r}", param=param
        )


def session_of(
    headers: Mapping[str, str],
    session_id: str | None,
    retain_s: float | None,
    *,
    salt: bytes,
    choices: int,
    cached: bool,
) -> Session:
    """The session of a request.

    Args:
        headers: of the request, names in lower case: ``x-session-id`` and ``x-retain-s`` stand for the fields.
        session_id, retain_s: of the body.
        choices: how many answers it asks for; a session goes on from one.
        cached: the engine keeps prefixes at all.

    Raises:
        RequestError: naming the field or header.
    """
    given_id, given_s = headers.get("x-session-id"), headers.get("x-retain-s")
    if given_id is not None:
        check_session_id(given_id, "X-Session-Id")
        if session_id not in (None, given_id):
            raise RequestError(
                "session_id and the header X-Session-Id contradict each other; give one", param="session_id"
            )
        session_id = given_id
    if given_s is not None:
        if not _NUMBER.fullmatch(given_s) or float(given_s) > MAX_RETAIN_S:
            raise RequestError(
                f"X-Retain-S: must be seconds in 0..{MAX_RETAIN_S}, got {given_s[:40]!r}", param="X-Retain-S"
            )
        if retain_s not in (None, float(given_s)):
            raise RequestError("retain_s and the header X-Retain-S contradict each other; give one", param="retain_s")
        retain_s = float(given_s)
    if session_id is None:
        if retain_s is not None:
            raise RequestError("retain_s: needs session_id, which says whose pages are kept", param="retain_s")
        return NO_SESSION
    check_session_id(session_id)
    if not cached:
        raise RequestError(
            "session_id: this server keeps no prefixes (--no-enable-prefix-caching), so that there is nothing to keep for a session",
            param="session_id",
            code="unsupported_parameter",
        )
    if choices != 1:
        raise RequestError(
            f"session_id: a session goes on from one answer, and {choices} are asked for; ask for one prompt with n 1",
            param="session_id",
        )
    return Session(session_number(session_id, salt), round((retain_s or 0) * 1e6))
