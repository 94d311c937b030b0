"""The models that the documentation writes pass the suite that it names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs/models.md"


def example() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL):
        exec(compile(block, str(DOCS), "exec"), names)  # our own documentation
    return names


FOUND = example()
Qwen2ForCausalLM, GraniteForCausalLM = FOUND["Qwen2ForCausalLM"], FOUND["GraniteForCausalLM"]


def here(suite: Any) -> Any:
    """The spec of a documented suite, whose package exists in this module alone."""
    return dataclasses.replace(suite.spec, target=f"{__name__}:{suite.spec.target.partition(':')[2]}")


class TestQwen2(FOUND["TestQwen2"]):  # type: ignore[misc]
    spec = here(FOUND["TestQwen2"])


class TestGranite(FOUND["TestGranite"]):  # type: ignore[misc]
    spec = here(FOUND["TestGranite"])


def test_the_documented_shapes_differ_from_llama() -> None:
    """Else the suites above would say nothing of the fields that the page is about."""
    config = type("Config", (), FOUND["TestGranite"].checkpoints()["plain"] | {"rope_theta": 1e4})()
    granite = GraniteForCausalLM.shape(config)
    assert (granite.attention_scale, granite.embedding_scale, granite.residual_scale) == (0.1, 3.0, 0.3)
    assert granite.logits_scale == 0.2
    qwen2 = Qwen2ForCausalLM.shape(config)
    assert (qwen2.attention_bias, qwen2.output_bias) == (True, False)
