"""``GET /version``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from litestar import get

__all__ = ["server_version", "version_route"]


def server_version() -> str:
    """Version of the installed core distribution."""
    try:
        return version("tokenspeed-core")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"


@get("/version")
async def version_route() -> dict[str, str]:
    """The server's version."""
    return {"version": server_version()}
