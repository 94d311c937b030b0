"""``GET /version``."""

from __future__ import annotations

from litestar import get

from tokenspeed import __version__

__all__ = ["version_route"]


@get("/version")
async def version_route() -> dict[str, str]:
    """The server's version."""
    return {"version": __version__}
