"""How much of an error of the attention output is left behind a decoder layer, and why.

    python bench/accuracy/residual.py --out=docs/measurements/residual_2026-11-30.json
    python bench/accuracy/residual.py --plot=docs/measurements/residual_2026-11-30.json

Needs the packages of tests/hf/requirements.txt and models.txt, and fp8kvd. Each layer of the two
models of the captures gets its exact inputs, K and V of all 1,532 tokens in fp8_kv or not, and is
looked at in the last 32 tokens. With x the residual stream in, a the attention output, u what it
adds to the stream (behind o_proj and, where there is one, a norm), h = x + u, m what the MLP adds,
y = h + m the stream out, D a difference by fp8_kv and |.| the L2 norm over the 32 tokens, the error
of the layer is this product, exactly:

    |Dy|/|y| = |Da|/|a|  *  (|Du|/|u|) / (|Da|/|a|)  *  |u|/|h|  *  |Dy|/|Dh|  *  |h|/|y|
               op           projection                  update      mlp           rest

Then two things are changed by themselves: the stream in is multiplied (the layer's norms take that
out again, so that q, k, v, a and u stay what they are), and K's and V's errors are made smaller.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
import transformers
from plot import Band, Series, plot
from study import rounded

from fp8kvd import accuracy

STEPS = 32
RESIDUALS = (0.5, 1.0, 2.0, 4.0, 8.0)
PARTS = (1.0, 0.5, 0.25, 0.125)  # of the errors of K and V
NAMES = {"gemma3": "Gemma 3 270M", "smollm2": "SmolLM2 135M"}
OUT = Path(__file__).parents[2] / "docs" / "accuracy"
Array = np.ndarray[Any, Any]

seen: dict[int, dict[str, Any]] = {}  # by layer, of the latest forward pass


def record(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
           **options: Any) -> Any:
    """torch's attention on Q, K and V rounded to bf16, which are kept."""
    rounded = [x.bfloat16().float() for x in (query, key, value)]
    q, k, v = (x[0].transpose(0, 1).double().numpy() for x in rounded)
    window = getattr(module, "sliding_window", None) or 0
    seen[module.layer_idx] = {"rows": accuracy._Rows(
        q[-STEPS:], k, v, np.arange(len(k) - STEPS, len(k)), float(options["scaling"]), window,
        0.0)}
    return transformers.AttentionInterface()["sdpa"](module, *rounded, mask, **options)


transformers.AttentionInterface.register("record", record)
transformers.AttentionMaskInterface.register(
    "record", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def forward(model: Any, ids: list[int]) -> None:
    """Fills `seen`: of every layer its rows, the stream in and out of the last STEPS tokens."""
    def keep(layer: Any, arguments: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        kept = seen[layer.self_attn.layer_idx]
        kept["x"], kept["y"] = arguments[0][0, -STEPS:].clone(), out.reshape(
            arguments[0].shape)[0, -STEPS:].clone()

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model.model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()


class Block:
    """What a decoder layer does with an attention output, in the two forms that there are."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.sandwich = hasattr(layer, "pre_feedforward_layernorm")  # norms behind, too (Gemma)

    def update(self, a: Array) -> torch.Tensor:
        o = self.layer.self_attn.o_proj(torch.from_numpy(a.astype(np.float32)).flatten(1))
        return self.layer.post_attention_layernorm(o) if self.sandwich else o

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        if self.sandwich:
            inner = self.layer.mlp(self.layer.pre_feedforward_layernorm(h))
            return self.layer.post_feedforward_layernorm(inner)
        return self.layer.mlp(self.layer.post_attention_layernorm(h))


def norm(x: torch.Tensor | Array) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def attend(rows: accuracy._Rows, part: float) -> Array:
    """With that part of fp8_kv's errors in K and V."""
    k, v = (x + part * (accuracy._stored(rows, x, "row")[0] - x) for x in (rows.k, rows.v))
    return rows.attend(k, v)


def layer_error(block: Block, x: torch.Tensor, exact: torch.Tensor, off: torch.Tensor) -> float:
    """|Dy|/|y| for the stream x and two updates of it."""
    y, y_off = ((x + u) + block.mlp(x + u) for u in (exact, off))
    return norm(y_off - y) / norm(y)


def measure(layer: Any, kept: dict[str, Any]) -> dict[str, Any]:
    """One layer."""
    block, rows, x = Block(layer), kept["rows"], kept["x"]
    a = rows.attend(rows.k, rows.v)
    by_part = {part: attend(rows, part) for part in PARTS}
    u = block.update(a)
    updates = {part: block.update(off) for part, off in by_part.items()}
    h, h_off = x + u, x + updates[1.0]
    m, m_off = block.mlp(h), block.mlp(h_off)
    y, y_off = h + m, h_off + m_off
    disagreement = norm(y - kept["y"]) / norm(kept["y"])
    if disagreement > 1e-4:  # float32 against torch's own kernels, and the layer's own code
        raise SystemExit(f"this is not what the layer computes: {disagreement}")
    op, update = norm(by_part[1.0] - a) / norm(a), norm(updates[1.0] - u) / norm(u)
    return {
        "op": op, "layer": norm(y_off - y) / norm(y), "projection": update / op,
        "update": norm(u) / norm(h), "mlp": norm(y_off - y) / norm(h_off - h),
        "rest": norm(h) / norm(y), "x": norm(x), "u": norm(u), "m": norm(m), "y": norm(y),
        "by_residual": {str(s): layer_error(block, s * x, u, updates[1.0]) for s in RESIDUALS},
        "by_part": {str(part): {
            "op": norm(off - a) / norm(a),
            **{f"layer_x{s:g}": layer_error(block, s * x, u, updates[part])
               for s in (1.0, 2.0, 4.0)}} for part, off in by_part.items()},
    }


def study(name: str) -> list[dict[str, Any]]:
    model = models.load(name, "record")
    seen.clear()
    forward(model, models.token_ids(name))
    with torch.no_grad():
        return [{"layer_index": index, **measure(layer, seen[index])}
                for index, layer in enumerate(model.model.layers)]


def median(values: Any) -> float:
    return float(np.median(list(values)))


def summary(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Least, median and largest of each factor; and ranks: what goes with the dilution."""
    result: dict[str, Any] = {
        key: [min(of), median(of), max(of)]
        for key in ("op", "layer", "projection", "update", "mlp", "rest")
        for of in [[one[key] for one in layers]]}
    ratio = [one["layer"] / one["op"] for one in layers]
    result["layer_over_op"] = [min(ratio), median(ratio), max(ratio)]
    parts = {"projection_x_update": [one["projection"] * one["update"] for one in layers],
             "mlp_x_rest": [one["mlp"] * one["rest"] for one in layers]}
    for key, of in parts.items():
        result[key] = [min(of), median(of), max(of)]
        ranks = [np.argsort(np.argsort(values)) for values in (ratio, of)]
        result[f"{key}_rank_correlation"] = float(np.corrcoef(*ranks)[0, 1])
    # With each layer's attention output off by as much as the reference's least and most.
    for op in (0.006, 0.015):
        result[f"layer_at_op_{op}"] = {
            f"stream_x{stream}": {
                "median": median(errors), "share_up_to_0.0009": float(np.mean(errors <= 0.0009))}
            for stream in RESIDUALS[1:] for errors in [np.array(
                [one["by_residual"][str(stream)] / one["op"] * op for one in layers])]}
    result["by_residual"] = {str(s): median(one["by_residual"][str(s)] for one in layers)
                             for s in RESIDUALS}
    result["by_part"] = {str(part): {
        key: median(one["by_part"][str(part)][key] for one in layers)
        for key in ("op", "layer_x1", "layer_x2", "layer_x4")} for part in PARTS}
    result["stream_growth"] = layers[-1]["y"] / layers[0]["x"]
    return result


def pictures(result: dict[str, Any]) -> dict[str, str]:
    layers = {NAMES[name]: of["layers"] for name, of in result["models"].items()}
    reduced = [Series(f"{model}, stream x{s}", [
        (of[str(part)]["op"], of[str(part)][f"layer_x{s}"]) for part in PARTS])
        for model, of in ((NAMES[name], one["summary"]["by_part"])
                          for name, one in result["models"].items()) for s in (1, 2, 4)]
    return {
        "update": plot("What a layer leaves of an error of its attention output",
                       "(|Du|/|u|) / (|Da|/|a|) x |u|/|h|: what reaches the residual stream",
                       "error of the layer / error of the attention output",
                       [Series(model, [(one["projection"] * one["update"],
                                        one["layer"] / one["op"]) for one in of], dots=True)
                        for model, of in layers.items()]),
        "depth": plot("The residual stream grows over the layers", "layer / layers",
                      "|x|/|u|: the stream in over the attention's update",
                      [Series(model, [(i / len(of), one["x"] / one["u"])
                                      for i, one in enumerate(of)])
                       for model, of in layers.items()]),
        "reduced": plot("Smaller errors of K and V, a larger stream: medians of the layers",
                        "relative L2 of the attention output",
                        "relative L2 of the hidden state after the layer", reduced,
                        bands=[Band("reference up to 0.0009", 0, 0.0009)]),
    }


def main() -> None:
    """Measures, or draws what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.out:
        result = {"what": "bench/accuracy/residual.py says what each number is", "steps": STEPS,
                  "torch": torch.__version__, "transformers": transformers.__version__,
                  "models": {}}
        for name in models.NAMES:
            layers = study(name)
            result["models"][name] = {"summary": summary(layers), "layers": layers}
            print(name, json.dumps(rounded(result["models"][name]["summary"])), file=sys.stderr)
        args.out.write_text(json.dumps(rounded(result), indent=1) + "\n")
    if args.plot:
        for name, text in pictures(json.loads(args.plot.read_text())).items():
            (OUT / f"{name}.svg").write_text(text)


if __name__ == "__main__":
    main()
