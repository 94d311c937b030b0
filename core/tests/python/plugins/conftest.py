"""A folder that plays site-packages, and a small core inside it whose every slot has a reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config import EngineConfig
from tokenspeed.engine.assembly import Assembly, assemble
from tokenspeed.plugins.manager import PluginHost
from tokenspeed.testing.plugins import PluginFolder
from tokenspeed.weights.describe import ModelDescription

BUILTIN = """
from tokenspeed.plugins import *

@hookimpl
def tokenspeed_platforms():
    return [PlatformSpec(name="cpu", target="mini_parts:Cpu", detect="mini_parts:detect", device_type="cpu")]

@hookimpl
def tokenspeed_models():
    return [ModelSpec(name="mini", target="mini_parts:Model", architectures=("MiniForCausalLM",), tool_parser="plain")]

@hookimpl
def tokenspeed_attention_backends():
    return [AttentionBackendSpec(name="torch", target="mini_parts:Attention", priority=Priority.REFERENCE)]

@hookimpl
def tokenspeed_tool_parsers():
    return [ToolParserSpec(name="plain", target="mini_parts:Parser")]

@hookimpl
def tokenspeed_kernels():
    return [KernelSpec(name="torch", family="norm", mode="rms_norm", target="mini_parts:rms", priority=Priority.REFERENCE)]
"""

PARTS = """
from tokenspeed.interfaces.platform import Platform, PlatformDefaults

class Cpu(Platform):
    name = "cpu"
    device = None
    capability = ()
    defaults = PlatformDefaults(chunked_prefill_size=256, max_num_seqs=64, page_size=16, overlap=False)
    def preferences(self, kind): return ()
    def init_process(self): pass
    def default_dtype(self, model_dtype): return model_dtype
    def kv_memory_bytes(self, utilization): return 1 << 20
    def collective_backend(self): return "gloo"

class Model: pass
class Attention: pass
class Parser: pass
def detect(): return "a processor"
def rms(x): return x
"""


class MiniCore:
    """Assembles over the folder alone, with the small core in place of the built-ins."""

    def __init__(self, folder: PluginFolder) -> None:
        self.folder = folder
        folder.write_module("mini_builtin", BUILTIN)
        folder.write_module("mini_parts", PARTS)

    def model(self, **changes: Any) -> ModelDescription:
        config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "max_position_embeddings": 512}
        fields: dict[str, Any] = {
            "name": "mini",
            "path": "mini",
            "format": "dummy",
            "architecture": "MiniForCausalLM",
            "model_type": "mini",
            "config": config | changes.pop("config", {}),
            "tokenizer_path": "",
            "dtype": "float32",
            "weight_files": (),
        }
        return ModelDescription(**fields | changes)

    def load(self, plugins: str = "", **arguments: Any) -> PluginHost:
        return self.folder.load(plugins, builtin="mini_builtin", **arguments)

    def assemble(
        self,
        plugins: str = "",
        *,
        model: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        **config: Any,
    ) -> Assembly:
        return assemble(
            EngineConfig(model="mini", plugins=plugins, **config),
            self.model(**model or {}),
            host=self.load(plugins),
            **{"accelerators": list, "announce": False} | (arguments or {}),
        )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PluginFolder]:
    with PluginFolder(tmp_path / "site") as folder:
        yield folder


@pytest.fixture
def core(folder: PluginFolder) -> MiniCore:
    return MiniCore(folder)
