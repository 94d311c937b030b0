"""The committed stub names exactly what the extension has."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from pathlib import Path

from tokenspeed import _scheduler

STUB = Path(__file__).parents[3] / "src" / "tokenspeed" / "_scheduler.pyi"
Members = dict[str, dict[str, list[str]]]


def declared() -> Members:
    """Class -> member -> parameter names (without self), from the stub."""
    result: Members = {}
    for node in ast.parse(STUB.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        members: dict[str, list[str]] = {}
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                members[item.name] = [arg.arg for arg in (*item.args.args, *item.args.kwonlyargs)][1:]
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                members[item.targets[0].id] = [ast.unparse(item.value)]
        result[node.name] = members
    return result


def parameters(function: object) -> list[str]:
    """Parameter names of a bound method, from the signature that the binding writes into its docstring."""
    line = (inspect.getdoc(function) or "").splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(") ->")]
    names = re.findall(r"(?:^|, )\*?(\w+):", inside)
    return [name for name in names if name != "self"]


def built() -> Members:
    """The same as `declared`, from the extension."""
    result: Members = {}
    for name, cls in vars(_scheduler).items():
        if not inspect.isclass(cls):
            continue
        if issubclass(cls, enum.Enum):
            result[name] = {member.name: [str(int(member.value))] for member in cls}
            continue
        members: dict[str, list[str]] = {}
        for attribute, value in vars(cls).items():
            if attribute == "__init__" and not (inspect.getdoc(value) or "").startswith("Initialize self"):
                members[attribute] = parameters(value)
            elif attribute.startswith("_"):
                continue
            elif isinstance(value, property):
                members[attribute] = []
            else:
                members[attribute] = parameters(value)
        result[name] = members
    return result


def test_stub_and_extension_have_the_same_classes_members_and_parameters() -> None:
    stub, extension = declared(), built()
    assert set(stub) == set(extension)
    for name in stub:
        assert stub[name] == extension[name], name


def test_stub_defaults_are_those_of_the_extension() -> None:
    config = next(
        node
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "SchedulerConfig"
    )
    init = next(node for node in config.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    plain = {
        arg.arg: ast.literal_eval(default)
        for arg, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
        if default is not None and not (isinstance(default, ast.Constant) and default.value is ...)
    }
    group = _scheduler.CacheGroupConfig(page_size=16, num_pages=8)
    made = _scheduler.SchedulerConfig(groups=[group], max_num_seqs=1, max_batched_tokens=8, max_model_len=32)
    assert plain == {name: getattr(made, name) for name in plain}
    assert len(plain) >= 7
