"""What the client makes of a daemon's answers, faults and absences; each test sync and asyncio."""

import contextlib
import io
import sys
import types
import unittest
from unittest import mock

import grpc
import ml_dtypes
import numpy as np

from package import ROOT  # noqa: F401  # installs fp8kvd

import fake_tensors
import fp8kvd
from fake_daemon import FakeDaemon, Fault
from flavours import aio_client
from fp8kvd import errors
from fp8kvd.v1 import kv_pb2 as kv

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
QUICK = fp8kvd.Options("unused", backoff_s_min=0.001, backoff_s_max=0.002)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


class Case:
    """A fake daemon and a client of one flavour."""

    def setUp(self):
        self.daemon = FakeDaemon()
        self.addCleanup(self.daemon.stop)
        self.client = self.connect(self.daemon.target, options=QUICK)

    def step(self, n=1, seed=0):
        return rows(n, 2, 4, seed=seed), rows(n, 2, 4, seed=seed + 1), rows(n, 2, 4, seed=seed + 2)

    def kept(self, sequence, layer=0):
        """The rows of k and v that the daemon has, [tokens, 2, kv_heads, head_dim]."""
        raw = bytes(self.daemon.rows[sequence.handle.seq_id].get(layer, b""))
        return np.frombuffer(raw, ml_dtypes.bfloat16).reshape(-1, 2, 2, 4)


class Sync:
    def connect(self, *arguments, **named):
        client = fp8kvd.Client(*arguments, **named)
        self.addCleanup(client.close)
        return client


class Asyncio:
    def connect(self, *arguments, **named):
        client = aio_client(*arguments, **named)
        self.addCleanup(client.close)
        return client


class Sequences(Case):
    def test_a_with_block_frees_its_sequence(self):
        with self.client.create_sequence() as seq:
            self.assertIn(seq.handle.seq_id, self.daemon.rows)
        self.assertEqual(self.daemon.rows, {})

    def test_a_sequence_freed_inside_its_block_is_no_error(self):
        with self.client.create_sequence() as seq:
            seq.free()
            with self.assertRaises(errors.NotFound):
                seq.free()

    def test_creation_says_what_was_asked(self):
        self.client.create_sequences(2, "small", expected_tokens=9, ttl_s=1.5)
        request = self.daemon.called("CreateSequences")[0]
        self.assertEqual((request.model, request.count, request.expected_tokens, request.ttl_ms),
                         ("small", 2, 9, 1500))

    def test_a_fork_goes_on_where_its_parent_stands_and_leaves_it_alone(self):
        seq = self.client.create_sequence()
        q, k, v = self.step()
        seq.decode(q, k, v, layer=1)
        child = seq.fork()
        child.decode(q, k, v, layer=1)
        self.assertEqual((len(self.kept(seq, 1)), len(self.kept(child, 1))), (1, 2))

    def test_truncate_moves_the_next_position(self):
        seq = self.client.create_sequence()
        seq.append(rows(5, 2, 4), rows(5, 2, 4))
        seq.truncate(2)
        q, k, v = self.step()
        seq.decode(q, k, v, layer=0)
        self.assertEqual((len(self.kept(seq)), seq.seq_len(0)), (3, 3))

    def test_a_list_takes_every_page(self):
        self.client.create_sequences(5)
        self.assertEqual(len(self.client.list_sequences()), 5)
        self.assertEqual(len(self.client.list_sequences(sequences_max=3)), 3)

    def test_an_adopted_sequence_goes_on_at_its_length(self):
        seq = self.client.create_sequence()
        seq.append(rows(5, 2, 4), rows(5, 2, 4))
        other = self.connect(self.daemon.target).adopt_sequence(seq.handle)
        self.assertEqual((other.seq_len(0), other.seq_len(1)), (5, 0))

    def test_server_info_names_models_and_misses_unknown_ones_by_name(self):
        info = self.client.server_info()
        self.assertEqual((info.version, info.model().head_dim), ("1.2.3", 4))
        with self.assertRaisesRegex(KeyError, "'big'.*small"):
            info.model("big")


class Decode(Case):
    def test_out_is_of_the_kind_of_q(self):
        seq = self.client.create_sequence()
        q = rows(1, 2, 4)
        for form in (q, q.view(np.uint16), q.astype(np.float32)):
            out = seq.decode(form, q, q, layer=0, pos=0).out
            self.assertEqual((out.dtype, out.shape), (form.dtype, form.shape))
            np.testing.assert_array_equal(out, form)

    def test_torch_tensors_give_torch_tensors(self):
        seq, q = self.client.create_sequence(), rows(1, 2, 4)
        with fake_tensors.torch() as torch:
            tensor = torch.bf16(q.view(np.uint16))
            reply = seq.decode(tensor, tensor, tensor, layer=0, want_lse=True)
            self.assertEqual((reply.out.dtype, reply.lse.dtype), ("bfloat16", "float32"))
            np.testing.assert_array_equal(reply.out.view(torch.int16).numpy(), q.view(np.int16))

    def test_dlpack_goes_in_and_out(self):
        seq, q = self.client.create_sequence(), rows(1, 2, 4)
        packed = fake_tensors.DLPack(q.view(np.uint16), 4)
        seq.append(packed, packed)
        np.testing.assert_array_equal(self.kept(seq)[0, 0], q[0])
        out = seq.decode(packed, layer=0).out
        self.assertTrue(hasattr(out, "__dlpack__"))
        np.testing.assert_array_equal(out.bits, q.view(np.uint16))

    def test_a_given_array_is_filled(self):
        seq, q = self.client.create_sequence(), rows(1, 2, 4)
        for out in (np.empty(q.shape, np.uint16), np.empty(q.shape, np.float32)):
            kind = "fp32" if out.dtype == np.float32 else "bf16"
            self.assertIs(seq.decode(q, layer=0, pos=0, out=out, out_type=kind).out, out)
            np.testing.assert_array_equal(out, q.view(np.uint16) if kind == "bf16" else q)
        with self.assertRaisesRegex(ValueError, r"out is uint16 \[1\].*uint16 \[1, 2, 4\]"):
            seq.decode(q, layer=0, pos=0, out=np.empty(1, np.uint16))

    def test_bf16_is_never_converted_and_floats_are_rounded_to_even(self):
        seq = self.client.create_sequence()
        k = np.full((1, 2, 4), 1 + 2**-8, np.float32)  # halfway between 1 and 1 + 2^-7
        seq.decode(k, k, k, layer=0)
        np.testing.assert_array_equal(self.kept(seq)[0, 0], np.ones((2, 4)))

    def test_steps_go_behind_one_another_and_attend_only_stays(self):
        seq = self.client.create_sequence()
        for n in (1, 3):
            seq.decode(*self.step(n), layer=2)
        seq.decode(rows(2, 2, 4), layer=2)
        positions = [list(request.positions) for request in self.daemon.called("Decode")]
        self.assertEqual(positions, [[0], [1], [2]])
        self.assertEqual(list(self.daemon.called("Decode")[1].q_lens), [3])

    def test_a_batch_names_each_position(self):
        first, second = self.client.create_sequences(2)
        first.decode(*self.step(), layer=0)
        reply = self.client.decode([first, second], *self.step(2), layer=0, want_lse=True)
        self.assertEqual(list(self.daemon.called("Decode")[1].positions), [1, 0])
        self.assertEqual((reply.out.shape, reply.lse.shape), ((2, 2, 4), (2, 2)))
        self.assertEqual((reply.timings.queue_us, reply.timings.batch_items), (7, 2))

    def test_options_arrive(self):
        seq = self.client.create_sequence("small")
        seq.decode(*self.step(), layer=0, sink_logits=[0.5, 1], omit_sinks=True)
        request = self.daemon.called("Decode")[0]
        self.assertEqual((list(request.sink_logits), request.omit_sinks, request.model),
                         ([0.5, 1], True, "small"))

    def test_what_cannot_be_meant_is_refused_before_it_is_sent(self):
        seq = self.client.create_sequence()
        q, k, v = self.step(2)
        for words, call in (
                ("both be given", lambda: seq.decode(q, k, layer=0)),
                ("sum", lambda: self.client.decode([seq], q, k, v, layer=0)),
                ("positions are needed", lambda: self.client.decode([seq.handle], q[:1], layer=0)),
                ("both must be", lambda: seq.append(k, v[:1]))):
            with self.assertRaisesRegex(ValueError, words):
                call()
        self.assertEqual(self.daemon.called("Decode") + self.daemon.called("Append"), [])


class Failures(Case):
    def test_a_status_is_an_exception_with_the_daemons_words(self):
        for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE,
                     grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
            self.daemon.faults["Decode"] = [Fault(code, "its own words")]
            with self.assertRaisesRegex(errors.Error, "Decode at 127.*its own words") as raised:
                self.client.create_sequence().decode(*self.step(), layer=0)
            self.assertEqual(raised.exception.code, code.name)

    def test_a_lost_answer_is_asked_for_again_and_appends_once(self):
        seq = self.client.create_sequence()
        self.daemon.faults["Decode"] = [Fault(late=True)]
        q, k, v = self.step()
        np.testing.assert_array_equal(seq.decode(q, k, v, layer=0).out, q)
        self.assertEqual((len(self.kept(seq)), len(self.daemon.called("Decode"))), (1, 2))

    def test_full_waits_as_long_as_the_daemon_asks(self):
        self.daemon.faults["CreateSequences"] = [Fault(FULL, pushback_ms=120)]
        with mock.patch("random.uniform", side_effect=AssertionError("no wait of our own")):
            self.client.create_sequence()
        self.assertEqual(len(self.daemon.called("CreateSequences")), 2)

    def test_full_without_a_delay_and_a_negative_delay_are_not_tried_again(self):
        for pushback in (None, -1):
            self.daemon.faults["CreateSequences"] = [Fault(FULL, pushback_ms=pushback)]
            with self.assertRaises(errors.ResourceExhausted):
                self.client.create_sequence()

    def test_retries_end(self):
        self.daemon.faults["CreateSequences"] = [Fault()] * 9
        with self.assertRaises(errors.Unavailable):
            self.client.create_sequence()
        self.assertEqual(len(self.daemon.called("CreateSequences")), 1 + QUICK.retries_max)

    def test_a_wait_beyond_the_timeout_is_not_begun(self):
        self.daemon.faults["CreateSequences"] = [Fault(FULL, pushback_ms=60_000)]
        with self.assertRaises(errors.ResourceExhausted) as raised:
            self.client.create_sequence(timeout_s=5)
        self.assertEqual(raised.exception.retry_after_s, 60)

    def test_a_full_item_is_tried_again_and_its_neighbour_replayed(self):
        first, second = self.client.create_sequences(2)
        self.daemon.item_faults = [kv.Error(code=8, message="no pages", retry_after_ms=1)]
        self.client.decode([first, second], *self.step(2), layer=0)
        self.assertEqual((len(self.kept(first)), len(self.kept(second))), (1, 1))

    def test_a_failed_item_leaves_its_neighbours_result(self):
        first, second = self.client.create_sequences(2)
        self.daemon.item_faults = [kv.Error(code=3, message="q holds too little")]
        q, k, v = self.step(2)
        with self.assertRaisesRegex(errors.BatchError, "1 of 2 items.*INVALID_ARGUMENT") as raised:
            self.client.decode([first, second], q, k, v, layer=0)
        np.testing.assert_array_equal(raised.exception.reply.out[1], q[1])
        self.assertEqual((first.seq_len(0), second.seq_len(0)), (0, 1))

    def test_a_failed_step_made_again_goes_to_the_same_position(self):
        seq = self.client.create_sequence()
        self.daemon.faults["Decode"] = [Fault(grpc.StatusCode.INTERNAL, late=True)]
        step = self.step()
        with self.assertRaises(errors.Internal):
            seq.decode(*step, layer=0)
        seq.decode(*step, layer=0)
        self.assertEqual(len(self.kept(seq)), 1)

    def test_a_late_answer_is_a_deadline_exceeded(self):
        seq = self.client.create_sequence()
        self.daemon.hold.clear()
        with self.assertRaises(errors.DeadlineExceeded):
            seq.decode(*self.step(), layer=0, timeout_s=0.05)

    def test_nobody_there_says_what_to_check(self):
        self.daemon.stop()
        with self.assertRaisesRegex(errors.Unavailable, "check that fp8kvd runs there"):
            self.client.server_info()

    def test_a_closed_client_says_so(self):
        self.client.server_info()
        self.client.close()
        with self.assertRaisesRegex(errors.Cancelled, "closed"):
            self.client.server_info()

    def test_a_restarted_daemon_lost_its_sequences(self):
        seq = self.client.create_sequence()
        self.daemon.restart()
        with self.assertRaisesRegex(errors.SequencesLost, "0x2.*0x1.*create new") as raised:
            seq.decode(*self.step(), layer=0)
        self.assertEqual((raised.exception.handles, raised.exception.incarnation),
                         ((seq.handle,), 2))
        self.client.create_sequence().decode(*self.step(), layer=0)

    def test_a_freed_sequence_is_not_a_lost_one(self):
        seq = self.client.create_sequence()
        seq.free()
        with self.assertRaises(errors.NotFound) as raised:
            seq.stat()
        self.assertNotIsInstance(raised.exception, errors.SequencesLost)


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


class Connection(Case):
    def test_a_token_travels_with_every_call(self):
        client = self.connect(self.daemon.target, token="secret")
        client.create_sequence().append(rows(1, 2, 4), rows(1, 2, 4))
        self.assertEqual(self.daemon.metadata["authorization"], "Bearer secret")

    def test_a_token_without_tls_is_refused_off_this_machine(self):
        with self.assertRaisesRegex(ValueError, "in the clear"):
            self.connect("gpu-7:50051", token="secret")


def both_flavours():
    """Every case above as two test classes."""
    for case in (Sequences, Decode, Failures, Append, Stream, Leases, Connection):
        for flavour in (Sync, Asyncio):
            name = f"{flavour.__name__}{case.__name__}"
            globals()[name] = type(name, (flavour, case, unittest.TestCase), {})


both_flavours()

if __name__ == "__main__":
    unittest.main()
