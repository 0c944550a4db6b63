"""Appends, decode streams, and renewals in the background; each test sync and asyncio."""

import asyncio
import contextlib
import io
import sys
import types
import unittest
from unittest import mock

import numpy as np

from client_case import Case, both_flavours, rows

import fp8kvd
from fake_daemon import FakeDaemon, Fault
from flavours import LOOP
from fp8kvd import _append, aio, errors
from fp8kvd.v1 import kv_pb2 as kv


class Append(Case):
    def setUp(self):
        super().setUp()
        options = fp8kvd.Options("unused", backoff_s_min=0.001, append_chunk_bytes=6 * 32)
        self.client = self.connect(self.daemon.target, options=options)
        self.seq = self.client.create_sequence()

    def check(self, k, v, layers=1):
        for layer in range(layers):
            want = np.stack([k, v], axis=1 + (k.ndim == 4))
            np.testing.assert_array_equal(self.kept(self.seq, layer),
                                          want[layer] if k.ndim == 4 else want)

    def test_goes_in_chunks(self):
        k, v = rows(20, 2, 4), rows(20, 2, 4, seed=1)
        self.seq.append(k, v)
        self.check(k, v)
        self.assertEqual([chunk.n for chunk in self.daemon.called("Chunk")], [6, 6, 6, 2])

    def test_layers_take_turns(self):
        k, v = rows(3, 20, 2, 4), rows(3, 20, 2, 4, seed=1)
        self.seq.append(k, v)
        self.check(k, v, layers=3)
        self.assertEqual([chunk.layer for chunk in self.daemon.called("Chunk")][:4], [0, 1, 2, 0])

    def test_short_layers_share_a_chunk(self):
        k, v = rows(3, 2, 2, 4), rows(3, 2, 2, 4, seed=1)
        self.seq.append(k, v)
        self.check(k, v, layers=3)
        self.assertEqual([chunk.layers_count for chunk in self.daemon.called("Chunk")], [3])

    def test_goes_on_from_the_committed_lengths_after_a_break(self):
        k, v = rows(3, 20, 2, 4), rows(3, 20, 2, 4, seed=1)
        self.daemon.faults["Append"] = [Fault(messages=4), Fault(messages=1)]
        self.seq.append(k, v)
        self.check(k, v, layers=3)
        sent = [(chunk.layer, chunk.pos) for chunk in self.daemon.called("Chunk")]
        self.assertEqual(len(sent), len(set(sent)), "nothing committed is sent again")

    def test_a_lost_answer_to_the_whole_is_no_error(self):
        k, v = rows(7, 2, 4), rows(7, 2, 4, seed=1)
        self.daemon.faults["Append"] = [Fault(messages=99)]
        self.seq.append(k, v)
        self.check(k, v)
        self.assertEqual(len(self.daemon.called("Append")), 1)

    def test_progress_counts_the_tries_anew(self):
        k, v = rows(20, 2, 4), rows(20, 2, 4, seed=1)
        self.daemon.faults["Append"] = [Fault(messages=1 if n % 2 else 0) for n in range(6)]
        self.seq.append(k, v)
        self.check(k, v)

    def test_other_bytes_are_already_exists(self):
        self.seq.append(rows(4, 2, 4), rows(4, 2, 4))
        with self.assertRaises(errors.AlreadyExists):
            self.seq.append(rows(4, 2, 4, seed=9), rows(4, 2, 4), pos=0)
        self.assertEqual(self.seq.seq_len(0), 4)

    def test_tokens_that_were_never_sent_are_not_taken_for_ours(self):
        """A put of other bytes must not win in silence: what is there may be somebody else's."""
        plan = _append.Plan("", self.seq.handle, 0, 0, rows(1, 8, 2, 4).view(np.uint16),
                            rows(1, 8, 2, 4).view(np.uint16), 0, 4 * 32)
        self.assertFalse(plan.update([100]))
        chunks = plan.chunks()
        next(chunks)
        self.assertTrue(plan.update([100]))
        self.assertFalse(plan.done)
        next(chunks)
        plan.update([100])
        self.assertTrue(plan.done)

    def test_a_restart_under_it_lost_the_sequence(self):
        self.daemon.restart()
        with self.assertRaises(errors.SequencesLost):
            self.seq.append(rows(4, 2, 4), rows(4, 2, 4))

    def test_skip_to_goes_with_the_first_chunk(self):
        self.seq.append(rows(10, 2, 4), rows(10, 2, 4), pos=8, skip_to=8)
        self.assertEqual([chunk.skip_to for chunk in self.daemon.called("Chunk")], [8, 0])
        self.assertEqual(self.seq.seq_len(0), 18)

    def test_layers_of_different_lengths_need_a_position(self):
        self.seq.append(rows(4, 2, 4), rows(4, 2, 4))
        with self.assertRaisesRegex(ValueError, r"\[0, 4\] tokens: give pos"):
            self.seq.append(rows(2, 4, 2, 4), rows(2, 4, 2, 4))

    def test_a_bar_shows_when_asked_and_never_off_a_terminal(self):
        bars = []
        tqdm = types.ModuleType("tqdm")
        tqdm.tqdm = lambda **options: bars.append(mock.Mock(**options)) or bars[-1]
        with mock.patch.dict(sys.modules, tqdm=tqdm):
            self.seq.append(rows(20, 2, 4), rows(20, 2, 4), progress=True)
            with mock.patch("fp8kvd._progress._LONG_BYTES", 1), \
                    contextlib.redirect_stderr(io.StringIO()):
                self.seq.append(rows(20, 2, 4), rows(20, 2, 4))
        (bar,) = bars
        moved = sum(call.args[0] for call in bar.update.call_args_list)
        self.assertEqual((moved, bar.total), (20 * 32, 20 * 32))
        bar.close.assert_called_once()


class Stream(Case):
    def test_replies_in_any_order_find_their_calls(self):
        seq = self.client.create_sequence()
        self.daemon.reverse = 2
        steps = [self.step(seed=seed) for seed in (10, 20, 30)]
        with self.client.decode_stream() as stream:
            futures = [stream.submit([seq], *step, layer=layer)
                       for layer, step in enumerate(steps)]
            for future, step in zip(futures, steps):
                np.testing.assert_array_equal(future.result(10).out, step[0])

    def test_positions_count_what_is_under_way(self):
        seq = self.client.create_sequence()
        with self.client.decode_stream() as stream:
            futures = [stream.submit([seq], *self.step(seed=n), layer=0) for n in range(5)]
            for future in futures:
                future.result(10)
        self.assertEqual((len(self.kept(seq)), seq.seq_len(0)), (5, 5))

    def test_a_break_sends_what_is_unanswered_again_in_its_order(self):
        seq = self.client.create_sequence()
        self.daemon.faults["DecodeStream"] = [Fault(messages=2), Fault(messages=0)]
        with self.client.decode_stream() as stream:
            futures = [stream.submit([seq], *self.step(seed=n), layer=0) for n in range(6)]
            for seed, future in enumerate(futures):
                np.testing.assert_array_equal(future.result(10).out, self.step(seed=seed)[0])
        self.assertEqual(len(self.kept(seq)), 6)

    def test_a_failed_call_steps_back_and_leaves_the_stream_open(self):
        seq = self.client.create_sequence()
        self.daemon.item_faults = [kv.Error(code=3, message="too large")]
        with self.client.decode_stream() as stream:
            with self.assertRaises(errors.InvalidArgument):
                stream.submit([seq], *self.step(), layer=0).result(10)
            stream.submit([seq], *self.step(), layer=0).result(10)
        self.assertEqual(len(self.kept(seq)), 1)

    def test_a_daemon_that_stays_away_fails_what_is_unanswered(self):
        seq = self.client.create_sequence()
        self.daemon.faults["DecodeStream"] = [Fault(details="gone")] * 9
        with self.client.decode_stream() as stream:
            future = stream.submit([seq], *self.step(), layer=0)
            with self.assertRaisesRegex(errors.Unavailable, "gone"):
                future.result(10)
            with self.assertRaisesRegex(errors.Cancelled, "closed"):
                stream.submit([seq], *self.step(), layer=0)

    def test_close_cancels_what_is_unanswered(self):
        seq = self.client.create_sequence()
        self.daemon.hold.clear()
        with self.client.decode_stream() as stream:
            future = stream.submit([seq], *self.step(), layer=0)
        with self.assertRaises(errors.Cancelled):
            future.result(10)

    def test_a_client_that_closes_ends_its_streams(self):
        seq = self.client.create_sequence()
        with self.client.decode_stream() as stream:
            stream.submit([seq], *self.step(), layer=0).result(10)
            self.client.close()
            with self.assertRaises(errors.Cancelled):
                stream.submit([seq], *self.step(), layer=0).result(10)

    def test_a_restart_lost_the_sequences(self):
        seq = self.client.create_sequence()
        with self.client.decode_stream() as stream:
            stream.submit([seq], *self.step(), layer=0).result(10)
            self.daemon.restart()
            with self.assertRaises(errors.SequencesLost):
                stream.submit([seq], *self.step(), layer=0).result(10)


class Leases(Case):
    def test_sequences_are_renewed_in_the_background(self):
        self.daemon.ttl_ms = 30
        seqs = self.client.create_sequences(2)
        renewed = self.wait_for("RenewSequences", 3)
        self.assertEqual([handle.seq_id for handle in renewed[-1].handles],
                         [seq.handle.seq_id for seq in seqs])

    def test_a_freed_sequence_is_not(self):
        self.daemon.ttl_ms = 30
        gone, kept = self.client.create_sequences(2)
        gone.free()
        renewed = self.wait_for("RenewSequences", len(self.daemon.called("RenewSequences")) + 2)
        self.assertEqual([handle.seq_id for handle in renewed[-1].handles], [kept.handle.seq_id])

    def test_a_renewal_that_hangs_is_tried_again_before_the_lease_ends(self):
        self.daemon.ttl_ms = 300
        self.daemon.hold.clear()
        self.client.create_sequence()
        self.wait_for("RenewSequences", 2)

    def test_a_client_closes_while_it_renews(self):
        self.daemon.ttl_ms = 30
        self.daemon.hold.clear()
        self.client.create_sequence()
        self.wait_for("RenewSequences", 1)
        self.client.close()

    def wait_for(self, method, count):
        for _ in range(2000):
            if len(self.daemon.called(method)) >= count:
                return self.daemon.called(method)
            self.client.server_info()  # a call's time, where a sleep would be
        self.fail(f"{method} was not called {count} times")


class Tasks(unittest.TestCase):
    """What only asyncio has."""

    def test_a_cancelled_task_cancels_its_call(self):
        daemon = FakeDaemon()
        self.addCleanup(daemon.stop)
        daemon.hold.clear()

        async def run():
            async with aio.Client(daemon.target) as client:
                seq = await client.create_sequence()
                q, k, v = (rows(1, 2, 4, seed=seed) for seed in range(3))
                task = asyncio.create_task(seq.decode(q, k, v, layer=0))
                await asyncio.to_thread(daemon.waits.wait, 10)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                self.assertTrue(await asyncio.to_thread(daemon.ended.wait, 10))
                daemon.hold.set()
                await seq.free()  # the client goes on
        LOOP.result(run())


both_flavours(globals(), Append, Stream, Leases)

if __name__ == "__main__":
    unittest.main()
