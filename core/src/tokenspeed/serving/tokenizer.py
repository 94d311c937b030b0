"""Tokenizers of the server process: text to ids, ids to text, messages to prompt. Built on ``tokenizers``; torch is never imported."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from tokenspeed.errors import ModelError, RequestError
from tokenspeed.interfaces.renderer import Renderer, RendererContext
from tokenspeed.serving.chat_template import ChatTemplate
from tokenspeed.serving.detokenizer import ByteDetokenizer, Detokenizer, PieceTable, WindowDetokenizer
from tokenspeed.token_pieces import decoder_steps, piece_function

__all__ = ["HFTokenizer", "NoTokenizer", "Tokenizer", "load_tokenizer", "pack_tokens"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Little-endian int32 ids, as messages carry them."""
    return array("i", tokens).tobytes()


class Tokenizer(ABC):
    """What the server needs of a tokenizer.

    Attributes:
        vocab_size: ids are below this.
        max_piece_bytes: bytes of text that one token can stand for at most, ``None`` where a normaliser makes that unknown.
        chat_template: the compiled default template, or what stands for one, or ``None``.
        special_tokens: text of the special tokens by id.
        tool_template: the template used when tools are given, where the model has a separate one.
    """

    vocab_size: int
    max_piece_bytes: int | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    special_tokens: Mapping[int, str]
    chat_template: Renderer | None = None
    tool_template: Renderer | None = None

    def template_for(self, tools: bool) -> Renderer | None:
        """The template of a conversation with or without tools; ``None`` where the model has none."""
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    def token_id(self, text: str) -> int | None:  # noqa: ARG002 - for tokenizers that can tell
        """The id of the one token that stands for exactly ``text``; ``None`` if there is none."""
        return None

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    @abstractmethod
    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all ids at once."""

    @abstractmethod
    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder for one choice."""

    @abstractmethod
    def piece(self, token: int) -> bytes:
        """Bytes of one token, special tokens included: what logprobs show."""


class HFTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer`` with its chat templates.

    Args:
        core: the tokenizer.
        special: ``bos_token`` and the like, text by name.
        chat_templates: template text by name; ``default`` and ``tool_use`` are used.
        chat_template: replaces the model's own templates.
        renderer: stands for templates.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str],
        chat_templates: Mapping[str, str],
        chat_template: str | None = None,
        renderer: Callable[[RendererContext], Renderer] | None = None,
    ) -> None:
        self._core = core
        self._core.no_padding()
        self._core.no_truncation()
        self.vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps
        added = core.get_added_tokens_decoder()
        self.special_tokens = {token: str(entry.content) for token, entry in added.items() if entry.special}
        to_bytes = piece_function(core)
        self._all = PieceTable(to_bytes or self._decoded_piece)
        self._visible = PieceTable(lambda token: b"" if token in self.special_tokens else self._all[token])
        self._concatenates = to_bytes is not None
        # The library's byte-level decoder takes added tokens for bytes where their characters allow it.
        byte_level = [step["type"] for step in decoder_steps(core)] == ["ByteLevel"]
        texts = {token: str(entry.content) for token, entry in added.items()} if byte_level else {}
        self._misread = frozenset(i for i, text in texts.items() if core.decode([i], skip_special_tokens=False) != text)
        self.max_piece_bytes = _max_piece_bytes(core)
        self.bos_id, self.eos_id = (
            core.token_to_id(special[name]) if name in special else None for name in ("bos_token", "eos_token")
        )
        if renderer is not None:
            self.chat_template = renderer(RendererContext(special_tokens=special))
            return
        templates = {"default": chat_template} if chat_template is not None else dict(chat_templates)
        self.chat_template = ChatTemplate(templates["default"], special) if "default" in templates else None
        self.tool_template = ChatTemplate(templates["tool_use"], special) if "tool_use" in templates else None

    def _decoded_piece(self, token: int) -> bytes:
        return str(self._core.decode([token], skip_special_tokens=False)).encode()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not self._misread.isdisjoint(tokens):
            pieces = self._visible if skip_special_tokens else self._all
            return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")
        return str(self._core.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        if self._concatenates:
            return ByteDetokenizer(self._visible if skip_special_tokens else self._all)
        return WindowDetokenizer(lambda tokens: self.decode(tokens, skip_special_tokens=skip_special_tokens))

    def piece(self, token: int) -> bytes:
        return self._all[token]

    def token_id(self, text: str) -> int | None:
        token: int | None = self._core.token_to_id(text)
        return token if token is not None and self._all[token] == text.encode() else None


class NoTokenizer(Tokenizer):
    """Stands in where no tokenizer is loaded (``--skip-tokenizer-init``): ids in, ids out; texts are refused and answers have none."""

    def __init__(self) -> None:
        self.vocab_size = 2**31 - 1
        self.special_tokens = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        raise RequestError(
            "the server runs without a tokenizer (--skip-tokenizer-init): give token ids", code="no_tokenizer"
        )

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return ""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:  # noqa: ARG002
        return ByteDetokenizer(PieceTable(self.piece))

    def piece(self, token: int) -> bytes:  # noqa: ARG002
        return b""


def _max_piece_bytes(core: tokenizers.Tokenizer) -> int | None:
    """Longest token in bytes; a normaliser may shrink text without limit, so nothing is known where there is one that is not the SentencePiece space."""
    if core.normalizer is not None:
        state = json.loads(core.normalizer.__getstate__())
        steps = state["normalizers"] if state["type"] == "Sequence" else [state]
        if any(step["type"] not in ("Prepend", "Replace", "NFC") for step in steps):
            return None
    return max((len(text.encode()) for text in core.get_vocab(with_added_tokens=True)), default=1) * 3


def load_tokenizer(
    path: str | Path,
    *,
    chat_template: str | None = None,
    renderer: Callable[[RendererContext], Renderer] | None = None,
) -> HFTokenizer:
    """The tokenizer of a Hugging Face directory.

    Args:
        path: directory with ``tokenizer.json`` and, mostly, ``tokenizer_config.json`` and ``chat_template.jinja``.
        chat_template: text of a template that replaces the model's.
        renderer: class of a renderer that stands for templates.

    Raises:
        ModelError: files are missing or unreadable.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} holds no tokenizer.json; give a directory that has one with --tokenizer")
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
        config = _read_json(folder / "tokenizer_config.json")
        special_map = _read_json(folder / "special_tokens_map.json")
        single = folder / "chat_template.jinja"
        templates = _templates(config.get("chat_template"))
        if single.is_file():
            templates["default"] = single.read_text()
        for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
            templates[extra.stem] = extra.read_text()
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception for a broken file
        raise ModelError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return HFTokenizer(
        core,
        special=_special_texts({**special_map, **config}),
        chat_templates=templates,
        chat_template=chat_template,
        renderer=renderer,
    )


def _read_json(file: Path) -> dict[str, Any]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]) if file.is_file() else {}


def _templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    return {entry["name"]: entry["template"] for entry in value or ()}


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts
