"""The reference itself, against values worked by hand and against the errors known of a capture."""

import json
import struct
import unittest

import numpy as np

import reference


class Formats(unittest.TestCase):
    def test_bf16_rounds_ties_to_even(self):
        one = 0x3F80
        for x, bits in ((1.0, one), (1 + 2**-8, one), (1 + 3 * 2**-8, one + 2), (-2.0, 0xC000),
                        (1 + 2**-8 + 2**-16, one + 1)):
            self.assertEqual(int(reference.to_bf16([x])[0]), bits, x)

    def test_bf16_comes_back(self):
        bits = np.arange(0, 0x7F80, dtype=np.uint16)
        np.testing.assert_array_equal(reference.to_bf16(reference.from_bf16(bits)), bits)

    def test_e4m3_has_its_254_finite_values(self):
        codes = np.arange(127)
        exponent, mantissa = codes >> 3, codes & 7
        values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
        np.testing.assert_array_equal(reference.round_e4m3(values), values)
        np.testing.assert_array_equal(reference.round_e4m3(-values), -values)
        middles = (values[1:] + values[:-1]) / 2  # a tie goes to the even mantissa
        even = np.where(codes[1:] % 2 == 0, values[1:], values[:-1])
        np.testing.assert_array_equal(reference.round_e4m3(middles), even)

    def test_e4m3_saturates(self):
        np.testing.assert_array_equal(reference.round_e4m3([464.0, 1e30, -500.0]), [448, 448, -448])

    def test_a_row_keeps_its_largest_element_and_a_zero_row_stays_zero(self):
        rows = np.array([[[0.0, 3.0, -1.0]], [[0.0, 0.0, 0.0]]], np.float32)
        got = reference.quantise(rows)
        self.assertAlmostEqual(got[0, 0, 1], 3.0, places=6)
        self.assertTrue((got[1] == 0).all())


class Attention(unittest.TestCase):
    def test_two_keys_by_hand(self):
        q = np.array([[[1.0, 0.0]]])
        k = np.array([[[0.0, 0.0]], [[np.log(3.0), 0.0]]])
        v = np.array([[[4.0, 0.0]], [[0.0, 8.0]]])
        out, lse = reference.attend(q, k, v, [1], sm_scale=1.0)
        np.testing.assert_allclose(out[0, 0], [1.0, 6.0])  # weights 1/4 and 3/4
        np.testing.assert_allclose(lse[0, 0], np.log(4.0))
        out, lse = reference.attend(q, k, v, [1], sm_scale=1.0, sinks=[np.log(4.0)])
        np.testing.assert_allclose(out[0, 0], [0.5, 3.0])  # the sink takes half
        out, _ = reference.attend(q, k, v, [1], sm_scale=1.0, window=1)
        np.testing.assert_allclose(out[0, 0], [0.0, 8.0])

    def test_a_captured_layer_has_its_known_errors(self):
        directory = "tests/data/captures/"
        with open(directory + "smollm2_text_a_layer16.safetensors", "rb") as file:
            raw = file.read()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8:8 + size])

        def tensor(name, dtype):
            begin, end = (8 + size + offset for offset in header[name]["data_offsets"])
            return np.frombuffer(raw[begin:end], dtype).reshape(header[name]["shape"])

        q, k, v = (reference.from_bf16(tensor(name, np.uint16)) for name in "qkv")
        positions, exact = tensor("positions", np.int32), tensor("out", np.float32)
        out, _ = reference.attend(q, k, v, positions, sm_scale=0.125)
        self.assertLess(reference.relative_l2(out, exact), 1e-6)
        out, _ = reference.attend(q, reference.quantise(k), reference.quantise(v), positions,
                                  sm_scale=0.125)
        with open(directory + "smollm2_text_a_errors.json") as file:
            known = json.load(file)["per_layer"]["decode"]["16"]["row"]["op"]
        self.assertLess(abs(reference.relative_l2(out, exact) / known - 1), 1e-3)


if __name__ == "__main__":
    unittest.main(verbosity=2)
