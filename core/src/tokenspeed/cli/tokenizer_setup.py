"""The tokenizer that a server would have, and what its chat template lets tools down in: for ``serve``, and for ``explain`` to tell beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed.errors import ConfigError, ModelError, PluginError

if TYPE_CHECKING:
    from tokenspeed.config import ServingConfig
    from tokenspeed.engine.assembly import Assembly
    from tokenspeed.serving.tokenizer import Tokenizer

__all__ = ["forewarn", "tokenizer_of", "unread_tools"]


def tokenizer_of(assembly: Assembly, serving: ServingConfig) -> Tokenizer:
    """The server's tokenizer. Raises as ``model_tokenizer.make_tokenizer`` does."""
    from tokenspeed.model_tokenizer import make_tokenizer
    from tokenspeed.plugins.selection import load_target

    config, renderer = assembly.config, assembly.renderer
    path = None if config.skip_tokenizer_init else config.tokenizer or assembly.model.tokenizer_path
    made = None if renderer is None else load_target(renderer.target)
    return make_tokenizer(path, chat_template=serving.chat_template, renderer=made)


def unread_tools(assembly: Assembly, tokenizer: Tokenizer) -> str:
    """What to tell where calls can be forced and the model learns of no tool; an empty text otherwise."""
    from tokenspeed.serving.rendering import UNREAD_TOOLS

    template = tokenizer.template_for(True)
    if assembly.tool_parser is None or template is None or template.reads_tools:
        return ""
    return UNREAD_TOOLS


def forewarn(assembly: Assembly, serving: ServingConfig) -> list[str]:
    """What ``serve`` would warn of, or refuse, once it has the tokenizer."""
    try:
        warning = unread_tools(assembly, tokenizer_of(assembly, serving))
    except (ConfigError, ModelError, PluginError) as error:
        return [f"serve would end for want of a tokenizer: {error}"]
    return [warning] if warning else []
