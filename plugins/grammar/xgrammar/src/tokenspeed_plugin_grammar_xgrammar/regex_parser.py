"""Reads regular expressions by ECMAScript's rules into the tree of ``regex``; what XGrammar could not keep is refused by name."""

from __future__ import annotations

import re

from tokenspeed.errors import GrammarError
from tokenspeed_plugin_grammar_xgrammar import charsets
from tokenspeed_plugin_grammar_xgrammar.charsets import Ranges
from tokenspeed_plugin_grammar_xgrammar.limits import MAX_DEPTH, MAX_REGEX_CHARS, MAX_REGEX_SIZE, refuse
from tokenspeed_plugin_grammar_xgrammar.regex import Alt, Cat, Chars, Edge, Node, Repeat, size

__all__ = ["parse"]

_COUNT = re.compile(r"\{([0-9]+)(,([0-9]+)?)?\}")
_NAME = re.compile(r"\?<[A-Za-z_$][\w$]*>")
_CLASSES: dict[str, Ranges] = {
    "d": charsets.DIGIT,
    "w": charsets.WORD,
    "s": charsets.SPACE,
    # Inverted sets hold what is outside for Python's reading, too, where letters and digits of any script count.
    "D": charsets.intersect(charsets.invert(charsets.DIGIT), ((0, 0x7F),)),
    "W": charsets.intersect(charsets.invert(charsets.WORD), ((0, 0x7F),)),
    "S": charsets.invert(charsets.ANY_SPACE),
}
# What a class means by them where it is negated: nothing of theirs, by either reading, is left over.
_IN_NEGATED: dict[str, Ranges] = {
    "s": charsets.ANY_SPACE,
    "D": charsets.invert(charsets.DIGIT),
    "W": charsets.invert(charsets.WORD),
    "S": charsets.invert(charsets.SPACE),
}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_REFUSED = {
    "b": "word boundary \\b",
    "B": "word boundary \\B",
    "k": "back reference \\k",
    "p": "Unicode property \\p",
    "P": "Unicode property \\P",
    "c": "control escape \\c",
}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")


def parse(text: str, path: str) -> Node:
    """The tree of ``text``; ``path`` is told in errors.

    Raises:
        GrammarError: it is malformed, too long or too deep, or uses look-around, back references, word boundaries, inline flags or Unicode properties.
    """
    if len(text) > MAX_REGEX_CHARS:
        raise refuse(path, f"a regular expression of {len(text)} characters; {MAX_REGEX_CHARS} are allowed")
    parser = _Parser(text, path)
    node = parser.alternatives(0)
    if parser.at < len(text):
        raise parser.error("unmatched )")
    return node


class _Parser:
    def __init__(self, text: str, path: str) -> None:
        self.text, self.path, self.at = text, path, 0

    def error(self, what: str) -> GrammarError:
        """What is wrong, and where."""
        return refuse(self.path, f"{what} at character {self.at} of the regular expression")

    def peek(self) -> str:
        """The next character, empty at the end."""
        return self.text[self.at : self.at + 1]

    def alternatives(self, depth: int) -> Node:
        """Options between bars."""
        if depth > MAX_DEPTH:
            raise self.error(f"groups nested more than {MAX_DEPTH} deep")
        options = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self, depth: int) -> Node:
        """Parts up to a bar, a closing bracket or the end."""
        parts: list[Node] = []
        while (char := self.peek()) and char not in "|)":
            parts.append(self.quantified(self.atom(char, depth)))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def atom(self, char: str, depth: int) -> Node:
        """What a quantifier may follow."""
        if char in "*+?" or _COUNT.match(self.text, self.at):
            raise self.error(f"nothing to repeat before {char}")
        if char == "(":
            return self.group(depth)
        self.at += 1
        if char in "^$":
            return Edge(begin=char == "^")
        if char == ".":
            return Chars(charsets.DOT)
        if char == "[":
            return Chars(self.char_class())
        if char == "\\":
            return Chars(self.escape(in_class=False))
        return Chars(((ord(char), ord(char)),))

    def group(self, depth: int) -> Node:
        """What stands in brackets."""
        self.at += 1
        for opening, name in (
            ("?=", "look-ahead"),
            ("?!", "negative look-ahead"),
            ("?<=", "look-behind"),
            ("?<!", "negative look-behind"),
        ):
            if self.text.startswith(opening, self.at):
                raise self.error(f"{name} cannot be enforced; found")
        if named := _NAME.match(self.text, self.at):
            self.at = named.end()
        elif self.text.startswith("?:", self.at):
            self.at += 2
        elif self.peek() == "?":
            raise self.error("inline flags and other (? groups cannot be enforced; found")
        node = self.alternatives(depth + 1)
        if self.peek() != ")":
            raise self.error("a group is not closed")
        self.at += 1
        return node

    def quantified(self, node: Node) -> Node:
        """``node`` as often as the quantifier behind it says."""
        char = self.peek()
        bounds: tuple[int, int | None]
        if char and char in "*+?":
            self.at += 1
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif counted := _COUNT.match(self.text, self.at):
            self.at = counted.end()
            low = _count(counted[1])
            bounds = low, low if counted[2] is None else _count(counted[3]) if counted[3] else None
        else:
            return node
        if isinstance(node, Edge):
            raise self.error("an anchor is repeated")
        if self.peek() == "?":  # lazy: the same texts match
            self.at += 1
        elif self.peek() and self.peek() in "*+":
            raise self.error("possessive and doubled quantifiers cannot be enforced; found")
        low, high = bounds
        if high is not None and high < low:
            raise self.error(f"a repeat of {low} to {high} times")
        repeated = Repeat(node, low, high)
        if size(repeated) > MAX_REGEX_SIZE:
            raise self.error(f"a counted repeat with more than {MAX_REGEX_SIZE} positions when written out")
        return repeated

    def escape(self, *, in_class: bool) -> Ranges:
        """The characters that an escape stands for."""
        char = self.peek()
        if not char:
            raise self.error("a backslash at the end")
        if char in _CLASSES:
            self.at += 1
            return _CLASSES[char]
        if (code := self.escaped_char(char, in_class)) is None:
            raise self.error(f"{_REFUSED.get(char, f'escape {chr(92)}{char}')} cannot be enforced; found")
        return ((code, code),)

    def escaped_char(self, char: str, in_class: bool) -> int | None:
        """The one character of an escape; ``None``: it is none of those that are kept."""
        if found := _HEX.match(self.text, self.at):
            code = int(found[1] or found[2] or found[3], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise self.error("an escape that is no character of a text")
            self.at = found.end()
            return code
        if char in _CONTROLS and not (char == "0" and self.text[self.at + 1 : self.at + 2].isdigit()):
            self.at += 1
            return _CONTROLS[char]
        if char == "b" and in_class:
            self.at += 1
            return 8
        if char.isalnum():
            return None
        self.at += 1
        return ord(char)

    def char_class(self) -> Ranges:
        """The characters of a class."""
        negated = self.peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while (char := self.peek()) != "]":
            if not char:
                raise self.error("a character class is not closed")
            low, in_negated = self.class_item()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high, _ = self.class_item()
                if any(len(item) != 1 or item[0][0] != item[0][1] for item in (low, high)) or high[0][0] < low[0][0]:
                    raise self.error("a bad range in a character class")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges.extend(in_negated if negated else low)
        self.at += 1
        merged = charsets.merge(ranges)
        chars = charsets.invert(merged) if negated else merged
        return chars if charsets.intersect(chars, charsets.TEXT) else ()

    def class_item(self) -> tuple[Ranges, Ranges]:
        """One character or escape of a class: what it adds, and what it takes away in a negated one."""
        char = self.peek()
        self.at += 1
        if char != "\\":
            return ((ord(char), ord(char)),), ((ord(char), ord(char)),)
        name = self.peek()
        ranges = self.escape(in_class=True)
        return ranges, _IN_NEGATED.get(name, ranges)


def _count(digits: str) -> int:
    """A count of a repeat; those of ten digits and more, which are refused anyway, are all one."""
    digits = digits.lstrip("0")
    return int(digits or 0) if len(digits) < 10 else 10**9
