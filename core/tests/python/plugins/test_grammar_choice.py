"""Why a start has no grammar backend, in the words that ``explain`` and the refusals of requests share."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.engine.assembly import assemble
from tokenspeed.errors import ConfigError

PLUGIN = """
@hookimpl
def tokenspeed_grammar_backends():
    return [GrammarBackendSpec(name='gram', target='a:b', checker='a:c')]
"""


def test_without_a_grammar_backend_explain_and_the_json_say_why(core: Any) -> None:
    def why(plugins: str = "", **settings: Any) -> str:
        assembly = core.assemble(plugins, **settings)
        assert f"  grammar_backend   none ({assembly.absent['grammar_backend']})" in assembly.explain()
        assert assembly.to_json()["absent"] == dict(assembly.absent)
        return assembly.absent["grammar_backend"]

    assert why() == "no plugin for it is active; try pip install tokenspeed-plugin-grammar-xgrammar"
    assert "leave that flag out, and try pip install" in why(grammar_backend=None)
    core.folder.add("g", PLUGIN, distribution="tokenspeed-plugin-grammar-xgrammar", first_party=True)
    assert core.assemble().absent == {}
    assert why(grammar_backend=None) == "--grammar-backend none switched it off; leave that flag out"
    assert "try adding g to --plugins, which leaves it out" in why("none")


def test_without_a_tokenizer_no_grammar_backend_is_taken_and_none_may_be_named(core: Any) -> None:
    core.folder.add("g", PLUGIN, first_party=True)
    assembly = core.assemble(skip_tokenizer_init=True)
    assert (assembly.grammar_backend, assembly.config.grammar_backend) == (None, None)
    assert assembly.absent["grammar_backend"] == "it needs the tokenizer, which --skip-tokenizer-init leaves out"
    assert assemble(assembly.config, core.model(), host=core.load(), accelerators=list).plan == assembly.plan
    with pytest.raises(ConfigError, match=r"--grammar-backend gram: .*--skip-tokenizer-init"):
        core.assemble(skip_tokenizer_init=True, grammar_backend="gram")
