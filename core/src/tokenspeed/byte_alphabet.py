"""How byte-level BPE spells bytes as printable characters (the alphabet of GPT-2's vocabulary)."""

from __future__ import annotations

__all__ = ["byte_alphabet"]


def byte_alphabet() -> list[str]:
    """The character of each byte: those that are printable as themselves, the others from U+0100 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
