"""``tokenspeed plugins``: list, show and check what is installed. Loads no model and no torch."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections import Counter
from typing import Any

from tokenspeed.cli.arguments import add_plugin_arguments, plugin_settings
from tokenspeed.cli.table import columns
from tokenspeed.errors import ConfigError
from tokenspeed.plugins.discovery import Shadowed
from tokenspeed.plugins.manager import PluginHost, PluginRecord
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.options import resolve_options
from tokenspeed.plugins.registry import Contribution, spec_key
from tokenspeed.plugins.requirements import missing_requirements
from tokenspeed.plugins.specs import CommandSpec, OptionSpec, Spec

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="plugins_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="every installed plugin and its state")
    show = commands.add_parser("show", help="one plugin: contributions, options, where it is")
    show.add_argument("name", metavar="PLUGIN")
    doctor = commands.add_parser("doctor", help="check plugins and their surroundings")
    doctor.add_argument("name", nargs="?", metavar="PLUGIN", help="check only this one")
    for command in (listing, show, doctor):
        add_plugin_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run a sub-command; ``doctor`` returns 1 when something is wrong."""
    text, given, source = plugin_settings(args)
    host = PluginHost.load(text, source=source, strict=False)
    if args.plugins_command == "list":
        return _list(host, args.json)
    if args.plugins_command == "show":
        return _show(_known(host, args.name), host, given, args.json)
    from tokenspeed.cli.doctor import examine

    findings = examine(host, given, _known(host, args.name).name if args.name else None)
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        for finding in findings:
            print(f"{finding['status']:<8} {finding['plugin']}: {finding['what']}")
            if finding["advice"]:
                print(f"{'':<8}   {finding['advice']}")
    return 1 if any(finding["status"] == "error" for finding in findings) else 0


def _known(host: PluginHost, name: str) -> PluginRecord:
    if name not in host.records:
        raise ConfigError(
            f"no plugin named {name!r} is installed{did_you_mean(name, host.records)}\nlooked in {host.discovery.where()}"
        )
    return host.records[name]


def _contributes(record: PluginRecord) -> str:
    kinds = Counter(c.spec.KIND for c in record.contributions)
    parts = []
    for kind, amount in kinds.items():
        names = [c.spec.name for c in record.contributions if kind == c.spec.KIND]
        parts.append(f"{kind} {', '.join(names)}" if amount <= 3 else f"{amount} {kind}s")
    return "; ".join(parts)


def _list(host: PluginHost, as_json: bool) -> int:
    records = sorted(host.records.values(), key=lambda record: record.name)
    if as_json:
        plain = {
            "plugins": [_plain(record) for record in records],
            "shadowed": [_plain_shadowed(copy) for copy in host.discovery.shadowed],
        }
        print(json.dumps(plain, indent=2))
        return 0
    rows = [(r.name, r.version, r.status + (" (named)" if r.named else ""), _contributes(r)) for r in records]
    print(columns(("PLUGIN", "VERSION", "STATE", "CONTRIBUTES"), rows))
    for record in records:
        if record.status == "broken":
            print(f"\n{record.name} is broken: {record.cause}")
    for copy in host.discovery.shadowed:
        print(f"\n{copy.distribution} {copy.version} in {copy.location} is not used: shadowed by {copy.by}")
    return 0


def _plain(record: PluginRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "location": record.location,
        "module": record.value,
        "status": record.status,
        "named": record.named,
        "first_party": record.first_party,
        "cause": record.cause,
        "needed_by": list(record.needed_by),
        "load_ms": round(record.load_s * 1e3, 3),
        "hooks": list(record.hooks),
        "contributions": [_plain_contribution(c) for c in record.contributions if not isinstance(c.spec, OptionSpec)],
    }


def _plain_contribution(c: Contribution[Any]) -> dict[str, Any]:
    spec: Spec | CommandSpec = c.spec
    plain: dict[str, Any] = {"kind": spec.KIND, "name": spec_key(spec), "target": spec.target}
    if isinstance(spec, Spec):
        plain |= {
            "priority": c.priority.name,
            "platforms": list(spec.platforms),
            "requires": list(spec.requires),
            "needs": list(spec.needs),
            "opt_in": spec.opt_in,
            "description": spec.description,
            "off": "; ".join([*([c.off] if c.off else []), *missing_requirements(spec.requires)]),
        }
    return plain


def _plain_shadowed(copy: Shadowed) -> dict[str, str]:
    return {"distribution": copy.distribution, "version": copy.version, "location": copy.location, "by": copy.by}


def _show(record: PluginRecord, host: PluginHost, given: dict[str, str], as_json: bool) -> int:
    plain = _plain(record)
    values = resolve_options(host.registry.specs("option"), given, host.records).get(record.name, {})
    declared = [c.spec for c in record.contributions if isinstance(c.spec, OptionSpec)]
    plain["options"] = [
        {
            "name": o.name,
            "type": o.type.__name__,
            "default": o.default,
            "value": values.get(o.name, o.default),
            "help": o.help,
        }
        for o in declared
    ]
    if as_json:
        print(json.dumps(plain, indent=2))
        return 0
    for key in ("name", "distribution", "version", "location", "module", "status", "first_party", "named"):
        print(f"{key:<13} {plain[key]}")
    for key in ("needed_by", "hooks"):
        print(f"{key:<13} {', '.join(plain[key]) or 'none'}")
    for item in plain["contributions"]:
        print(f"\n{item['kind']} {item['name']}\n  target      {item['target']}")
        for key in ("priority", "platforms", "requires", "needs", "opt_in", "description", "off"):
            value = item.get(key)
            if value:
                print(f"  {key:<11} {', '.join(value) if isinstance(value, list) else value}")
    for option in plain["options"]:
        print(f"\noption {record.name}.{option['name']} ({option['type']}) = {option['value']}\n  {option['help']}")
    if record.error is not None:
        print(f"\nbroken: {record.cause}\n")
        traceback.print_exception(record.error, file=sys.stdout)
    return 0
