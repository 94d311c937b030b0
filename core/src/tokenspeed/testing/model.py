"""Conformance suite of models: logits and greedy tokens of ``transformers``, whatever the batching.

::

    class TestMine(ModelSuite):
        spec = ModelSpec(name="mine", target="my_package.model:MyForCausalLM", architectures=("MyForCausalLM",))

        @classmethod
        def checkpoints(cls):
            return {"plain": {"architectures": ["MyForCausalLM"], "model_type": "mine", "hidden_size": 64, ...}}

Needs ``transformers``, whose model for the config's ``model_type`` is the oracle. Where it has none, the tests register one before the suite runs:
``AutoConfig.register("mine", MyConfig)`` and ``AutoModelForCausalLM.register(MyConfig, MyReference)``, a plain and slow ``PreTrainedModel``.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tokenspeed.errors import ModelError
from tokenspeed.interfaces.attention import AttentionBackend, AttentionContext
from tokenspeed.interfaces.model import CausalLM
from tokenspeed.layers.attention import PagedLayer
from tokenspeed.plugins.selection import load_target
from tokenspeed.plugins.specs import KernelSpec, ModelSpec
from tokenspeed.testing.harness import ModelHarness, kernel_registry, run_ranks
from tokenspeed.testing.paged import Session
from tokenspeed.types import KVLayout
from tokenspeed.weights.describe import ModelDescription, describe_model
from tokenspeed.weights.stream import iterate_weights

__all__ = ["Checkpoint", "ModelSuite"]

_PROMPT = 37


class Checkpoint:
    """A small random checkpoint on disk and the oracle's answers about it."""

    def __init__(self, config: dict[str, Any], path: Path, model_class: type[CausalLM]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        self.oracle: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in self.oracle.parameters():  # wide enough that a wrong term shows in the logits
                parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
            parameters, kept = dict(self.oracle.named_parameters()), self.oracle.state_dict()
            for name, buffer in kept.items():  # what is learnt and saved besides, such as a router's bias
                if name not in parameters and buffer.is_floating_point():
                    buffer.add_(torch.randn_like(buffer) * 0.2)
        self.oracle.save_pretrained(path)
        # transformers rewrites config.json in its newest form; both forms are read.
        self.path, self.config, self.model_class = path, config, model_class
        self.description: ModelDescription = describe_model(str(path))

    @cached_property
    def prompt(self) -> list[int]:
        """A random prompt."""
        return self.random_tokens(_PROMPT)

    def random_tokens(self, count: int, seed: int = 1) -> list[int]:
        """Tokens of the vocabulary."""
        g = torch.Generator().manual_seed(seed)
        tokens: list[int] = torch.randint(3, self.config["vocab_size"], (count,), generator=g).tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The oracle's logits of every position."""
        out: torch.Tensor = self.oracle(torch.tensor([list(tokens)])).logits[0]
        return out

    def harness(self, **kwargs: Any) -> ModelHarness:
        """The model under test with this checkpoint's weights."""
        return ModelHarness(self.model_class, self.description, **kwargs)


class ModelSuite:
    """Subclass it, name the ``spec``, list ``checkpoints``, and pytest collects the inherited tests.

    Attributes:
        spec: the model.
        backend: target of the attention backend to run on; ``kernels`` it and the layers may choose among, besides the references.
        tolerance: largest difference of logits, relative to the largest logit.
        ranks: tensor parallel sizes to try.
    """

    spec: ClassVar[ModelSpec]
    backend: ClassVar[str] = "tokenspeed.builtin.attention.torch_backend:TorchAttention"
    kernels: ClassVar[tuple[KernelSpec, ...]] = ()
    tolerance: ClassVar[float] = 1e-5
    ranks: ClassVar[tuple[int, ...]] = (2,)

    @classmethod
    @abstractmethod
    def checkpoints(cls) -> dict[str, dict[str, Any]]:
        """``config.json`` of a tiny checkpoint for each variant of the architecture, by name."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise with the checkpoints and the numbers of ranks."""
        if "checkpoint" in metafunc.fixturenames:
            metafunc.parametrize("checkpoint", list(self.checkpoints()), indirect=True, scope="class")
        if "ranks" in metafunc.fixturenames:
            metafunc.parametrize("ranks", self.ranks)

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
        """A checkpoint on disk, in the layout that ``save_pretrained`` writes."""
        config = cls.checkpoints()[request.param]
        return Checkpoint(config, tmp_path_factory.mktemp("checkpoint") / "model", load_target(cls.spec.target))

    @pytest.fixture
    def harness(self, checkpoint: Checkpoint) -> ModelHarness:
        """The model under test on one rank."""
        return checkpoint.harness(**self._parts())

    def _parts(self) -> dict[str, Any]:
        backend: Callable[[AttentionContext], AttentionBackend] = load_target(self.backend)
        return {"backend": backend, "kernels": kernel_registry(*self.kernels)}

    def _close(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        bound = self.tolerance * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(got, expected, rtol=0.0, atol=bound)

    def test_prefill(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """Logits of every position of a prompt."""
        self._close(harness.prefill(checkpoint.prompt)[1], checkpoint.logits(checkpoint.prompt))

    @pytest.mark.parametrize("chunk", [1, 5, 16])
    def test_chunked_prefill(self, checkpoint: Checkpoint, harness: ModelHarness, chunk: int) -> None:
        """A prompt computed in chunks has the logits of the prompt computed at once."""
        self._close(harness.prefill(checkpoint.prompt, chunk)[1], checkpoint.logits(checkpoint.prompt))

    def test_decode(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """Tokens appended one and three at a time."""
        tokens = checkpoint.prompt
        expected = checkpoint.logits(tokens)
        session, _ = harness.prefill(tokens[:20])
        for at in (20, 21, 22):
            self._close(harness.decode([session], [[tokens[at]]])[0], expected[at])
        self._close(harness.decode([session], [tokens[23:26]])[0], expected[25])

    def test_a_mixed_batch(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """Prompts, a later chunk and decodes in one step: each row as if alone."""
        prompts = [checkpoint.random_tokens(n, seed=n) for n in (3, 11, 18, 29, 40)]
        sessions = [harness.prefill(tokens[:-1])[0] for tokens in prompts[:3]]
        chunked, _ = harness.prefill(prompts[3][:13])
        batch = harness.cache.batch(
            extend=[(chunked, prompts[3][13:]), (Session(), prompts[4])],
            decode=[(session, tokens[-1:]) for session, tokens in zip(sessions, prompts[:3], strict=True)],
        )
        got = harness.run(batch)
        for row, tokens in zip(got, [prompts[3], prompts[4], *prompts[:3]], strict=True):
            self._close(row, checkpoint.logits(tokens)[-1])

    def test_shared_prefix_pages(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """A request that begins on another's pages computes what it would have alone."""
        tokens = checkpoint.prompt
        first, _ = harness.prefill(tokens)
        second = harness.cache.share(first, 16)
        suffix = checkpoint.random_tokens(9, seed=7)
        got = harness.run(harness.cache.batch([(second, suffix)], all_logits=True))
        self._close(got, checkpoint.logits([*tokens[:16], *suffix])[16:])

    def test_other_layout_and_page_size(self, checkpoint: Checkpoint) -> None:
        """HND pages of 16 tokens instead of NHD pages of 4."""
        harness = checkpoint.harness(layout=KVLayout.HND, page_size=16, **self._parts())
        self._close(harness.prefill(checkpoint.prompt, 10)[1], checkpoint.logits(checkpoint.prompt))

    def test_greedy_tokens(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """The oracle's own greedy continuation."""
        prompt = torch.tensor([checkpoint.prompt])
        with torch.inference_mode():
            out = checkpoint.oracle.generate(
                prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
            )
        assert harness.greedy(checkpoint.prompt, 12, chunk=16) == out[0, _PROMPT:].tolist()

    def test_tensor_parallel(self, checkpoint: Checkpoint, ranks: int) -> None:
        """Every rank has the logits of one rank, also where heads or the vocabulary cannot be dealt out evenly."""

        def work(group: Any) -> torch.Tensor:
            harness = checkpoint.harness(group=group, **self._parts())
            session, logits = harness.prefill(checkpoint.prompt[:-1], 16)
            return torch.cat((logits, harness.decode([session], [checkpoint.prompt[-1:]])))

        expected = checkpoint.logits(checkpoint.prompt)
        for logits in run_ranks(ranks, work):
            self._close(logits, expected)

    def test_input_embeddings(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """Given embeddings stand in for token ids and are left as they were."""
        tokens = checkpoint.prompt
        with torch.inference_mode():
            embeds = checkpoint.oracle.get_input_embeddings()(torch.tensor(tokens))
            expected = checkpoint.oracle(inputs_embeds=embeds.unsqueeze(0)).logits[0]
        before = embeds.clone()
        batch = harness.cache.batch([(Session(), [0] * len(tokens))], all_logits=True, inputs_embeds=embeds)
        self._close(harness.run(batch), expected)
        assert torch.equal(embeds, before)

    def test_cache_groups_are_those_of_the_layers(self, harness: ModelHarness) -> None:
        """What is declared before any weight exists is what the layers write."""
        by_layer = {index: group for group in harness.groups for index in group.layers}
        layers = [module for module in harness.model.modules() if isinstance(module, PagedLayer)]
        assert sorted(by_layer) == [layer.layer_index for layer in layers]
        for layer in layers:
            assert (by_layer[layer.layer_index].kv_heads, by_layer[layer.layer_index].head_dim) == (
                layer.kv_heads,
                layer.head_dim,
            )

    def test_every_layer_tells_the_pool_when_it_has_written(
        self, checkpoint: Checkpoint, harness: ModelHarness
    ) -> None:
        """Layer-wise transfers hang on these two calls."""
        harness.prefill(checkpoint.prompt[:3])
        layers = list(range(checkpoint.config["num_hidden_layers"]))
        assert harness.cache.waited == layers
        assert harness.cache.written == layers

    def test_loading_again_in_place(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """A second load fills the same memory and changes nothing; a changed tensor is taken."""
        addresses = {name: parameter.data_ptr() for name, parameter in harness.model.named_parameters()}
        weights = dict(iterate_weights(checkpoint.description))
        filled = harness.model.load_weights(weights.items())
        assert filled == set(addresses)
        assert addresses == {name: parameter.data_ptr() for name, parameter in harness.model.named_parameters()}
        self._close(harness.prefill(checkpoint.prompt)[1], checkpoint.logits(checkpoint.prompt))
        name = next(name for name, tensor in weights.items() if tensor.dim() == 1)
        harness.model.load_weights([(name, weights[name] * 2)])
        assert not torch.allclose(harness.prefill(checkpoint.prompt)[1], checkpoint.logits(checkpoint.prompt))

    def test_a_tensor_that_does_not_fit_is_refused_by_name(self, checkpoint: Checkpoint, harness: ModelHarness) -> None:
        """Unknown names and wrong shapes are errors, not surprises in the output."""
        name, tensor = next(iter(iterate_weights(checkpoint.description)))
        with pytest.raises(ModelError, match=r"no_such_layer\.weight"):
            harness.model.load_weights([("no_such_layer.weight", torch.zeros(2))])
        with pytest.raises(ModelError, match=name.replace(".", r"\.")):
            harness.model.load_weights([(name, torch.zeros(*tensor.shape, 2))])
