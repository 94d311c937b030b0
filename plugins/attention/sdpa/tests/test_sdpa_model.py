"""A whole model on the backend: the tokens of the reference, in prompts, chunks, decodes and mixed steps."""

from __future__ import annotations

import pytest
import torch
from tokenspeed_plugin_attention_sdpa.backend import SdpaAttention
from tokenspeed_plugin_attention_sdpa.plugin import tokenspeed_kernels

from tokenspeed.testing.harness import ModelHarness, kernel_registry
from tokenspeed.testing.paged import Session
from tokenspeed.types import KVLayout
from tokenspeed.weights.describe import describe_model


def toy(layout: KVLayout = KVLayout.NHD, dtype: torch.dtype = torch.float32, *, sdpa: bool = True) -> ModelHarness:
    from tokenspeed.plugins.selection import load_target

    model = load_target("tokenspeed.builtin.toy:ToyForCausalLM")
    if not sdpa:
        return ModelHarness(model, describe_model("toy"), layout=layout, dtype=dtype)
    registry = kernel_registry(*tokenspeed_kernels())
    return ModelHarness(
        model, describe_model("toy"), backend=SdpaAttention, kernels=registry, layout=layout, dtype=dtype
    )


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_references(layout: KVLayout, dtype: torch.dtype) -> None:
    prompt = list(b"The quick brown fox jumps over the lazy dog")
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    steps = []
    for harness in (toy(layout, dtype), toy(layout, dtype, sdpa=False)):
        first, second, third = (harness.prefill(prompt[:n], 16)[0] for n in (3, 17, 30))
        extend = [(Session(), prompt), (third, prompt[30:40])]
        decode = [(first, prompt[3:4]), (second, prompt[17:18])]
        steps.append(harness.run(harness.cache.batch(extend=extend, decode=decode)))
    torch.testing.assert_close(*steps, rtol=0, atol=tolerance * steps[1].abs().max().item())


def test_greedy_tokens_are_the_references() -> None:
    prompt = list(b"hello world")
    assert toy().greedy(prompt, 10, chunk=4) == toy(sdpa=False).greedy(prompt, 10)
