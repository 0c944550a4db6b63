"""The client against the built daemon: real captures, restarts, a full pool, both flavours."""

import asyncio
import dataclasses
import time
import unittest
from concurrent import futures
from unittest import mock

import ml_dtypes
import numpy as np

from package import ROOT  # installs fp8kvd

import fp8kvd
import reference
from captures import FILES, expected_error, load
from daemon_process import DaemonProcess
from fp8kvd import aio, errors

EXAMPLE = (ROOT / "deploy/example.textproto").read_text()
# One page of 64 tokens in the pool of "tiny", and a model of two layer groups.
TINY = """
policy { allow_fp8_kv: true }
cache { poison_freed_pages: true }
models { name: "tiny" layers: 1 q_heads: 4 kv_heads: 2 head_dim: 64
         expected_seqs: 1 expected_tokens: 64 precision: fp8_kv }
models { name: "two" layers: 2 q_heads: 12 kv_heads: 2 head_dim: 64
         expected_seqs: 8 expected_tokens: 512 precision: fp8_kv }
"""


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


class Case(unittest.TestCase):
    config = TINY
    transport = "grpc"

    @classmethod
    def setUpClass(cls):
        cls.daemon = DaemonProcess(cls.config)
        cls.addClassCleanup(lambda: cls.daemon.stop())  # whichever runs then
        cls.client = fp8kvd.Client(cls.daemon.address, options=cls.options())
        cls.addClassCleanup(lambda: cls.client.close())

    @classmethod
    def options(cls):
        return fp8kvd.Options(cls.daemon.address, transport=cls.transport)

    def tearDown(self):
        self.assertEqual(self.client.list_sequences(), [], "a with block freed every sequence")


class Captures(Case):
    config = EXAMPLE

    def prompt(self, tensors, meta, layers):
        """K and V before the first captured step, the same for every layer: only one is looked at,
        but layers of a window may not run apart."""
        n = int(tensors["positions"][0])
        return [np.broadcast_to(tensors[name][:n], (layers, n, *tensors[name].shape[1:]))
                for name in "kv"]

    def model(self, meta, precision):
        name = {"256": "gemma3_270m", "64": "smollm2_135m"}[meta["head_dim"]]
        return self.client.server_info().model(f"{name}_{precision}")

    def replay(self, name, precision):
        """All captured steps, appending; relative L2 against the captured output."""
        tensors, meta = load(name)
        model, layer = self.model(meta, precision), int(meta["layer"])
        with self.client.create_sequence(model.name, expected_tokens=int(meta["tokens"])) as seq:
            seq.append(*self.prompt(tensors, meta, model.layers))
            outs = [seq.decode(tensors["q"][step], tensors["k"][pos][None],
                               tensors["v"][pos][None], layer=layer, out_type="fp32").out
                    for step, pos in enumerate(tensors["positions"])]
        return reference.relative_l2(np.stack(outs), tensors["out"])

    def test_bf16_gives_the_captured_output(self):
        for name in FILES:
            with self.subTest(name):
                self.assertLessEqual(self.replay(name, "bf16"), 2e-3)

    def test_fp8_kv_is_as_far_off_as_the_format_makes_it(self):
        for name in FILES:
            with self.subTest(name):
                expected = expected_error(name, int(name[-2:]))
                self.assertLessEqual(abs(self.replay(name, "fp8") / expected - 1), 0.02)

    def test_asyncio_streams_the_same_steps(self):
        tensors, meta = load("smollm2_text_a_layer16")
        layer, positions = int(meta["layer"]), tensors["positions"]

        async def replay():
            async with aio.Client(self.daemon.address, options=self.options()) as client, \
                    await client.create_sequence("smollm2_135m_bf16", expected_tokens=1024) as seq:
                await seq.append(*self.prompt(tensors, meta, 30))
                async with client.decode_stream(in_flight_max=8) as stream:
                    futures = [await stream.submit(
                        [seq], tensors["q"][step][None], tensors["k"][pos][None],
                        tensors["v"][pos][None], layer=layer, out_type="fp32")
                        for step, pos in enumerate(positions)]
                    replies = await asyncio.gather(*futures)
            return np.concatenate([reply.out for reply in replies])
        out = asyncio.run(replay())
        self.assertLessEqual(reference.relative_l2(out, tensors["out"].reshape(out.shape)), 2e-3)


class Format(Case):
    def test_a_ragged_batch_agrees_with_fp8_kv_attention(self):
        lengths = (1, 64, 130)
        cache = fp8kvd.Fp8KVCache(len(lengths), 2, 64)
        seqs = self.client.create_sequences(len(lengths), "two", expected_tokens=200)
        for index, n in enumerate(lengths):
            k, v = rows(index, n, 2, 64), rows(9 + index, n, 2, 64)
            seqs[index].append(k, v, layer=1)
            cache.append(index, k, v)
        q = rows(20, len(lengths), 12, 64)
        got = self.client.decode(seqs, q, layer=1, out_type="fp32").out
        self.assertLessEqual(reference.relative_l2(got, fp8kvd.fp8_kv_attention(q, cache)), 2e-3)
        self.client.free_sequences(seqs)


class Questions(Case):
    """What the daemon computes and the functions of fp8kvd.format compute, too."""

    def test_the_errors_of_given_rows_are_the_same(self):
        k, v = rows(1, 50, 2, 64), rows(2, 50, 2, 64)
        got, want = self.client.measure_kv_error(k, v), fp8kvd.fp8_kv_error(k, v)
        for name in ("k", "v", "k_worst_row", "v_worst_row"):
            self.assertAlmostEqual(getattr(got, name), getattr(want, name), places=9)

    def test_attention_over_given_rows_errs_the_same(self):
        q, k, v = rows(3, 4, 6, 64), rows(1, 50, 2, 64), rows(2, 50, 2, 64)
        options = {"sm_scale": 0.25, "window": 20, "softcap": 7.0}
        for more in ({}, options):
            want = fp8kvd.measure_accuracy(q, k, v, [40, 41, 49, 49], **more)
            got = self.client.measure_accuracy(q, k, v, [40, 41, 49, 49], **more)
            self.assert_close(dataclasses.asdict(got), dataclasses.asdict(want))
        self.assertGreater(got.ways["row"].op, 0.01)

        async def from_asyncio():
            async with aio.Client(self.daemon.address, options=self.options()) as client:
                return await client.measure_accuracy(q, k, v, [40, 41, 49, 49], **options)
        self.assertEqual(asyncio.run(from_asyncio()), got)
        with self.assertRaisesRegex(errors.InvalidArgument, "allowed are 41 to 49"):
            self.client.measure_accuracy(q, k, v, [40, 41, 40, 49])
        with self.assertRaisesRegex(ValueError, "4 numbers from 0 to 49"):
            self.client.measure_accuracy(q, k, v, [40, 41, 42, 50])

    def assert_close(self, got, want):
        """Trees of the same form, whose numbers differ by the order of sums."""
        if isinstance(want, dict):
            self.assertEqual(list(got), list(want))
            for name, value in want.items():
                self.assert_close(got[name], value)
        elif isinstance(want, (list, tuple)):
            self.assertEqual(len(got), len(want))
            for pair in zip(got, want):
                self.assert_close(*pair)
        else:
            self.assertAlmostEqual(got, want, places=9)

    def test_the_share_of_a_described_model_is_the_same(self):
        config = (ROOT / "tests/data/hf/llama_3_1_8b.json").read_text()
        for batch, precision in ((1, "bf16"), (64, "fp8_kv")):
            plan = self.client.plan_precision(hf_config_json=config, batch=batch, tokens=8192,
                                              other_bytes=16_000_000_000, allow_fp8_kv=True)
            share = fp8kvd.kv_cache_share(batch, 8192, 32, 8, 128, 16e9)
            self.assertAlmostEqual(plan.cache_share, share, places=12)
            self.assertAlmostEqual(plan.r, (128 + 4) / (2 * 128), places=12)
            self.assertAlmostEqual(plan.predicted_speedup, 1 / (1 - share * (1 - plan.r)),
                                   places=9)
            self.assertEqual((plan.precision, plan.r_source), (precision, "bytes"))
            self.assertEqual((plan.live, plan.speedup_with_calls), (None, None))
        self.assertEqual(self.client.plan_precision("two").precision, "fp8_kv")


class Life(Case):
    def test_a_fork_shares_pages_and_both_stay_right(self):
        with self.client.create_sequence("two", expected_tokens=200) as parent:
            k, v = rows(1, 2, 70, 2, 64), rows(2, 2, 70, 2, 64)
            parent.append(k, v)
            with parent.fork(expected_tokens=200) as child:
                self.assertGreater(child.stat().pages_shared, 0)
                child.truncate(10)
                self.assertEqual((set(child.stat().seq_lens), set(parent.stat().seq_lens)),
                                 ({10}, {70}))
                q = rows(3, 1, 12, 64)
                for seq, n in ((child, 10), (parent, 70)):
                    cache = fp8kvd.Fp8KVCache(1, 2, 64)
                    cache.append(0, k[0, :n], v[0, :n])
                    got = seq.decode(q, layer=0, out_type="fp32").out
                    want = fp8kvd.fp8_kv_attention(q, cache)
                    self.assertLessEqual(reference.relative_l2(got, want), 2e-3)

    def test_a_step_sent_twice_appends_once_and_other_bytes_are_refused(self):
        with self.client.create_sequence("two", expected_tokens=64) as seq:
            q, k, v = rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64)
            first = seq.decode(q, k, v, layer=0).out
            again = seq.decode(q, k, v, layer=0, pos=0).out
            np.testing.assert_array_equal(first, again)
            with self.assertRaises(errors.AlreadyExists):
                seq.decode(q, v, k, layer=0, pos=0)
            with self.assertRaisesRegex(errors.OutOfRange, "seq_len is 1"):
                seq.decode(q, k, v, layer=0, pos=5)
            self.assertEqual(seq.stat().seq_lens, (1, 0))

    def test_a_full_pool_is_waited_for(self):
        holder = self.client.create_sequence("tiny", expected_tokens=64)
        waits = []

        def wait(delay_s):
            waits.append(delay_s)
            holder.free()
            return True
        with mock.patch.object(self.client._core, "wait", wait):
            self.client.create_sequence("tiny", expected_tokens=64).free()
        self.assertEqual(len(waits), 1)
        self.assertGreater(waits[0], 0)

    def test_a_full_pool_that_stays_full_says_so(self):
        with self.client.create_sequence("tiny", expected_tokens=64), \
                mock.patch.object(self.client._core, "wait", return_value=True):
            with self.assertRaises(errors.ResourceExhausted) as raised:
                self.client.create_sequence("tiny", expected_tokens=64)
        self.assertGreater(raised.exception.retry_after_s, 0)

    def test_a_short_lease_is_kept_alive_and_ends_with_its_client(self):
        """Listing names no sequence, so it leaves the lease as it is."""
        with fp8kvd.Client(self.daemon.address) as other:
            other.create_sequence("two", ttl_s=0.3)
            lefts = [self.left_s()]
            self.until(lambda: lefts.append(self.left_s()) or lefts[-1] > lefts[-2])
        self.until(lambda: self.left_s() == 0)

    def left_s(self):
        return sum(info.ttl_left_s for info in self.client.list_sequences())

    def until(self, happened):
        deadline = time.monotonic() + 20
        while not happened():
            self.assertLess(time.monotonic(), deadline)


class Transport(Case):
    """What "auto" chooses, and that both ways say the same."""

    def test_auto_takes_shared_memory_here_and_says_so(self):
        with fp8kvd.Client(self.daemon.address) as client:
            self.assertEqual(client.transport[0], "grpc")
            with client.create_sequence("two", expected_tokens=64) as seq:
                seq.decode(rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64), layer=0)
                self.assertEqual(client.transport, ("shared_memory", ""))

    def test_auto_falls_back_to_grpc_and_says_why(self):
        with self.assertLogs("fp8kvd", "INFO") as logged, \
                mock.patch("fp8kvd._shm.host_id", return_value="another host"), \
                fp8kvd.Client(self.daemon.address) as client, \
                client.create_sequence("two", expected_tokens=64) as seq:
            seq.decode(rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64), layer=0)
            in_use, why = client.transport
        self.assertEqual(in_use, "grpc")
        self.assertIn("host_id is another host's", why)
        self.assertIn("host_id is another host's", logged.output[0])

    def test_shared_memory_alone_fails_where_there_is_none(self):
        options = fp8kvd.Options(self.daemon.address, retries_max=0, transport="shared_memory")
        with mock.patch("fp8kvd._shm.host_id", return_value="another host"), \
                fp8kvd.Client(self.daemon.address, options=options) as client, \
                client.create_sequence("two", expected_tokens=64) as seq:
            with self.assertRaisesRegex(errors.Unavailable, "no shared memory"):
                seq.decode(rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64), layer=0)

    def test_calls_larger_than_the_session_go_by_grpc(self):
        options = fp8kvd.Options(self.daemon.address, shared_memory_bytes=64 << 10)
        with fp8kvd.Client(self.daemon.address, options=options) as client, \
                client.create_sequence("two", expected_tokens=512) as seq:
            k, v = rows(2, 2, 500, 2, 64), rows(3, 2, 500, 2, 64)
            seq.append(k, v)
            self.assertEqual(seq.stat().seq_lens, (500, 500))
            large, small = rows(1, 64, 12, 64), rows(4, 1, 12, 64)
            with client.decode_stream() as stream:
                answers = [stream.submit([seq], q, layer=0, positions=[400], q_lens=(len(q),))
                           for q in (small, large, small)]
                shapes = [future.result(20).out.shape for future in answers]
            self.assertEqual(shapes, [(1, 12, 64), (64, 12, 64), (1, 12, 64)])

    def test_threads_share_a_session(self):
        step = rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64)
        with fp8kvd.Client(self.daemon.address) as client:
            seqs = client.create_sequences(4, "two", expected_tokens=64)
            want = seqs[0].decode(*step, layer=0).out
            with futures.ThreadPoolExecutor(4) as pool:
                outs = pool.map(lambda seq: [seq.decode(*step, layer=0, pos=0).out
                                             for _ in range(50)], seqs)
                for of_seq in outs:
                    for out in of_seq:
                        np.testing.assert_array_equal(out, want)
            self.assertEqual(client.transport, ("shared_memory", ""))
            client.free_sequences(seqs)


class Restart(Case):
    def restart(self):
        self.daemon.kill()
        type(self).daemon = DaemonProcess(self.config, port=self.daemon.port)

    def test_the_sequences_are_lost_and_new_ones_work(self):
        seq = self.client.create_sequence("two", expected_tokens=64)
        step = rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64)
        out = seq.decode(*step, layer=0).out
        before = self.client.server_info().incarnation
        self.restart()
        for call in (lambda: seq.decode(*step, layer=0), lambda: seq.append(*step[1:]), seq.stat):
            with self.assertRaises(errors.SequencesLost) as raised:
                call()
            self.assertNotEqual(raised.exception.incarnation, before)
            self.assertEqual(raised.exception.handles, (seq.handle,))
        with self.client.create_sequence("two", expected_tokens=64) as again:
            np.testing.assert_array_equal(again.decode(*step, layer=0).out, out)

    def test_an_open_stream_says_the_same(self):
        seq = self.client.create_sequence("two", expected_tokens=64)
        step = rows(1, 1, 12, 64), rows(2, 1, 2, 64), rows(3, 1, 2, 64)
        with self.client.decode_stream() as stream:
            stream.submit([seq], *step, layer=0).result(20)
            self.restart()
            with self.assertRaises(errors.SequencesLost):
                stream.submit([seq], *step, layer=0).result(20)


class SharedCaptures(Captures):
    transport = "shared_memory"


class SharedFormat(Format):
    transport = "shared_memory"


class SharedLife(Life):
    transport = "shared_memory"


class SharedRestart(Restart):
    transport = "shared_memory"


if __name__ == "__main__":
    unittest.main()
