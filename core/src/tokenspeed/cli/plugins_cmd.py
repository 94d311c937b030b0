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
from tokenspeed.cli.usability import Usability
from tokenspeed.errors import ConfigError
from tokenspeed.plugins.discovery import Shadowed
from tokenspeed.plugins.manager import PluginHost, PluginRecord
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.options import resolve_options
from tokenspeed.plugins.registry import Contribution, spec_key
from tokenspeed.plugins.specs import CommandSpec, OptionSpec, Spec

__all__ = ["add_arguments", "run"]

#: Kinds whose candidates are ranked; what only a name chooses has a priority that nobody reads.
_RANKED = ("model", "platform", "attention_backend", "grammar_backend", "kernel")
_SHOWN = (
    "aliases",
    "architectures",
    "priority",
    "platforms",
    "requires",
    "needs",
    "opt_in",
    "description",
    "off",
)
_PHRASES = {"partial": "usable in part", "unusable": "not usable here"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="plugins_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="every installed plugin, its state and what is in its way")
    show = commands.add_parser("show", help="one plugin: contributions, options, where it is")
    show.add_argument("name", metavar="PLUGIN")
    doctor = commands.add_parser("doctor", help="check plugins and their surroundings")
    doctor.add_argument("name", nargs="*", metavar="PLUGIN", help="check only these")
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

    findings = examine(host, given, [_known(host, name).name for name in args.name])
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
        distinct = len(set(names)) == amount  # a solution's kernels all have its name
        parts.append(f"{kind} {', '.join(names)}" if amount <= 3 and distinct else f"{amount} {kind}s")
    return "; ".join(parts)


def _state(record: PluginRecord, usability: Usability) -> str:
    """The column STATE: one word, and in brackets how automatic choice regards the plugin where that is not the usual way."""
    status, _ = usability.state(record)
    offered = [c for c in record.contributions if isinstance(c.spec, Spec)]
    if record.named:
        return f"{status} (named)"
    return f"{status} (when asked)" if status == "active" and offered and not offered[0].automatic else status


def _list(host: PluginHost, as_json: bool) -> int:
    usability = Usability(host)
    records = sorted(host.records.values(), key=lambda record: record.name)
    if as_json:
        plain = {
            "plugins": [_plain(record, usability) for record in records],
            "shadowed": [_plain_shadowed(copy) for copy in host.discovery.shadowed],
        }
        print(json.dumps(plain, indent=2))
        return 0
    rows = [(r.name, r.version, _state(r, usability), _contributes(r)) for r in records]
    print(columns(("PLUGIN", "VERSION", "STATE", "CONTRIBUTES"), rows))
    states = {record.name: usability.state(record) for record in records}
    notes = [f"{name} is {_PHRASES.get(state, state)}: {cause}" for name, (state, cause) in states.items() if cause]
    for copy in host.discovery.shadowed:
        notes.append(f"{copy.distribution} {copy.version} in {copy.location} is not used: shadowed by {copy.by}")
    if notes:
        print("", *notes, sep="\n")
    return 0


def _plain(record: PluginRecord, usability: Usability) -> dict[str, Any]:
    status, cause = usability.state(record)
    shown = [c for c in record.contributions if not isinstance(c.spec, OptionSpec)]
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "location": record.location,
        "module": record.value,
        "status": status,
        "named": record.named,
        "first_party": record.first_party,
        "cause": cause,
        "needed_by": list(record.needed_by),
        "load_ms": round(record.load_s * 1e3, 3),
        "hooks": list(record.hooks),
        "contributions": [_plain_contribution(c, usability) for c in shown],
    }


def _plain_contribution(c: Contribution[Any], usability: Usability) -> dict[str, Any]:
    spec: Spec | CommandSpec = c.spec
    plain: dict[str, Any] = {"kind": spec.KIND, "name": spec_key(spec), "target": spec.target}
    if isinstance(spec, Spec):
        further = {name: list(getattr(spec, name)) for name in ("aliases", "architectures") if hasattr(spec, name)}
        plain |= further | {
            "priority": c.priority.name,
            "platforms": list(spec.platforms),
            "requires": list(spec.requires),
            "needs": list(spec.needs),
            "opt_in": spec.opt_in,
            "description": spec.description,
            "off": usability.fault(c),
        }
    return plain


def _plain_shadowed(copy: Shadowed) -> dict[str, str]:
    return {"distribution": copy.distribution, "version": copy.version, "location": copy.location, "by": copy.by}


def _show(record: PluginRecord, host: PluginHost, given: dict[str, str], as_json: bool) -> int:
    plain = _plain(record, Usability(host))
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
        print(f"\n{item['kind']} {item['name']}\n  {'target':<13} {item['target']}")
        for key in _SHOWN:
            value = item.get(key)
            if value and (key != "priority" or item["kind"] in _RANKED):
                print(f"  {key:<13} {', '.join(value) if isinstance(value, list) else value}")
    for option in plain["options"]:
        print(f"\noption {record.name}.{option['name']} ({option['type']}) = {option['value']}\n  {option['help']}")
    if plain["cause"]:
        print(f"\n{_PHRASES.get(plain['status'], plain['status'])}: {plain['cause']}")
    if record.error is not None:
        print()
        traceback.print_exception(record.error, file=sys.stdout)
    return 0
