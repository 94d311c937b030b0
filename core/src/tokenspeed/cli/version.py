"""``tokenspeed version``: the version of core, and of each plugin contract that it speaks."""

from __future__ import annotations

import argparse
import json

from tokenspeed import __version__
from tokenspeed.plugins.registry import REGISTRATION_HOOKS
from tokenspeed.plugins.specs import Spec

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print JSON, with the version of each plugin contract")


def run(args: argparse.Namespace) -> int:
    """Print the version."""
    if args.json:
        contracts = {cls.KIND: cls.API for cls in REGISTRATION_HOOKS.values() if issubclass(cls, Spec)}
        print(json.dumps({"version": __version__, "contracts": contracts}, indent=2))
    else:
        print(f"tokenspeed {__version__}")
    return 0
