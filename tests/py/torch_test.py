"""The package with torch's own tensors; in the other tests fake_tensors stands in. Run by tests/hf.

Warnings are errors: torch warns when it is given memory that it may not write.
"""

import unittest
import warnings

from package import ROOT  # installs fp8kvd

import fp8kvd
from daemon_process import DaemonProcess

import torch

GENERATOR = torch.Generator().manual_seed(0)


def rows(*shape):
    return torch.randn(*shape, generator=GENERATOR).to(torch.bfloat16)


class ByDLPack:
    """A tensor that says of itself no more than the protocol does."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


class Format(unittest.TestCase):
    def test_codes_are_those_of_torchs_own_cast(self):
        k = rows(40, 3, 64)
        codes, scales = fp8kvd.quantize_fp8_kv(k)
        cast = (k.float() / scales[..., None]).to(torch.float8_e4m3fn)
        self.assertTrue(torch.equal(cast.view(torch.uint8), codes))
        self.assertTrue(torch.equal(fp8kvd.e4m3_values(codes), cast.float()))


class Decode(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        daemon = DaemonProcess((ROOT / "deploy/example.textproto").read_text())
        cls.addClassCleanup(daemon.stop)
        client = fp8kvd.Client(daemon.address)
        cls.addClassCleanup(client.close)
        cls.seq = client.create_sequence("smollm2_135m_fp8")
        k, v, cls.q = rows(3, 40, 64).transpose(0, 1), rows(40, 3, 64), rows(1, 9, 64)
        cls.seq.append(k, v, layer=0)  # k is not contiguous
        cache = fp8kvd.Fp8KVCache(1, 3, 64)
        cache.append(0, k, v)
        cls.want = fp8kvd.fp8_kv_attention(cls.q, cache)

    def check(self, out, dtype):
        self.assertEqual((out.dtype, out.shape), (dtype, self.q.shape))
        error = (out.double() - self.want).norm() / self.want.norm()
        self.assertLess(float(error), 3e-3 if dtype == torch.bfloat16 else 2e-3)
        out.add_(1)  # it may be written

    def test_results_are_of_the_type_of_q(self):
        self.check(self.seq.decode(self.q, layer=0).out, torch.bfloat16)
        self.check(self.seq.decode(self.q, layer=0, out_type="fp32").out, torch.float32)
        self.check(self.seq.decode(self.q.float(), layer=0).out, torch.float32)

    def test_a_given_tensor_is_filled(self):
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            out = torch.empty(self.q.shape, dtype=dtype)
            self.seq.decode(self.q, layer=0, out=out, out_type=name)
            self.check(out, dtype)

    def test_dlpack_goes_in_and_out(self):
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            out = self.seq.decode(ByDLPack(self.q), layer=0, out_type=name).out
            self.check(torch.from_dlpack(out), dtype)


if __name__ == "__main__":
    warnings.simplefilter("error")
    unittest.main(warnings="error")
