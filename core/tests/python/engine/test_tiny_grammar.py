"""The test backend keeps what the suite asks of every backend."""

from __future__ import annotations

from tokenspeed.plugins.specs import GrammarBackendSpec
from tokenspeed.testing.grammar_backend import GrammarBackendSuite


class TestTinyGrammar(GrammarBackendSuite):
    spec = GrammarBackendSpec(
        name="tiny",
        target="tokenspeed.testing.tiny_grammar:TinyGrammarBackend",
        checker="tokenspeed.testing.tiny_grammar:check",
    )
