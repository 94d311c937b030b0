"""``format`` as regular expressions: XGrammar's own are not used, since what they let pass was not always of the format.

Each expression allows only texts of its format, and of those all that a program would write; what it leaves out is said beside it.

XGrammar follows groups that are counted slowly, and repeats within starred groups: each token has to be tried at every count. With 49,000 tokens a mask of
``(x|-x){0,30}`` takes 7 ms, and 0.5 ms where it is written out.
"""

from __future__ import annotations

from functools import cache

from tokenspeed_plugin_grammar_xgrammar.regex import Node
from tokenspeed_plugin_grammar_xgrammar.regex_parser import parse

__all__ = ["ENCODINGS", "FORMATS", "format_pattern"]

_YEAR = r"([1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_DATE = rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?"
_TIME = rf"{_CLOCK}(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LETTER = "[A-Za-z0-9]"


def _up_to(count: int, text: str) -> str:
    """``text{0,count}``, written out."""
    return f"({text}" * count + ")?" * count


_LABEL = _LETTER + _up_to(30, f"({_LETTER}|-{_LETTER})")  # two hyphens in a row stand for other scripts
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_H16 = r"[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [rf"({_H16}:){{7}}{_H16}", "::", rf"::{_H16}(:{_H16}){{0,6}}", rf"({_H16}:){{1,7}}:"]
    + [rf"({_H16}:){{{head}}}(:{_H16}){{1,{7 - head}}}" for head in range(1, 7)]
)
_PCHAR = r"A-Za-z0-9._~!$&'()*+,;=:@-"
_ESCAPED = "%[0-9A-F][0-9A-F]"
_QUERY = rf"([/?{_PCHAR}]|{_ESCAPED})*"
_PATH = rf"(/([/{_PCHAR}]|{_ESCAPED})*)?(\?{_QUERY})?(#{_QUERY})?"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,  # no leap second
    "date-time": rf"{_DATE}T{_TIME}",  # no leap second
    # Weeks stand alone; units in their order.
    "duration": r"P(\d{1,9}W|\d{1,9}Y(\d{1,9}M(\d{1,9}D)?)?(T\d{1,9}H)?|\d{1,9}M(\d{1,9}D)?|\d{1,9}D(T\d{1,9}H(\d{1,9}M(\d{1,9}S)?)?)?"
    r"|T(\d{1,9}H(\d{1,9}M(\d{1,9}S)?)?|\d{1,9}M(\d{1,9}S)?|\d{1,9}S))",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,16}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,3}}",  # no quoted names, no address literals
    "hostname": _HOST,  # at most four labels
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_IPV6})",  # no embedded IPv4 address, no zone
    # With an authority, without user and IPv6 host. A registered name may be of any length, unlike one of the DNS.
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://{_LETTER}({_LETTER}|[.-]{_LETTER})*(:[1-9]\d{{0,3}})?{_PATH}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "json-pointer": r"(/([^~]|~[01])*)?",
}


_SEXTET = "[A-Za-z0-9+/]"
#: ``contentEncoding`` in the same way.
ENCODINGS: dict[str, str] = {"base64": rf"({_SEXTET * 4})*({_SEXTET * 2}==|{_SEXTET * 3}=)?"}


@cache
def format_pattern(name: str) -> Node:
    """The tree of a name in ``FORMATS`` or ``ENCODINGS``."""
    return parse((FORMATS | ENCODINGS)[name], name)
