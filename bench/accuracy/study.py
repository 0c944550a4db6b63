"""Why the error of fp8_kv differs from model to model: context, head_dim, spread, outliers.

    python bench/accuracy/study.py            # writes docs/accuracy/*.svg and the JSON beside them
    python bench/accuracy/study.py --check    # fails where they differ from what it would write

Takes the captures of tests/data and random rows, and changes one thing at a time. Needs numpy and
the package fp8kvd. Errors are relative L2 of the attention output against bf16 K and V.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from plot import Band, Series, plot

from fp8kvd import accuracy

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "e2e_py"))
import captures  # noqa: E402

OUT = ROOT / "docs" / "accuracy"
NAMES = ("gemma3_text_a_layer05", "gemma3_text_a_layer10", "smollm2_text_a_layer16")
REFERENCE = Band("reference 0.006-0.015", 0.006, 0.015)
TIER = 0.08
Rows = accuracy._Rows


def label(name: str) -> str:
    model, layer = name.split("_text_a_layer")
    return {"gemma3": "Gemma 3 270M", "smollm2": "SmolLM2 135M"}[model] + f" layer {int(layer)}"


def captured(name: str) -> Rows:
    tensors, metadata = captures.load(name)
    q, k, v = (accuracy._bf16(tensors[x]) for x in "qkv")
    return Rows(q, k, v, tensors["positions"].astype(np.int64), float(metadata["sm_scale"]),
                int(metadata["window"]), 0.0)


def measured(rows: Rows) -> dict[str, float]:
    """Error of the output with K and V, K alone and V alone in fp8_kv, and the scores' shape."""
    exact = rows.attend(rows.k, rows.v)
    k, v = (accuracy._stored(rows, x, "row")[0] for x in (rows.k, rows.v))
    spread, keys = rows.scores_profile()
    return {"op": float(accuracy._relative(rows.attend(k, v), exact)),
            "k_only": float(accuracy._relative(rows.attend(k, rows.v), exact)),
            "v_only": float(accuracy._relative(rows.attend(rows.k, v), exact)),
            "score_spread": spread, "effective_keys": keys}


def context(name: str) -> list[dict[str, float]]:
    """The same queries, seeing only the latest so many tokens."""
    rows = captured(name)
    longest = rows.window or len(rows.k)
    lengths = [n for n in (16, 32, 64, 128, 256, 512, 1024, 1500) if n <= longest]
    return [{"tokens": n, **measured(dataclasses.replace(rows, window=n))} for n in lengths]


def sampling(name: str) -> dict[str, float]:
    """How well 32 steps know a layer's error: of either half of them, and drawn again."""
    rows = captured(name)
    exact = rows.attend(rows.k, rows.v)
    k, v = (accuracy._stored(rows, x, "row")[0] for x in (rows.k, rows.v))
    off = ((rows.attend(k, v) - exact)**2).sum((1, 2))
    norm = (exact**2).sum((1, 2))

    def op(steps: Any) -> float:
        return float(np.sqrt(off[steps].sum() / norm[steps].sum()))

    random = np.random.default_rng(1)
    again = [op(random.integers(0, len(off), len(off))) for _ in range(4000)]
    half = len(off) // 2
    return {"op": op(slice(None)), "first_half": op(slice(half)),
            "second_half": op(slice(half, None)), "standard_error": float(np.std(again))}


def spread(name: str) -> list[dict[str, float]]:
    """The same rows, the scores scaled by a factor: K, V and their codes do not change."""
    rows = captured(name)
    return [{"factor": f, **measured(dataclasses.replace(rows, sm_scale=rows.sm_scale * f))}
            for f in (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)]


def outliers(name: str) -> list[dict[str, float]]:
    """One channel of K larger and Q's smaller by as much: the scores stay what they are."""
    rows = captured(name)
    result = []
    for factor in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
        q, k = rows.q.copy(), rows.k.copy()
        channel = int(np.abs(k).max((0, 1)).argmax())
        q[..., channel] /= factor  # powers of two: exact in bf16
        k[..., channel] *= factor
        one = dataclasses.replace(rows, q=q, k=k)
        profile = accuracy._profile(one, one.k)
        result.append({"factor": factor, "channel_amax_ratio": profile.channel_amax_ratio,
                       "subnormal": profile.subnormal, **measured(one)})
    return result


def bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return accuracy._bf16(x.astype(np.float32))


def head_dims(score_spread: float) -> list[dict[str, float]]:
    """Gaussian rows of 1,024 tokens at one spread of the scores; V with a mean of its own size."""
    result = []
    for head_dim in (64, 80, 96, 128, 192, 256):
        random = np.random.default_rng(head_dim)
        q = bf16(random.standard_normal((32, 8, head_dim)))
        k = bf16(random.standard_normal((1024, 2, head_dim)))
        v = bf16(random.standard_normal((1024, 2, head_dim)) + random.standard_normal(head_dim))
        rows = Rows(q, k, v, np.full(32, 1023), score_spread / math.sqrt(head_dim), 0, 0.0)
        result.append({"head_dim": head_dim, **measured(rows)})
    return result


def all_layers() -> dict[str, list[dict[str, float]]]:
    """Every layer of both models, as measured when the captures were made."""
    result = {}
    for model in ("gemma3", "smollm2"):
        path = ROOT / "tests" / "data" / "captures" / f"{model}_text_a_errors.json"
        layers = json.loads(path.read_text())["per_layer"]["decode"]
        result[model] = [{"layer": int(number), "op": e["row"]["op"], "decoder_layer":
                          e["row"]["layer"], "effective_keys": e["effective_keys_median"]}
                         for number, e in layers.items()]
    return result


def study() -> dict[str, Any]:
    return {"context": {n: context(n) for n in NAMES}, "spread": {n: spread(n) for n in NAMES},
            "outliers": {n: outliers(n) for n in NAMES},
            "sampling": {n: sampling(n) for n in NAMES},
            "head_dim": {str(s): head_dims(s) for s in (0.5, 1.0, 2.0, 3.0)},
            "all_layers": all_layers()}


def curves(of: dict[str, Any], x: str, y: str = "op") -> list[Series]:
    return [Series(label(name), [(p[x], p[y]) for p in points]) for name, points in of.items()]


def pictures(result: dict[str, Any]) -> dict[str, str]:
    op = "relative L2 of the attention output"
    dims = [Series(f"spread of the scores {s}", [(p["head_dim"], p["op"]) for p in points])
            for s, points in result["head_dim"].items()]
    layers = [Series({"gemma3": "Gemma 3 270M", "smollm2": "SmolLM2 135M"}[model],
                     [(p["op"], p["decoder_layer"]) for p in points], dots=True)
              for model, points in result["all_layers"].items()]
    return {
        "context": plot("Context: the latest n tokens of the same captures", "tokens seen", op,
                        curves(result["context"], "tokens"), log_x=True, bands=[REFERENCE]),
        "spread": plot("Spread: the scores of the captures, scaled",
                       "standard deviation of the scores over the keys", op,
                       curves(result["spread"], "score_spread"), log_x=True, bands=[REFERENCE]),
        "outliers": plot("Outliers: one channel of K enlarged, the scores as they were",
                         "largest channel's amax over the median channel's", op,
                         curves(result["outliers"], "channel_amax_ratio"), log_x=True,
                         bands=[REFERENCE]),
        "head_dim": plot("head_dim: random rows, 1,024 tokens", "head_dim", op, dims, log_x=True,
                         bands=[REFERENCE]),
        "layers": plot("From the attention output to the decoder layer's", op,
                       "relative L2 of the hidden state after the layer", layers,
                       bands=[Band("reference up to 0.0009", 0, 0.0009)]),
    }


def rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


def main() -> None:
    """Writes the study, or compares it with what is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    result = rounded(study())
    files = {f"{name}.svg": text for name, text in pictures(result).items()}
    files["study.json"] = json.dumps(result, indent=1) + "\n"
    OUT.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if args.check and (OUT / name).read_text() != text:
            raise SystemExit(f"docs/accuracy/{name} is not what bench/accuracy/study.py writes")
        (OUT / name).write_text(text)


if __name__ == "__main__":
    main()
