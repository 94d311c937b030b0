"""What transformers says, for comparison with engine output: SmolLM2 in fp32, its weights dequantised by transformers itself."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import torch

from .conftest import ROOT

__all__ = ["Oracle", "english_prompts", "model_files_writer"]


def model_files_writer() -> ModuleType:
    """The script that writes SmolLM2's dequantised weights as safetensors and GGUF."""
    path = ROOT / "benchmarks" / "peers" / "smollm2_files.py"
    spec = importlib.util.spec_from_file_location("smollm2_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Oracle:
    """The reference model and its tokenizer."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, gguf: Path) -> Oracle:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the oracle's own
            from transformers import AutoModelForCausalLM, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        return cls(model.eval(), tokenizer)

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """(tokens, vocabulary): log probabilities after each token."""
        logits: torch.Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def first_difference(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Where ``tokens`` leave the model's greedy continuation of ``prompt``; empty when nowhere.

        Each token is compared with the likeliest one after everything before it, which by induction is greedy generation.
        """
        logprobs = self.logprobs([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        for i, (token, row) in enumerate(zip(tokens, logprobs, strict=True)):
            best = int(row.argmax())
            if best != token:
                gap = float(row[best] - row[token])
                return f"token {i} after a prompt of {len(prompt)} is {token}, transformers says {best} (by {gap:.2e} in log probability)"
        return ""


def english_prompts(tokenizer: Any, count: int, shortest: int, longest: int) -> list[list[int]]:
    """``count`` pieces of the standard library's help texts, of lengths evenly spread from ``shortest`` to ``longest`` tokens; none overlap."""
    text = "\n".join(topics[name] for name in sorted(topics))
    step = (longest - shortest) / max(count - 1, 1)
    lengths = [round(shortest + step * i) for i in range(count)]
    ids = tokenizer(text[: 8 * sum(lengths)])["input_ids"]
    assert len(ids) >= sum(lengths)
    ends = list(itertools.accumulate(lengths))
    return [ids[end - length : end] for length, end in zip(lengths, ends, strict=True)]
