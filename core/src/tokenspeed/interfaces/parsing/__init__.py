"""What incremental parsers of generated text are made of; parser plugins of every family share it.

A parser is a ``StateMachine`` over a ``Scanner`` (text in, markers held back) and an ``Output`` (content and pieces of calls out). Families differ in
a small table: ``MarkedJsonParser`` for JSON arguments between markers, ``BareJsonParser`` for call objects in plain text, ``ElementParser`` for XML-like
elements, ``TagReasoningParser`` for reasoning between tags. ``JsonStream`` and ``LiteralStream`` copy one value as it arrives, ``JsonCall`` one
``{"name": .., "arguments": ..}`` object. ``ChoiceParser`` is what a server feeds.
"""

from tokenspeed.interfaces.parsing import structural
from tokenspeed.interfaces.parsing.arguments import ArgumentWriter
from tokenspeed.interfaces.parsing.bare import BareJsonParser, partial
from tokenspeed.interfaces.parsing.elements import ElementParser, ElementSyntax
from tokenspeed.interfaces.parsing.json_call import JsonCall
from tokenspeed.interfaces.parsing.json_stream import JsonStream, Progress, is_complete, quote
from tokenspeed.interfaces.parsing.literals import LiteralStream
from tokenspeed.interfaces.parsing.machine import SPACE, Output, StateMachine
from tokenspeed.interfaces.parsing.marked import MarkedJsonParser, MarkedSyntax
from tokenspeed.interfaces.parsing.pipeline import ChoiceParser
from tokenspeed.interfaces.parsing.scanner import Markers, Scanner, last_marker
from tokenspeed.interfaces.parsing.schema import ToolSchemas, to_json
from tokenspeed.interfaces.parsing.tags import Segments, TagReasoningParser

__all__ = [
    "SPACE",
    "ArgumentWriter",
    "BareJsonParser",
    "ChoiceParser",
    "ElementParser",
    "ElementSyntax",
    "JsonCall",
    "JsonStream",
    "LiteralStream",
    "MarkedJsonParser",
    "MarkedSyntax",
    "Markers",
    "Output",
    "Progress",
    "Scanner",
    "Segments",
    "StateMachine",
    "TagReasoningParser",
    "ToolSchemas",
    "is_complete",
    "last_marker",
    "partial",
    "quote",
    "structural",
    "to_json",
]
