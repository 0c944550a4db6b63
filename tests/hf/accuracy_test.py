"""What fp8kvd.measure_accuracy says of transformers' fp8 cache layer, against that layer itself."""

import unittest

import hf_case  # noqa: F401  # installs fp8kvd
import captures
import fp8kvd
import torch
from transformers import cache_utils

NAME = "smollm2_text_a_layer16"


def bf16(bits):
    """[tokens, heads, head_dim] as torch has it in a cache, [1, heads, tokens, head_dim]."""
    return torch.from_numpy(bits.copy().view("int16")).view(torch.bfloat16).transpose(0, 1)[None]


class Fp8Layer(unittest.TestCase):
    def test_gives_the_output_and_the_errors_that_are_measured(self):
        tensors, meta = captures.load(NAME)
        first = int(tensors["positions"][0])  # all before goes in as one update, the prompt
        k, v = bf16(tensors["k"]), bf16(tensors["v"])
        layer = cache_utils.Fp8QuantizedLayer()
        layer.update(k[:, :, :first], v[:, :, :first])
        stored = layer.update(k[:, :, first:], v[:, :, first:])
        kv = [x[0].transpose(0, 1).double() for x in stored]
        exact = [x[0].transpose(0, 1).double() for x in (k, v)]
        want = fp8kvd.measure_accuracy(tensors["q"], tensors["k"], tensors["v"],
                                       tensors["positions"], sm_scale=float(meta["sm_scale"]))
        for name, got, right in zip("kv", kv, exact):
            error = float((got - right).norm() / right.norm())
            self.assertAlmostEqual(error, getattr(want.ways["transformers"], name), places=9)
        out = [self.attend(tensors, meta, *of) for of in (kv, exact)]
        error = float((out[0] - out[1]).norm() / out[1].norm())
        self.assertAlmostEqual(error, want.ways["transformers"].op, places=9)
        self.assertGreater(error, 1.3 * want.ways["row"].op)  # a scale for each row is better

    def attend(self, tensors, meta, k, v):
        q = bf16(tensors["q"])[0].transpose(0, 1).double()  # [steps, q_heads, head_dim]
        group = q.shape[1] // k.shape[1]
        rows = []
        for query, position in zip(q, tensors["positions"]):
            seen = slice(0, int(position) + 1)
            keys, values = (x[seen].repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("hd,thd->ht", query, keys) * float(meta["sm_scale"])
            rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values))
        return torch.stack(rows)


if __name__ == "__main__":
    unittest.main()
