"""Calls that touch no tokens: what runs there, plans, errors of the format, lists, health."""

import json
import subprocess
import unittest

import grpc
import numpy as np

import reference
from daemon_process import BIN, ROOT
from harness import TestCase, kv


class Info(TestCase):
    def test_models_have_the_shape_that_was_configured(self):
        model = self.models["rich_fp8_kv"]
        self.assertEqual((model.layers, model.q_heads, model.kv_heads, model.head_dim),
                         (2, 12, 4, 128))
        self.assertAlmostEqual(model.sm_scale, 0.05)
        (group,) = model.groups
        self.assertEqual((list(group.layers), group.window, group.softcap, group.has_sinks),
                         ([0, 1], 100, 20, True))
        self.assertEqual(group.precision, kv.PRECISION_FP8_KV)
        self.assertEqual(group.page_tokens, 64)
        self.assertIn("fp8_kv", model.precision_reason)

    def test_health_is_serving(self):
        check = self.daemon.channel.unary_unary("/grpc.health.v1.Health/Check")
        for service in (b"", b"fp8kvd.v1.DecodeAttention"):
            request = b"\x0a" + bytes([len(service)]) + service if service else b""
            self.assertEqual(check(request), b"\x08\x01")  # status: SERVING

    def test_a_full_pool_says_when_to_come_back(self):
        with self.assertRaises(grpc.RpcError) as raised:
            self.create("plain_bf16", 64, expected_tokens=100_000)
        trailers = dict(raised.exception.trailing_metadata())
        self.assertGreater(int(trailers["grpc-retry-pushback-ms"]), 0)

    def test_a_list_is_given_page_by_page(self):
        made = self.create("plain_bf16", 5) + self.create("plain_fp8_kv", 3)
        seen, token = [], ""
        while True:
            reply = self.stub.ListSequences(
                kv.ListSequencesRequest(page_size=3, page_token=token))
            self.assertLessEqual(len(reply.sequences), 3)
            seen += [s.handle.seq_id for s in reply.sequences]
            token = reply.next_page_token
            if not token:
                break
        self.assertEqual(sorted(seen), sorted(seq.handle.seq_id for seq in made))
        only = self.stub.ListSequences(kv.ListSequencesRequest(model="plain_fp8_kv"))
        self.assertEqual({s.model for s in only.sequences}, {"plain_fp8_kv"})
        self.assertEqual(len(only.sequences), 3)

    def test_the_error_of_the_format_is_that_of_the_reference(self):
        k, v = self.rows(50, 2, 64), self.rows(50, 2, 64)
        reply = self.stub.MeasureKvError(kv.MeasureKvErrorRequest(
            kv_heads=2, head_dim=64, k=k.tobytes(), v=v.tobytes()))
        self.assertEqual(reply.tokens, 50)
        for bits, error, worst in ((k, reply.k_error, reply.k_error_worst_row),
                                   (v, reply.v_error, reply.v_error_worst_row)):
            rows = reference.from_bf16(bits)
            coded = reference.quantise(rows)
            self.assertAlmostEqual(error / reference.relative_l2(coded, rows), 1, places=5)
            by_row = (np.linalg.norm(coded - rows, axis=-1)
                      / np.linalg.norm(rows.astype(np.float64), axis=-1))
            self.assertAlmostEqual(worst / by_row.max(), 1, places=5)

    def test_the_daemon_and_fp8kvctl_plan_alike(self):
        path = ROOT / "tests/data/hf/gemma_3_27b.json"
        reply = self.stub.PlanPrecision(kv.PlanPrecisionRequest(
            hf_config_json=path.read_text(), batch=32, tokens=8192, allow_fp8_kv=True))
        ran = subprocess.run(
            [BIN / "fp8kvctl", "plan", "--json", f"--hf_config={path}", "--batch=32",
             "--tokens=8192", "--allow_fp8_kv"], capture_output=True, text=True, timeout=60)
        plan = json.loads(ran.stdout)
        for name in ("kv_bytes", "other_bytes", "cache_share", "r", "predicted_speedup"):
            self.assertAlmostEqual(getattr(reply, name) / plan[name], 1, places=12)
        self.assertEqual(reply.r_source, plan["r_source"])
        self.assertEqual(plan["precision"], "fp8_kv")
        self.assertEqual(reply.precision, kv.PRECISION_FP8_KV)


if __name__ == "__main__":
    unittest.main(verbosity=2)
