"""The tokenizer of a served model, whatever form the model has: joins ``serving.tokenizer`` with what ``weights`` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenspeed.errors import ConfigError
from tokenspeed.interfaces.renderer import Renderer, RendererContext
from tokenspeed.serving.tokenizer import HFTokenizer, NoTokenizer, Tokenizer, load_tokenizer

__all__ = ["check_tokenizer", "make_tokenizer", "renderer_asked"]

_MAX_TEMPLATE_BYTES = 16 << 20


def renderer_asked(renderer: str | None, chat_template: str | None) -> str | None:
    """``--renderer`` beside ``--chat-template``: a template that was given stands for a renderer that was not.

    Raises:
        ConfigError: both were given.
    """
    if chat_template is None or renderer is None:
        return renderer
    if renderer == "auto":
        return None
    raise ConfigError(f"--renderer {renderer} and --chat-template {chat_template}: give one of them")


def check_tokenizer(path: str | None, *, chat_template: str | None = None) -> None:
    """What can be told of ``make_tokenizer``'s arguments at once, before a model is loaded for nothing.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    from tokenspeed.weights.toy import TOY_NAME

    _read_template(chat_template)
    if path is None or path == TOY_NAME:
        return
    if not Path(path).exists():
        raise ConfigError(f"--tokenizer {path}: there is no such file or directory")
    if not Path(path).is_file() and not Path(path).is_dir():
        raise ConfigError(f"--tokenizer {path}: is neither a regular file nor a directory")
    if Path(path).is_dir() and not (Path(path) / "tokenizer.json").is_file():
        raise ConfigError(f"{path} holds no tokenizer.json; give a directory that has one with --tokenizer")


def make_tokenizer(
    path: str | None, *, chat_template: str | None = None, renderer: Callable[[RendererContext], Renderer] | None = None
) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: directory with ``tokenizer.json``, GGUF file, or ``toy``; ``None`` makes one that knows ids only.
        chat_template: file of a template that replaces the model's.
        renderer: class of a renderer that stands for templates.

    Raises:
        ConfigError: a file is missing, or the template cannot be read. ModelError: the tokenizer cannot be read.
    """
    from tokenspeed.weights.toy import TOY_CHAT_TEMPLATE, TOY_NAME, TOY_SPECIAL, build_toy_tokenizer

    if path is None:
        return NoTokenizer()
    check_tokenizer(path)
    template = _read_template(chat_template)
    if Path(path).is_dir():
        return load_tokenizer(path, chat_template=template, renderer=renderer)
    if path == TOY_NAME:
        own: str | None = TOY_CHAT_TEMPLATE
        core, ids = build_toy_tokenizer(), TOY_SPECIAL
    else:
        from tokenspeed.weights.gguf_tokenizer import build_tokenizer

        built = build_tokenizer(path)
        core, ids, own = built.tokenizer, built.special, built.chat_template
    special = {name.removesuffix("_id"): str(core.id_to_token(token)) for name, token in ids.items()}
    return HFTokenizer(
        core,
        special=special,
        chat_templates={"default": own} if own else {},
        chat_template=template,
        renderer=renderer,
    )


def _read_template(file: str | None) -> str | None:
    if file is None:
        return None
    path = Path(file)
    if path.exists() and not path.is_file():  # a device has no end
        raise ConfigError(f"--chat-template {file}: is no regular file")
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ConfigError(f"--chat-template {file}: is larger than {_MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {file}: cannot be read: {error}") from error
