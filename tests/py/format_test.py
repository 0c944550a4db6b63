"""fp8kvd.format against the C++ functions of the same names, and against numbers worked by hand."""

import subprocess
import unittest

import ml_dtypes
import numpy as np

from package import BIN

import fake_tensors
import fp8kvd

ANSWER_S = 60


def cxx(what, *numbers, rows=b"", dtype=np.float64):
    """What the C++ function gives."""
    command = [BIN / "py_format_reference", what, *map(str, numbers)]
    done = subprocess.run(command, input=rows, capture_output=True, check=True, timeout=ANSWER_S)
    return np.frombuffer(done.stdout, dtype)


def bf16_rows(seed, *shape):
    """Random bf16 bits whose size differs widely from row to row."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * 2.0 ** random.integers(-30, 20, (*shape[:-1], 1))
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


class Quantize(unittest.TestCase):
    def agrees(self, rows):
        head_dim = rows.shape[-1]
        codes, scales = fp8kvd.quantize_fp8_kv(rows)
        raw = cxx("quantize", head_dim, rows=rows.tobytes(), dtype=np.uint8)
        np.testing.assert_array_equal(codes.ravel(), raw[:rows.size])
        np.testing.assert_array_equal(scales.ravel().view(np.uint8), raw[rows.size:])

    def test_random_rows_get_the_codes_and_scales_of_cxx(self):
        self.agrees(bf16_rows(1, 4096, 64))

    def test_every_finite_bf16_gets_the_codes_of_cxx_beside_a_larger_one(self):
        every = np.arange(1 << 16, dtype=np.uint16)
        every = every[(every & 0x7F80) != 0x7F80]
        for largest in (0x0001, 0x0080, 0x3F80, 0x4315, 0x7F7F):  # from subnormal to the largest
            self.agrees(np.stack([every, np.full_like(every, largest)], axis=-1))

    def test_a_scale_that_underflows_gives_zeros(self):
        codes, scales = fp8kvd.quantize_fp8_kv(np.full(4, 1e-45, np.float32))
        self.assertEqual((codes.tolist(), scales.tolist()), ([0, 0, 0, 0], 0.0))

    def test_ties_go_to_the_even_code(self):
        # Beside 448 the scale is 1. 17 and 19 lie halfway: 16 (0x58), 18 (0x59), 20 (0x5A).
        codes, _ = fp8kvd.quantize_fp8_kv(np.array([448, 17, 19, -17, 2**-10], np.float32))
        self.assertEqual(codes.tolist(), [0x7E, 0x58, 0x5A, 0xD8, 0x00])

    def test_what_is_not_finite_is_refused(self):
        for bad in (np.nan, np.inf):
            with self.assertRaisesRegex(ValueError, "not finite"):
                fp8kvd.quantize_fp8_kv(np.array([1, bad], np.float32))

    def test_codes_are_worth_what_another_library_says(self):
        codes = np.arange(256, dtype=np.uint8)
        np.testing.assert_array_equal(fp8kvd.e4m3_values(codes),
                                      codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


class Forms(unittest.TestCase):
    """Every form of tensor that holds the same numbers gives the same codes."""

    BITS = bf16_rows(2, 5, 3, 64)

    def test_bfloat16_float32_and_dlpack_agree_with_the_bits(self):
        want = fp8kvd.quantize_fp8_kv(self.BITS)
        bf16 = self.BITS.view(ml_dtypes.bfloat16)
        strided = np.repeat(self.BITS, 2, axis=1)[:, ::2]
        for form in (bf16, bf16.astype(np.float32), strided, fake_tensors.DLPack(self.BITS, 4),
                     fake_tensors.DLPack(strided, 4),
                     fake_tensors.DLPack(bf16.astype(np.float32), 2)):
            got = fp8kvd.quantize_fp8_kv(form)
            np.testing.assert_array_equal(got.codes, want.codes)
            np.testing.assert_array_equal(got.scales, want.scales)

    def test_a_torch_tensor_gives_torch_tensors(self):
        with fake_tensors.torch() as torch:
            got = fp8kvd.quantize_fp8_kv(torch.bf16(self.BITS))
            self.assertIsInstance(got.codes, torch.Tensor)
            np.testing.assert_array_equal(got.codes.numpy(),
                                          fp8kvd.quantize_fp8_kv(self.BITS).codes)

    def test_integers_and_lists_are_refused_by_name(self):
        with self.assertRaisesRegex(TypeError, "int64.*give bf16"):
            fp8kvd.quantize_fp8_kv(np.arange(4))
        with self.assertRaisesRegex(TypeError, "list is no tensor"):
            fp8kvd.quantize_fp8_kv([1.0])


class Attention(unittest.TestCase):
    SEQS, KV_HEADS, HEAD_DIM, TOKENS = 3, 2, 64, 70

    def filled(self, k, v, split=0):
        cache = fp8kvd.Fp8KVCache(self.SEQS, self.KV_HEADS, self.HEAD_DIM)
        for seq in range(self.SEQS):
            cache.append(seq, k[:split], v[:split])
            cache.append(seq, k[split:], v[split:])
        return cache

    def test_groups_of_query_heads_and_lengths_agree_with_cxx(self):
        random = np.random.default_rng(3)
        k, v = (random.standard_normal((self.TOKENS, self.KV_HEADS, self.HEAD_DIM))
                .astype(ml_dtypes.bfloat16) for _ in "kv")
        for q_heads in (2, 6, 10):
            for seq_len in (0, 1, 33, 70):
                with self.subTest(q_heads=q_heads, seq_len=seq_len):
                    q = random.standard_normal((self.SEQS, q_heads, self.HEAD_DIM))
                    q = q.astype(ml_dtypes.bfloat16)
                    rows = k.tobytes() + v.tobytes() + q.tobytes()
                    want = cxx("attention", self.SEQS, self.KV_HEADS, self.HEAD_DIM, q_heads,
                               self.TOKENS, seq_len, rows=rows)
                    seq_lens = [self.TOKENS] + [seq_len] * (self.SEQS - 1)
                    got = fp8kvd.fp8_kv_attention(q, self.filled(k, v, 31), seq_lens, 0.125)
                    np.testing.assert_allclose(got.ravel(), want, rtol=1e-11, atol=1e-13)

    def test_no_token_seen_gives_zeros(self):
        rows = np.full((4, self.KV_HEADS, self.HEAD_DIM), 448, np.float32)
        q = np.ones((self.SEQS, 2, self.HEAD_DIM), np.float32)
        out = fp8kvd.fp8_kv_attention(q, self.filled(rows, rows), [0, 1, 4])
        self.assertEqual((out[0].max(), out[1].min(), out[2].min()), (0, 448, 448))

    def test_two_tokens_by_hand(self):
        # Scores 0 and ln 3: weights 1/4 and 3/4 of V 0 and 448.
        cache = fp8kvd.Fp8KVCache(1, 1, 1)
        k, v = (np.array([[[0]], [[large]]], np.float32) for large in (1, 448))
        cache.append(0, k, v)
        q = np.full((1, 1, 1), np.log(3), np.float32)
        self.assertAlmostEqual(float(fp8kvd.fp8_kv_attention(q, cache)[0, 0, 0]), 336, places=4)

    def test_shapes_that_do_not_fit_are_refused_with_what_is_allowed(self):
        cache = fp8kvd.Fp8KVCache(1, 2, 4)
        with self.assertRaisesRegex(ValueError, r"kv_heads 2, head_dim 4"):
            cache.append(0, np.ones((1, 1, 4), np.float32), np.ones((1, 2, 4), np.float32))
        self.assertEqual(cache.seq_len(0), 0)
        with self.assertRaisesRegex(ValueError, "a multiple of 2"):
            fp8kvd.fp8_kv_attention(np.ones((1, 3, 4), np.float32), cache)
        with self.assertRaisesRegex(ValueError, r"what it holds, \[0\]"):
            fp8kvd.fp8_kv_attention(np.ones((1, 2, 4), np.float32), cache, [1])


class Error(unittest.TestCase):
    def test_agrees_with_cxx(self):
        k, v = bf16_rows(4, 300, 64), bf16_rows(5, 300, 64)
        k[7] = 0  # a zero row has no error
        error = fp8kvd.fp8_kv_error(k, v)
        want = cxx("error", 64, rows=k.tobytes() + v.tobytes())
        got = (error.k, error.v, error.k_worst_row, error.v_worst_row)
        np.testing.assert_allclose(got, want, rtol=1e-12)

    def test_by_hand(self):
        # Scale 1: 17 becomes 16. Second row exact. Overall 1 / sqrt(448^2 + 17^2 + 448^2).
        k = np.array([[448, 17], [448, 0]], np.float32)
        error = fp8kvd.fp8_kv_error(k, k[1:])
        self.assertAlmostEqual(error.k, (448**2 + 17**2 + 448**2) ** -0.5, places=12)
        self.assertAlmostEqual(error.k_worst_row, (448**2 + 17**2) ** -0.5, places=12)
        self.assertEqual((error.v, error.v_worst_row), (0, 0))


class Share(unittest.TestCase):
    # Llama-3.1-8B: 32 layers x 8 KV heads x 128: 4 bytes of K and V per element pair, 131072 bytes
    # a token. 64 x 8192 tokens are 64 GiB; weights are 16 GB.
    def test_by_hand(self):
        share = fp8kvd.kv_cache_share(64, 8192, 32, 8, 128, 16e9)
        self.assertAlmostEqual(share, 2**36 / (2**36 + 16e9), places=15)

    def test_agrees_with_cxx(self):
        for case in ((64, 8192, 32, 8, 128, 16_000_000_000), (1, 1, 1, 1, 64, 0),
                     (0, 5, 5, 5, 5, 0), (-1, 8, 8, 8, 64, 100), (1, 77, 30, 3, 64, -5),
                     (4096, 1 << 20, 80, 8, 128, 1)):
            with self.subTest(case):
                self.assertEqual(fp8kvd.kv_cache_share(*case), cxx("share", *case)[0])


if __name__ == "__main__":
    unittest.main()
