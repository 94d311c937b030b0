"""Tokenizers: the stream of text equals the text of all ids, and nothing sent is taken back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tokenspeed.byte_alphabet import byte_alphabet
from tokenspeed.errors import ModelError
from tokenspeed.serving.detokenizer import WindowDetokenizer
from tokenspeed.serving.tokenizer import HFTokenizer, load_tokenizer

CORPUS = [
    "B 界b",
    "x 你好 y",
    "🇩🇪🇫🇷 flags",
    "👩‍👩‍👧 family",
    "the quick brown fox",
    "naïve café",
    "  spaces\n\n\ttabs",
    "don't 123 456",
]
TEXTS = st.lists(st.sampled_from([*CORPUS, "é", "e\u0301", "𝒳", "\u200d", " ", "<|end|>"]), max_size=4).map("".join)


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 3, trainer)
    core.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("two words", normalized=False)])
    return core


def sentence_piece() -> tokenizers.Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz",
        "▁th",
        "▁the",
    ]
    core = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁t", "h")][:0],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>", "</s>"])
    return core


def made(core: tokenizers.Tokenizer) -> HFTokenizer:
    return HFTokenizer(core, special={}, chat_templates={})


BYTE_LEVEL, SENTENCE_PIECE = made(byte_level()), made(sentence_piece())


def stream(tokenizer: HFTokenizer, ids: list[int], seed: int, **options: bool) -> str:
    detokenizer = tokenizer.detokenizer(**options)
    rng, at, out = random.Random(seed), 0, []
    while at < len(ids):
        step = rng.randint(1, 4)
        out.append(detokenizer.feed(ids[at : at + step]))
        at += step
    out.append(detokenizer.finish())
    return "".join(out)


@given(TEXTS, st.integers(0, 99), st.booleans())
def test_api_07_deltas_join_to_the_one_shot_decode(text: str, seed: int, skip: bool) -> None:
    """api-07: mixed ASCII, CJK, flags and joined emoji, 1 to 4 ids at a time, with and without special tokens."""
    ids = BYTE_LEVEL.encode(text)
    assert stream(BYTE_LEVEL, ids, seed, skip_special_tokens=skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30), st.integers(0, 99))
def test_any_ids_join_to_the_one_shot_decode(ids: list[int], seed: int) -> None:
    """Also where the bytes are no UTF-8: replaced in the same places."""
    assert stream(BYTE_LEVEL, ids, seed) == BYTE_LEVEL.decode(ids)


@given(st.text("abc the界🇩é", max_size=20), st.integers(0, 99))
def test_byte_fallback_joins_to_the_one_shot_decode(text: str, seed: int) -> None:
    """A stream goes on behind a prompt, so the space that a whole text loses at its beginning stays."""
    ids = SENTENCE_PIECE.encode(text)
    assert stream(SENTENCE_PIECE, ids, seed).removeprefix(" ") == SENTENCE_PIECE.decode(ids)


@given(TEXTS, st.integers(0, 99))
def test_the_window_detokenizer_joins_to_the_one_shot_decode(text: str, seed: int) -> None:
    """The fallback for other decoders, on a tokenizer whose answer is known."""
    ids = BYTE_LEVEL.encode(text)
    detokenizer = WindowDetokenizer(BYTE_LEVEL.decode)
    assert "".join([*(detokenizer.feed([token]) for token in ids), detokenizer.finish()]) == BYTE_LEVEL.decode(ids)


def test_unfinished_characters_wait() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    ids = BYTE_LEVEL.encode("𝒳")
    told = [detokenizer.feed([token]) for token in ids]
    assert told == [""] * (len(ids) - 1) + ["𝒳"]


def test_pieces_are_the_bytes_of_tokens() -> None:
    """Log probabilities show bytes that rebuild split characters; added tokens are written as they read."""
    ids = BYTE_LEVEL.encode("界<tool_call>two words")
    assert b"".join(BYTE_LEVEL.piece(token) for token in ids).decode() == "界<tool_call>two words"


@pytest.mark.parametrize("text", ["café", "Ġx"])
def test_added_tokens_are_no_bytes_whatever_their_characters(text: str) -> None:
    """Their characters may all stand for bytes in the byte alphabet; in the stream, in the whole text and in pieces alike."""
    core = byte_level()
    core.add_tokens([AddedToken(text, normalized=False)])
    tokenizer = made(core)
    ids = tokenizer.encode(f"a {text}b")
    (token,) = tokenizer.encode(text)
    assert tokenizer.piece(token).decode() == text
    assert stream(tokenizer, ids, 0) == tokenizer.decode(ids) == f"a {text}b"


def test_the_byte_alphabet_is_the_library_s() -> None:
    """All 256 characters, each the spelling of its byte."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for text in ("az09~ \n\x00\x7f", "é界𝒳\xad\xa0ÿ"):
        ((spelled, _),) = core.pre_tokenizer.pre_tokenize_str(text)
        assert spelled == "".join(alphabet[byte] for byte in text.encode())


def test_tools_have_a_template_of_their_own_where_the_model_has_one() -> None:
    both = HFTokenizer(byte_level(), special={}, chat_templates={"default": "plain", "tool_use": "tools"})
    assert [both.template_for(tools).source for tools in (False, True)] == ["plain", "tools"]  # type: ignore[union-attr]
    one = HFTokenizer(byte_level(), special={}, chat_templates={"default": "plain"})
    assert one.template_for(True) is one.template_for(False)
    assert made(byte_level()).template_for(True) is None


def test_a_directory_is_read_with_its_templates(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": "old {{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_id == loaded.encode("<|end|>")[0]
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([]) == "old <|end|>"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(tmp_path).chat_template.render([]) == "new"  # type: ignore[union-attr]
    assert load_tokenizer(tmp_path, chat_template="mine").chat_template.render([]) == "mine"  # type: ignore[union-attr]


def test_a_directory_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*--tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)
