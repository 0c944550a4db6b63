"""fp8kvd.measure_accuracy against fp8kvctl accuracy, on captured attention and by hand."""

import json
import subprocess
import unittest

import numpy as np

from package import BIN

import captures
import fp8kvd

ANSWER_S = 120
NAME = "gemma3_text_a_layer05"


def cxx(name):
    """What fp8kvctl says of a capture."""
    path = captures.CAPTURES / f"{name}.safetensors"
    done = subprocess.run([BIN / "fp8kvctl", "accuracy", "--json", path], capture_output=True,
                          check=True, timeout=ANSWER_S)
    return json.loads(done.stdout)["layers"][0]


class Captured(unittest.TestCase):
    def test_every_number_is_that_of_cxx(self):
        tensors, meta = captures.load(NAME)
        got = fp8kvd.measure_accuracy(tensors["q"], tensors["k"], tensors["v"],
                                      tensors["positions"], sm_scale=float(meta["sm_scale"]),
                                      window=int(meta["window"]))
        want = cxx(NAME)
        self.assertEqual(list(got.ways), list(want["ways"]))
        for way, error in got.ways.items():
            for number, value in want["ways"][way].items():
                with self.subTest(way=way, number=number):
                    self.assertAlmostEqual(getattr(error, number), value, places=9)
        for rows in "kv":
            profile, wanted = getattr(got, rows), want[rows]
            for number in ("amax", "amax_over_rms", "channel_amax_ratio", "subnormal"):
                with self.subTest(rows=rows, number=number):
                    self.assertAlmostEqual(getattr(profile, number), wanted[number], places=9)
            self.assertEqual([(r.token, r.kv_head) for r in profile.worst],
                             [(r["token"], r["kv_head"]) for r in wanted["outlier_rows"]])
        self.assertAlmostEqual(got.score_spread, want["score_spread"], places=9)
        self.assertAlmostEqual(got.effective_keys / want["effective_keys"], 1, places=9)
        known = captures.expected_error(NAME, 5)
        self.assertAlmostEqual(got.ways["row"].op / known, 1, delta=0.02)


class Hand(unittest.TestCase):
    def test_of_three_tokens(self):
        # Rows 448 17 | 448 0 | 896 0; K is zero, so each weighs a third. Per row 17 becomes 16; a
        # static scale of 1 clips 896 to 448.
        k = np.zeros((3, 1, 2), np.float32)
        v = np.array([[[448, 17]], [[448, 0]], [[896, 0]]], np.float32)
        q = np.ones((1, 1, 2), np.float32)
        got = fp8kvd.measure_accuracy(q, k, v, [2])
        norm = np.hypot(1792, 17)
        self.assertAlmostEqual(got.ways["row"].op, 1 / norm, places=12)
        for way in ("head", "tensor", "scale_1.0", "transformers"):
            self.assertAlmostEqual(got.ways[way].op, np.hypot(448, 1) / norm, places=12)
            self.assertAlmostEqual(got.ways[way].saturated, 1 / 12, places=12)

    def test_shapes_that_do_not_fit_are_refused_with_what_is_allowed(self):
        rows = np.ones((4, 2, 8), np.float32)
        q = np.ones((1, 3, 8), np.float32)
        with self.assertRaisesRegex(ValueError, "q_heads must be a multiple of 2"):
            fp8kvd.measure_accuracy(q, rows, rows, [3])
        with self.assertRaisesRegex(ValueError, "1 numbers from 0 to 3"):
            fp8kvd.measure_accuracy(np.ones((1, 4, 8), np.float32), rows, rows, [4])
        with self.assertRaisesRegex(ValueError, r"twice \[tokens"):
            fp8kvd.measure_accuracy(q, rows, rows[1:], [3])


if __name__ == "__main__":
    unittest.main()
