"""Where FlashInfer's kernels can come from: nvcc, a package that brings them, or an earlier start on the same machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tokenspeed_plugin_attention_flashinfer import toolkit


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without nvcc, compiled kernels or the package that brings them; its home folder."""
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(toolkit, "_DEFAULT_HOME", tmp_path / "cuda")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        toolkit.importlib.util, "find_spec", lambda name: None if name == "flashinfer_jit_cache" else find(name)
    )
    monkeypatch.setattr(toolkit.importlib.metadata, "version", lambda _: "0.6.6")
    return tmp_path


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    path.chmod(0o755)


def test_a_machine_without_any_is_told_what_to_install(bare: Path) -> None:
    assert "nvcc, which is not in PATH and" in toolkit.lacking()
    assert "install the CUDA toolkit, or the package flashinfer-jit-cache" in toolkit.lacking()


#: As FlashInfer 0.6.6 names them.
KEPT = ".cache/flashinfer/0.6.6/90a/cached_ops"
PROMPTS = f"{KEPT}/batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_sm90/a.so"
LATENTS = f"{KEPT}/batch_mla_attention_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_ckv_512/a.so"


@pytest.mark.parametrize("place", ["bin/nvcc", "cuda/bin/nvcc", PROMPTS])
def test_each_place_that_flashinfer_looks_in_is_enough(bare: Path, place: str) -> None:
    put(bare / place)
    assert toolkit.lacking() == ""


@pytest.mark.parametrize(
    ("kept", "heads", "latents"),
    [(PROMPTS, True, False), (LATENTS, False, True), (f"{KEPT}/page/page.so", False, False)],
)
def test_kernels_kept_for_one_backend_do_not_count_for_the_other(
    bare: Path, kept: str, heads: bool, latents: bool
) -> None:
    """It would be chosen, and fail in a compiler that is not there."""
    put(bare / kept)
    assert (toolkit.lacking() == "", toolkit.lacking_latents() == "") == (heads, latents)


def test_kernels_of_another_version_do_not_count(bare: Path) -> None:
    put(bare / PROMPTS.replace("0.6.6", "0.5.0"))
    assert toolkit.lacking()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named_is_the_one_that_counts(
    bare: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    put(bare / "bin/nvcc")
    monkeypatch.setenv(variable, str(bare / "other"))
    assert f"{bare / 'other'} (CUDA_HOME)" in toolkit.lacking()
    put(bare / "other/bin/nvcc")
    assert toolkit.lacking() == ""


def test_the_package_that_brings_compiled_kernels_is_enough(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda _: object())
    assert toolkit.lacking() == ""


def test_without_flashinfer_there_are_no_kernels_of_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolkit.importlib.metadata, "version", missing)
    assert toolkit.lacking()


def test_the_probe_imports_neither_torch_nor_flashinfer() -> None:
    code = (
        "import sys\n"
        "from tokenspeed_plugin_attention_flashinfer.plugin import tokenspeed_attention_backends\n"
        "from tokenspeed.plugins.selection import probe\n"
        "specs = tokenspeed_attention_backends()\n"
        "assert all(spec.probe for spec in specs)\n"
        "assert all(isinstance(probe(spec), str) for spec in specs)\n"
        "assert not {'torch', 'flashinfer'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
