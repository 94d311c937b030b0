"""The tokenizer that a GGUF file describes, as a ``tokenizers.Tokenizer``. Torch-free.

GGUF stores a vocabulary and the *name* of a pre-tokenizer, not the tokenizer itself. Two families are built here: byte-level BPE
(``tokenizer.ggml.model`` = ``gpt2``; the name selects how text is cut before merging) and SentencePiece BPE with byte fallback (``llama``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tokenspeed.errors import ModelError
from tokenspeed.weights.gguf_file import GgufFile

__all__ = ["GgufTokenizer", "build_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space

# How text is cut before byte-level BPE. The contractions, letters, digits, punctuation and blanks of the named families; they differ in how many
# digits stay together and whether line ends cling to punctuation.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"


class GgufTokenizer(NamedTuple):
    """What ``build_tokenizer`` found.

    Attributes:
        tokenizer: ids are the file's; ``encode(text)`` adds the special tokens that the file asks for, ``encode(text, add_special_tokens=False)`` none.
        special: ids under ``transformers`` names (``bos_token_id``, ``eos_token_id``, ``unk_token_id``, ``pad_token_id``, ``eot_token_id``,
            ``eom_token_id``), as far as the file names them.
        add_bos: whether plain text is to begin with ``bos_token_id``.
        chat_template: Jinja text, or ``None``.
    """

    tokenizer: Tokenizer
    special: dict[str, int]
    add_bos: bool
    chat_template: str | None


def build_tokenizer(path: str | Path) -> GgufTokenizer:
    """Build the tokenizer of the GGUF file at ``path``.

    Raises:
        ModelError: the file cannot be read, has no vocabulary, or names a tokenizer or pre-tokenizer that is not known.
    """
    with GgufFile(path) as file:
        metadata = file.metadata
    where = str(path)
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{where} holds no vocabulary (tokenizer.ggml.tokens); pass --tokenizer DIRECTORY")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    family = metadata.get("tokenizer.ggml.model")
    special = _special_ids(metadata, len(tokens))
    if family == "gpt2":
        tokenizer = _byte_level(metadata, tokens, where)
    elif family == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, special)
    else:
        raise ModelError(
            f"{where}: tokenizer {family!r} is not one of 'gpt2', 'llama'; pass --tokenizer DIRECTORY with a tokenizer.json"
        )
    _add_special_tokens(tokenizer, tokens, types)
    # The default of the file format: SentencePiece vocabularies begin with BOS unless they say otherwise, byte-level ones do not.
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", family == "llama")) and "bos_token_id" in special
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token_id" in special
    if add_bos or add_eos:
        tokenizer.post_processor = _template(tokens, special, add_bos, add_eos)
    template = metadata.get("tokenizer.chat_template")
    return GgufTokenizer(tokenizer, special, add_bos, template or None)


def _special_ids(metadata: dict[str, Any], size: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
    found = {f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(value) for name, value in found.items() if value is not None and 0 <= value < size}


def _byte_level(metadata: dict[str, Any], tokens: list[str], where: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    normalizer = None
    ignore_merges = False
    if pre == "smollm":
        cut: Any = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in ("gpt-2", "default"):
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in ("llama-bpe", "llama3", "llama-v3"):
        cut = _split_then_bytes(_LLAMA3)
        ignore_merges = True
    elif pre == "qwen2":
        cut = _split_then_bytes(_QWEN2)
        normalizer = normalizers.NFC()
    else:
        known = "default, gpt-2, llama-bpe, qwen2, smollm"
        raise ModelError(
            f"{where}: pre-tokenizer {pre!r} is not known (known: {known}); pass --tokenizer DIRECTORY with the model's tokenizer.json"
        )
    merges = []
    for line in metadata.get("tokenizer.ggml.merges") or []:
        left, _, right = line.partition(" ")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], special: dict[str, int]) -> Tokenizer:
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    unknown = tokens[special["unk_token_id"]] if "unk_token_id" in special else None
    has_bytes = _BYTE in types
    model = BPE(
        vocab=_vocabulary(tokens),
        merges=_merges_from_scores(tokens, types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    # Normalizers, not the Metaspace pre-tokenizer: that one adds no prefix to text that begins with a space, SentencePiece does.
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbouring pair whose union has the best score; as a merge list that is every split of every piece, best piece first."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] in (_NORMAL, _USER_DEFINED)}
    ranked = []
    for piece, index in ids.items():
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (dropped by ``skip_special_tokens``); user-defined ones are text that is never cut."""
    control = [
        AddedToken(t, special=True, normalized=False)
        for t, kind in zip(tokens, types, strict=True)
        if t and kind in (_UNKNOWN, _CONTROL)
    ]
    tokenizer.add_special_tokens(control)
    user = [
        AddedToken(t, special=False, normalized=False)
        for t, kind in zip(tokens, types, strict=True)
        if t and kind == _USER_DEFINED
    ]
    tokenizer.add_tokens(user)


def _template(
    tokens: list[str], special: dict[str, int], add_bos: bool, add_eos: bool
) -> processors.TemplateProcessing:
    pairs = []
    single, double = ["$A:0"], ["$A:0", "$B:1"]
    if add_bos:
        bos = special["bos_token_id"]
        pairs.append((tokens[bos], bos))
        single, double = [f"{tokens[bos]}:0", *single], [f"{tokens[bos]}:0", *double]
    if add_eos:
        eos = special["eos_token_id"]
        if (tokens[eos], eos) not in pairs:
            pairs.append((tokens[eos], eos))
        single, double = [*single, f"{tokens[eos]}:0"], [*double, f"{tokens[eos]}:1"]
    return processors.TemplateProcessing(single=single, pair=double, special_tokens=pairs)
