"""``python -m tokenspeed.engine``: one rank of the engine, started by ``engine.launch`` with its orders on standard input."""

from __future__ import annotations

import sys

from tokenspeed.engine.process import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer))
