"""The three captures of real attention through the daemon: from Python, and by fp8kvctl replay."""

import json
import subprocess
import unittest

import numpy as np

import reference
from captures import CAPTURES, FILES, expected_error, load
from daemon_process import BIN, ROOT
from harness import Sequence, TestCase, kv


class Captures(TestCase):
    config = (ROOT / "deploy/example.textproto").read_text()

    def find(self, meta, precision):
        """The configured model and the layers that share pages with the captured one."""
        for model in self.models.values():
            if (model.q_heads, model.head_dim) != (int(meta["q_heads"]), int(meta["head_dim"])):
                continue
            for group in model.groups:
                if int(meta["layer"]) in group.layers and group.precision == precision:
                    return model, list(group.layers)
        raise AssertionError(f"deploy/example.textproto has no model for {meta['model']}")

    def replay(self, name, precision):
        """All 32 steps, appending; relative L2 of the output against the captured one."""
        tensors, meta = load(name)
        model, layers = self.find(meta, precision)
        layer, positions = int(meta["layer"]), tensors["positions"]
        seq = self.create(model.name, expected_tokens=int(meta["tokens"]))[0]
        self.assertIsInstance(seq, Sequence)
        for begin in range(0, int(positions[0]), 200):
            end = min(begin + 200, int(positions[0]))
            rows = dict(pos=begin, n=end - begin, k=tensors["k"][begin:end].tobytes(),
                        v=tensors["v"][begin:end].tobytes())
            self.stub.Append(
                kv.AppendRequest(model=model.name, handle=seq.handle, layer=member, **rows)
                for member in layers)
        outs = []
        for step, pos in enumerate(positions):
            response = self.stub.Decode(kv.DecodeRequest(
                model=model.name, layer=layer, handles=[seq.handle], positions=[int(pos)],
                q=tensors["q"][step].tobytes(), k=tensors["k"][pos].tobytes(),
                v=tensors["v"][pos].tobytes(), out_type=kv.OUT_TYPE_FP32))
            self.assertEqual(list(response.item_errors), [])
            outs.append(np.frombuffer(response.out, np.float32).reshape(tensors["out"][step].shape))
        return reference.relative_l2(np.stack(outs), tensors["out"])

    def test_bf16_gives_the_captured_output(self):
        for name in FILES:
            with self.subTest(name):
                self.assertLessEqual(self.replay(name, kv.PRECISION_BF16), 2e-3)

    def test_fp8_kv_is_as_far_off_as_the_format_makes_it(self):
        for name in FILES:
            with self.subTest(name):
                expected = expected_error(name, int(name[-2:]))
                got = self.replay(name, kv.PRECISION_FP8_KV)
                self.assertLessEqual(abs(got / expected - 1), 0.02, f"{got} against {expected}")

    def test_fp8kvctl_replays_them_all(self):
        files = [str(CAPTURES / f"{name}.safetensors") for name in FILES]
        ran = subprocess.run(
            [BIN / "fp8kvctl", "replay", "--json", f"--target={self.daemon.address}", *files],
            capture_output=True, text=True, timeout=120)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        report = json.loads(ran.stdout)
        self.assertTrue(report["contract_held"])
        self.assertEqual([r["precision"] for r in report["replays"]], ["bf16", "fp8_kv"] * 3)
        for bf16, fp8 in zip(report["replays"][::2], report["replays"][1::2]):
            self.assertLessEqual(bf16["rel_l2"], 2e-3)
            self.assertLess(fp8["cache_bytes"] / bf16["cache_bytes"], 0.56)

    def test_fp8kvctl_bench_fits_the_example_as_it_is(self):
        ran = subprocess.run(
            [BIN / "fp8kvctl", "bench", "--json", "--seconds=0.2",
             f"--target={self.daemon.address}"], capture_output=True, text=True, timeout=120)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertGreater(json.loads(ran.stdout)["calls"], 0)

    def test_fp8kvctl_fails_when_the_contract_is_not_met(self):
        """gemma's errors for SmolLM2's capture: the layers differ by more than 2 %."""
        ran = subprocess.run(
            [BIN / "fp8kvctl", "replay", "--precision=fp8_kv", f"--target={self.daemon.address}",
             f"--errors={CAPTURES}/gemma3_text_a_errors.json",
             CAPTURES / "smollm2_text_a_layer16.safetensors"],
            capture_output=True, text=True, timeout=120)
        self.assertEqual(ran.returncode, 1)
        self.assertIn("accuracy contract BROKEN", ran.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
