"""Entry point: the XGrammar backend."""

from __future__ import annotations

from tokenspeed.plugins import GrammarBackendSpec, Priority, hookimpl

__all__ = ["tokenspeed_grammar_backends"]


@hookimpl
def tokenspeed_grammar_backends() -> list[GrammarBackendSpec]:
    """One backend; its checker runs where neither torch nor xgrammar is imported."""
    return [
        GrammarBackendSpec(
            name="xgrammar",
            target="tokenspeed_plugin_grammar_xgrammar.backend:XGrammarBackend",
            checker="tokenspeed_plugin_grammar_xgrammar.checker:check",
            priority=Priority.PERFORMANT,
            requires=("xgrammar==0.2.9",),
            description="JSON schemas, regular expressions, EBNF, choices and structural tags; refuses what it would not enforce",
        )
    ]
