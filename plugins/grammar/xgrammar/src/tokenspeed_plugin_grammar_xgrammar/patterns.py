"""Patterns of JSON strings as rules of the grammar.

XGrammar 0.2.9 builds its own automaton for ``pattern`` and ``propertyNames`` and merges states that differ: ``a(qa+)?`` takes ``aa``, ``x|xx?`` any number
of ``x``. The rules that it makes of a plain regular expression are right. So a schema is turned into a grammar with a mark for each pattern, and the marks
are replaced by those rules.
"""

from __future__ import annotations

import re
from typing import Any

import xgrammar

__all__ = ["Marks"]

_MARK = re.compile(r'Regex\("@mark(\d+)@"(?:, *\w+=\w+)*\)')
# Written with two digits and read with as many as follow.
_SHORT_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)
_NAME = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|([A-Za-z_][\w.-]*)')
_DEFINED = re.compile(r"^([A-Za-z_][\w.-]*) ::=", re.MULTILINE)


def _renamed(grammar: str, prefix: str, *, keep_root: bool) -> str:
    """The text of a grammar with other names for its rules: XGrammar gives rules that it makes while reading names that others may have already, such as
    ``root_1``, so that none of those that are written ends in a number."""
    defined = {name: f"{prefix}{name}_r" for name in _DEFINED.findall(grammar)}
    if keep_root:
        defined["root"] = "root"
    return _NAME.sub(lambda token: defined.get(token[1], token[0]) if token[1] else token[0], grammar)


class Marks:
    """Patterns of one grammar, and the marks that stand for them."""

    def __init__(self) -> None:
        self.patterns: dict[str, int] = {}

    def set(self, core: Any) -> Any:
        """``core`` with a mark for every pattern."""
        if isinstance(core, list):
            return [self.set(item) for item in core]
        if not isinstance(core, dict) or "enum" in core:
            return core
        out: dict[str, Any] = {}
        for key, value in core.items():
            if key == "pattern":
                out[key] = f"@mark{self.patterns.setdefault(value, len(self.patterns))}@"
            else:
                # Names of properties and definitions are no keywords.
                out[key] = (
                    {name: self.set(inner) for name, inner in value.items()}
                    if key in ("properties", "$defs")
                    else self.set(value)
                )
        return out

    def resolve(self, grammar: xgrammar.Grammar) -> str:
        """The text of ``grammar`` with the rules of each pattern in place of its mark.

        Raises:
            RuntimeError: a mark is not found where XGrammar should have left it.
        """
        text, replaced = _MARK.subn(lambda mark: f"mark{mark[1]}_root_r", _renamed(str(grammar), "", keep_root=True))
        if "@mark" in text or not replaced:
            raise RuntimeError("XGrammar wrote a pattern in an unknown way")
        parts = [
            _renamed(str(xgrammar.Grammar.from_regex(pattern)), f"mark{index}_", keep_root=False)
            for pattern, index in self.patterns.items()
        ]
        parts.insert(0, text)
        return _SHORT_ESCAPE.sub(lambda escape: f"\\u00{escape[1]}" if escape[1] else escape[0], "\n".join(parts))
