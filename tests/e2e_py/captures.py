"""The captures of real attention in tests/data/captures, as arrays."""

import json
import struct

import numpy as np

from daemon_process import ROOT

CAPTURES = ROOT / "tests/data/captures"
DTYPES = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}
FILES = ("gemma3_text_a_layer05", "gemma3_text_a_layer10", "smollm2_text_a_layer16")


def load(name):
    """Tensors and metadata of a safetensors file."""
    raw = (CAPTURES / f"{name}.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    meta = header.pop("__metadata__")
    tensors = {}
    for key, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[key] = np.frombuffer(raw[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, meta


def expected_error(name, layer):
    errors = json.loads((CAPTURES / f"{name.rsplit('_', 1)[0]}_errors.json").read_text())
    return errors["per_layer"]["decode"][str(layer)]["row"]["op"]
