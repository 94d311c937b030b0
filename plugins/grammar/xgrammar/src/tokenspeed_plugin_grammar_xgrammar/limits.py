"""Bounds on what one request may ask to compile, chosen so that anything within them compiles in a few seconds on one thread.

What was measured with xgrammar 0.2.9 and a vocabulary of 49,152 tokens stands beside each.
"""

from __future__ import annotations

from tokenspeed.errors import GrammarError

__all__ = [
    "MAX_CHOICES",
    "MAX_CHOICE_CHARS",
    "MAX_COUNT",
    "MAX_COUNTED_OPTIONAL",
    "MAX_DEPTH",
    "MAX_EBNF_CHARS",
    "MAX_EBNF_REPEAT",
    "MAX_EVALUATION",
    "MAX_EVALUATION_DEPTH",
    "MAX_EXCLUDED_NAMES_CHARS",
    "MAX_NODES",
    "MAX_PROPERTIES",
    "MAX_REGEX_CHARS",
    "MAX_REGEX_SIZE",
    "MAX_SCHEMA_CHARS",
    "MAX_TAG_PROPERTIES",
    "MAX_TAG_SCHEMAS",
    "MAX_TOTAL_PROPERTIES",
    "MAX_WHITE_SPACE",
    "refuse",
]

#: Characters of a JSON schema or structural tag.
MAX_SCHEMA_CHARS = 262_144
#: Levels of nested schemas, and of nested JSON in constants. Arrays nested 300 deep take seconds, 32 deep a tenth of one.
MAX_DEPTH = 32
#: Schemas visited, each as often as it is combined with others: bounds products of anyOf and chains of $ref.
MAX_NODES = 2_000
#: Properties of one object. 100 take 0.1 s to compile, and 1.2 s to pass on where that is slower.
MAX_PROPERTIES = 100
#: Properties of all objects of a schema together, each as often as it is written out.
MAX_TOTAL_PROPERTIES = 200
#: The same for all schemas of a structural tag, and formats in it.
MAX_TAG_PROPERTIES = 300
MAX_TAG_SCHEMAS = 1_000
#: White space characters between two parts of JSON.
MAX_WHITE_SPACE = 1
#: Optional properties of an object whose number is bounded by minProperties or maxProperties: 20 take 3.6 s, more grow steeply.
MAX_COUNTED_OPTIONAL = 10
#: Values of one enum, or choices, and their characters together. A long value costs more than many short ones: 60,000 characters take 0.9 s.
MAX_CHOICES = 1_000
MAX_CHOICE_CHARS = 32_768
#: Steps of checking constants against the keywords beside them.
MAX_EVALUATION = 200_000
#: Levels of schemas and references that one constant is checked through: each takes a few frames of Python's stack.
MAX_EVALUATION_DEPTH = 100
#: minLength, maxLength, minItems and maxItems.
MAX_COUNT = 1_000
#: Characters of a regular expression as it is written.
MAX_REGEX_CHARS = 8_192
#: Positions of a regular expression once its counted repeats are written out.
MAX_REGEX_SIZE = 2_000
#: Characters of an EBNF grammar, and the product of the counts of nested repeats in it.
MAX_EBNF_CHARS = 65_536
MAX_EBNF_REPEAT = 1_000
#: Characters of the declared names that free names must differ from; beyond, no free names are generated.
MAX_EXCLUDED_NAMES_CHARS = 500


def refuse(path: str, message: str) -> GrammarError:
    """The error of a grammar that is not used: where, what, and what to do."""
    return GrammarError(f"{path}: {message}", code="unsupported_grammar")
