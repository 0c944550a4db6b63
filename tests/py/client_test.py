"""What the client makes of a daemon's answers, faults and absences; each test sync and asyncio."""

import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import unittest
from unittest import mock

import grpc
import numpy as np

from client_case import QUICK, Case, both_flavours, rows

import fake_tensors
import fp8kvd
from fake_daemon import FakeDaemon, Fault
from fake_session import FakeSession
from fp8kvd import _shm, errors
from fp8kvd._leases import Leases
from fp8kvd.v1 import kv_pb2 as kv

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


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
        self.assertEqual((info.shm_socket, info.host_id), ("/run/fake.sock", "a-boot-id"))
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
        self.assertEqual(len(self.daemon.called("Decode")), 2)

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

    def test_positions_may_be_an_array(self):
        seq = self.client.create_sequence()
        seq.append(rows(300, 2, 4), rows(300, 2, 4))
        self.client.decode([seq.handle], rows(1, 2, 4), layer=0, positions=np.array([299]))
        self.assertEqual(list(self.daemon.called("Decode")[0].positions), [299])

    def test_a_batch_names_each_position(self):
        first, second = self.client.create_sequences(2)
        first.decode(*self.step(), layer=0)
        reply = self.client.decode([first, second], *self.step(2), layer=0, want_lse=True)
        self.assertEqual(list(self.daemon.called("Decode")[1].positions), [1, 0])
        self.assertEqual((reply.out.shape, reply.lse.shape), ((2, 2, 4), (2, 2)))
        self.assertEqual((reply.timings.queue_us, reply.timings.batch_items), (7, 2))

    def test_options_arrive(self):
        seq = self.client.create_sequence("small")
        seq.decode(*self.step(), layer=0, sink_logits=np.array([0.5, 1], np.float32),
                   omit_sinks=True)
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
                ("holds 0 tokens", lambda: seq.decode(q[:1], layer=0)),
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

    def test_a_delay_may_stand_in_the_details_and_the_trailer_wins(self):
        for fault, want in ((Fault(FULL, retry_info_ms=1250), 1.25),
                            (Fault(FULL, retry_info_ms=7, pushback_ms=2000), 2),
                            (Fault(FULL, retry_info_ms=7, pushback_ms=-1), -1e-3)):
            self.daemon.faults["CreateSequences"] = [fault]
            with self.assertRaises(errors.ResourceExhausted) as raised:
                self.client.create_sequence(timeout_s=1)
            self.assertEqual(raised.exception.retry_after_s, want)

    def test_full_waits_as_long_as_the_details_ask(self):
        self.daemon.faults["CreateSequences"] = [Fault(FULL, retry_info_ms=20)]
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

    def test_a_reply_that_cannot_be_read_is_the_daemons_fault(self):
        seq = self.client.create_sequence()
        self.daemon.out = b"short"
        with self.assertRaisesRegex(errors.Internal, "cannot be read.*another version"):
            seq.decode(*self.step(), layer=0)
        with self.client.decode_stream() as stream:
            with self.assertRaisesRegex(errors.Internal, "cannot be read"):
                stream.submit([seq], *self.step(), layer=0).result(10)

    def test_a_cancelled_call_ends_on_the_daemon_too(self):
        seq = self.client.create_sequence()
        self.daemon.hold.clear()
        calls = []
        caller = threading.Thread(target=lambda: calls.append(self.failure_of(
            lambda: seq.decode(*self.step(), layer=0))))
        caller.start()
        self.assertTrue(self.daemon.waits.wait(10))
        self.client.close()
        caller.join(10)
        self.assertIsInstance(calls[0], errors.Cancelled)
        self.assertTrue(self.daemon.ended.wait(10))

    def failure_of(self, call):
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # of another thread, judged by the test's own
            return error

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


class Connection(Case):
    def test_a_token_travels_with_every_call(self):
        client = self.connect(self.daemon.target, token="secret")
        client.create_sequence().append(rows(1, 2, 4), rows(1, 2, 4))
        self.assertEqual(self.daemon.metadata["authorization"], "Bearer secret")

    def test_a_token_without_tls_is_refused_off_this_machine(self):
        for target in ("gpu-7:50051", "localhost.gpu-7:50051", "127.gpu-7:50051",
                       "ipv4:127.0.0.1:50051,10.0.0.7:50051", "[::1]gpu-7:50051"):
            with self.subTest(target), self.assertRaisesRegex(ValueError, "in the clear"):
                self.connect(target, token="secret")

    def test_a_token_goes_to_this_machine_by_all_its_names(self):
        for target in ("localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/run/fp8kvd.sock",
                       "ipv4:127.0.0.1:1", "ipv6:[::1]:1"):
            with self.subTest(target):
                self.connect(target, token="secret")

    def test_options_that_cannot_be_are_refused(self):
        for wrong in ({"target": ""}, {"timeout_s": 0}, {"retries_max": -1},
                      {"append_chunk_bytes": 0}, {"shared_memory_bytes": 0}):
            with self.subTest(wrong), self.assertRaises(ValueError):
                fp8kvd.Options(**{"target": "localhost:1", **wrong})


class Waiting(unittest.TestCase):
    """Threads that share a session of shared memory: one takes replies in for all."""

    @unittest.skipUnless(_shm.host_id(), "shared memory is not used on this machine")
    def test_one_who_gives_up_does_not_take_the_lead_with_it(self):
        session = FakeSession()
        self.addCleanup(session.close)
        client, done = session.client, {}
        message = _shm.Message(_shm.DECODE, b"", (0, 0, 0), 1)
        pending = [client.send(message, 60) for _ in range(3)]

        def wait(index):
            done[index] = client.wait(pending[index], 60)

        first, third = (threading.Thread(target=wait, args=(index,)) for index in (0, 2))
        first.start()
        eventually(client._leader.locked)
        self.assertFalse(client.wait(pending[1], 0.001))
        third.start()
        eventually(lambda: pending[2].waits)
        session.answer(1)
        first.join()
        session.answer(3)
        third.join(20)
        self.assertEqual(done, {0: True, 2: True})


class Door(unittest.TestCase):
    """What a session makes of a socket that is not the daemon's."""

    @unittest.skipUnless(_shm.host_id(), "shared memory is not used on this machine")
    def test_no_descriptor_of_an_odd_welcome_is_kept(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = f"{folder.name}/socket"
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(door.close)
        door.bind(path)
        door.listen()

        def answer(packet, descriptors):
            guest, _ = door.accept()
            with guest:
                socket.send_fds(guest, [packet], descriptors)

        for size in (1, 47, 48, 504):
            for count in (0, 1, 2):
                with self.subTest(size=size, count=count):
                    mine, lent = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                    server = threading.Thread(target=answer, args=(bytes(size), [lent] * count))
                    server.start()
                    with self.assertRaises((_shm.Broken, OSError, ValueError)):
                        _shm.Session(path, "t" * 64, 0)
                    server.join()
                    os.close(lent)
                    self.assertEqual(os.read(mine, 1), b"", "nobody has the other end")
                    os.close(mine)


class Renewals(unittest.TestCase):
    def test_a_lease_that_a_finalizer_drops_meanwhile_disturbs_none(self):
        leases = Leases()
        handles = [fp8kvd.Handle(i, 1, 1, 0) for i in range(3)]
        for handle in handles:
            leases.add(handle, ttl_s=3, now=0)

        class Now(float):  # the collector may run wherever something is made
            def __add__(self, other):
                leases.drop(handles[1])
                return float(self) + other

        self.assertEqual(leases.take_due(Now(5)), [handles[0], handles[2]])


def eventually(condition):
    for _ in range(10_000):
        if condition():
            return
        time.sleep(1e-3)
    raise AssertionError("it never came true")


@unittest.skipUnless(shutil.which("openssl"), "makes its certificate with openssl")
class Encrypted(Case):
    """A daemon that wants a certificate from its clients, too; one that signs itself serves all."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        key, certificate = (pathlib.Path(folder.name) / name for name in ("key", "certificate"))
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                        "ec_paramgen_curve:P-256", "-nodes", "-days", "1", "-subj", "/CN=localhost",
                        "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out",
                        certificate], check=True, capture_output=True, timeout=60)
        self.key, self.certificate = key.read_bytes(), certificate.read_bytes()
        self.daemon = FakeDaemon(grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.certificate, require_client_auth=True))
        self.addCleanup(self.daemon.stop)
        self.target = self.daemon.target.replace("127.0.0.1", "localhost")

    def test_calls_and_their_token_go_through(self):
        tls = fp8kvd.Tls(self.certificate, self.key, self.certificate)
        client = self.connect(self.target, tls=tls, token="secret")
        self.assertEqual(client.server_info().version, "1.2.3")
        self.assertEqual(self.daemon.metadata["authorization"], "Bearer secret")

    def test_a_daemon_that_nobody_vouches_for_is_not_talked_to(self):
        options = fp8kvd.Options("unused", retries_max=0)
        for tls in (True, fp8kvd.Tls(self.certificate), None):  # the last is no TLS at all
            with self.assertRaises(errors.Unavailable):
                self.connect(self.target, tls=tls, options=options).server_info()
        self.assertEqual(self.daemon.calls, [])


both_flavours(globals(), Encrypted, Sequences, Decode, Failures, Connection)

if __name__ == "__main__":
    unittest.main()
