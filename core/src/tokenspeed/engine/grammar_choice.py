"""Which grammar backend a start has, and in words for users why it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenspeed.engine.advice import how_to_get
from tokenspeed.errors import ConfigError, NothingFitsError
from tokenspeed.plugins.selection import Choice, select

if TYPE_CHECKING:
    from tokenspeed.plugins.manager import PluginHost
    from tokenspeed.plugins.specs import GrammarBackendSpec

__all__ = ["GrammarChoice", "choose_grammar_backend"]

_DISTRIBUTION = "tokenspeed-plugin-grammar-xgrammar"
_OFF = "--grammar-backend none switched it off"


class GrammarChoice(NamedTuple):
    """A grammar backend, or why there is none.

    Attributes:
        choice: ``None``: requests with a grammar are refused.
        absent: a clause that says why, and what to do about it; empty beside a choice.
        warning: what a user should know who asked for nothing of the kind.
    """

    choice: Choice[GrammarBackendSpec] | None
    absent: str = ""
    warning: str = ""


def choose_grammar_backend(
    host: PluginHost,
    asked: str | None,
    platform: str,
    *,
    skip_tokenizer: bool = False,
    preferences: Sequence[str] = (),
) -> GrammarChoice:
    """The grammar backend; ``auto`` does not fail a start for want of one.

    Args:
        asked: ``auto``, a name, or ``None`` for none.
        skip_tokenizer: no tokenizer is loaded, and so there is no vocabulary that a grammar could be compiled against.
        preferences: names in the platform's order.

    Raises:
        ConfigError: a name that nothing has, or one beside ``skip_tokenizer``; PluginError: what was named cannot run.
    """
    candidates = host.registry.specs("grammar_backend")
    if asked is None:
        if candidates:
            return GrammarChoice(None, f"{_OFF}; leave that flag out")
        return GrammarChoice(None, f"{_OFF}; leave that flag out, and try {how_to_get(host, _DISTRIBUTION)}")
    if skip_tokenizer:
        if asked != "auto":
            raise ConfigError(
                f"--grammar-backend {asked}: a grammar is compiled against the vocabulary, and no tokenizer is loaded "
                "(--skip-tokenizer-init); give one of the two"
            )
        return GrammarChoice(None, "it needs the tokenizer, which --skip-tokenizer-init leaves out")
    if asked == "auto" and not candidates:
        return GrammarChoice(None, f"no plugin for it is active; try {how_to_get(host, _DISTRIBUTION)}")
    try:
        choice = select(
            "grammar backend",
            candidates,
            flag=None if asked == "auto" else asked,
            flag_name="--grammar-backend",
            preferences=preferences,
            platform=platform,
            active=host.active,
            excluded=host.broken,
        )
    except NothingFitsError as error:
        if not error.broken:
            return GrammarChoice(
                None, "none that is installed is taken by itself here; name one with --grammar-backend"
            )
        return GrammarChoice(None, error.broken, f"requests with a grammar are refused: {error.broken}")
    return GrammarChoice(choice)
