"""Requests that must fail: the code, words that help, and no harm to what stands beside them."""

import unittest

import grpc
import numpy as np

import reference
from harness import TestCase, kv

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


class Messages(TestCase):
    """Errors of a message as a whole."""

    def test_models_that_are_not_there(self):
        self.fails(NOT_FOUND, lambda: self.stub.CreateSequences(
            kv.CreateSequencesRequest(model="no-such-model")), "no-such-model")
        self.fails(INVALID, lambda: self.stub.CreateSequences(kv.CreateSequencesRequest()), "model")

    def test_fields_of_decode(self):
        seq = self.create("plain_bf16")[0]
        self.append(seq, 20)
        cases = [
            ("layer", dict(layer=2), "layer"),
            ("q short", dict(q=b"\0" * 2), "q"),
            ("q missing", dict(q=b""), "q"),
            ("k without v", dict(k=b"\0" * 256), "v"),
            ("k short", dict(k=b"\0" * 6, v=b"\0" * 6), "k"),
            ("positions missing", dict(positions=[]), "positions"),
            ("positions too many", dict(positions=[1, 2]), "positions"),
            ("q_len zero", dict(q_lens=[0]), "q_len"),
            ("q_len that overflows", dict(q_lens=[2**32 - 1]), "q_len"),
            ("no handles", dict(handles=[]), "handles"),
            ("sinks not wanted", dict(sink_logits=[0.0] * 8), "sink"),
        ]
        for name, fields, word in cases:
            with self.subTest(name):
                request = self.request([seq], append=False, positions=[5])
                for field, value in fields.items():
                    request.ClearField(field)
                    if isinstance(value, list):
                        getattr(request, field).extend(value)
                    else:
                        setattr(request, field, value)
                self.fails(INVALID, lambda r=request: self.stub.Decode(r), word)

    def test_sinks_must_come_where_the_model_has_them(self):
        seq = self.create("rich_bf16")[0]
        self.append(seq, 20)
        for sinks in ([], [0.0] * 11, [float("nan")] * 12):
            with self.subTest(sinks=len(sinks)):
                request = self.request([seq], append=False, positions=[5], sink_logits=sinks)
                self.fails(INVALID, lambda r=request: self.stub.Decode(r), "sink_logits")

    def test_appends_that_do_not_follow(self):
        seq = self.create("plain_bf16")[0]
        self.append(seq, 20, layers=[0])
        row = self.rows(1, 2, 64).tobytes()
        other = self.rows(1, 2, 64).tobytes()

        def chunk(**fields):
            return lambda: self.stub.Append(iter([kv.AppendRequest(
                model=seq.model.name, handle=seq.handle, **fields)]))

        self.fails(grpc.StatusCode.OUT_OF_RANGE, chunk(pos=21, n=1, k=row, v=row), "20")
        self.fails(grpc.StatusCode.OUT_OF_RANGE, chunk(pos=19, n=2, k=row * 2, v=row * 2), "20")
        self.fails(INVALID, chunk(pos=20, n=2, k=row, v=row), "k")
        self.fails(INVALID, chunk(pos=20, n=2**32 - 1, k=row, v=row))
        self.fails(INVALID, chunk(layer=2, pos=0, n=1, k=row, v=row), "layer")
        chunk(pos=20, n=1, k=row, v=row)()
        chunk(pos=20, n=1, k=row, v=row)()  # a replay
        self.fails(grpc.StatusCode.ALREADY_EXISTS, chunk(pos=20, n=1, k=other, v=row))

    def test_shared_memory_is_for_this_host_alone(self):
        self.fails(grpc.StatusCode.FAILED_PRECONDITION, lambda: self.stub.OpenSharedMemory(
            kv.OpenSharedMemoryRequest(host_id="another")), "host_id")


class Items(TestCase):
    """Errors of one item leave its neighbours right."""

    def check_beside(self, spoil, code, word=""):
        """Item 1 of 3 is spoiled; items 0 and 2 are answered as ever."""
        seqs = self.create("plain_fp8_kv", 3)
        for seq in seqs:
            self.append(seq, 40)
        request = self.request(seqs)
        spoil(request, seqs)
        response = self.stub.Decode(request)
        self.assertEqual([e.index for e in response.item_errors], [1])
        self.assertEqual(response.item_errors[0].error.code, code.value[0])
        self.assertIn(word, response.item_errors[0].error.message)
        with np.errstate(invalid="ignore"):  # the spoiled item's own rows
            out, _ = self.expected(seqs, request)
        got = self.out_of(request, response, seqs[0].model)
        self.assertLessEqual(reference.relative_l2(got[[0, 2]], out[[0, 2]]), 2e-3)
        self.assertTrue((got[1] == 0).all())
        stat = self.stub.StatSequences(kv.StatSequencesRequest(handles=[s.handle for s in seqs]))
        self.assertEqual(stat.sequences[0].seq_lens[0], 41)
        self.assertEqual(stat.sequences[2].seq_lens[0], 41)
        self.free_all()

    def test_a_stale_handle(self):
        def spoil(request, _):
            request.handles[1].generation += 1
        self.check_beside(spoil, NOT_FOUND)

    def test_a_handle_of_another_run(self):
        def spoil(request, _):
            request.handles[1].incarnation ^= 1
        self.check_beside(spoil, NOT_FOUND)

    def test_a_gap(self):
        def spoil(request, _):
            request.positions[1] += 1
        self.check_beside(spoil, grpc.StatusCode.OUT_OF_RANGE, "40")

    def test_a_sequence_named_again(self):
        def spoil(request, seqs):
            request.handles[1].CopyFrom(seqs[0].handle)
        self.check_beside(spoil, INVALID, "again")

    def test_values_that_are_not_allowed(self):
        for name, value in (("nan", np.nan), ("infinity", np.inf), ("2^28", 2.0**28)):
            for field in ("q", "k", "v"):
                with self.subTest(value=name, field=field):
                    def spoil(request, _, field=field, value=value):
                        rows = bytearray(getattr(request, field))
                        at = len(rows) // 3 + 10
                        rows[at:at + 2] = reference.to_bf16([value]).tobytes()
                        setattr(request, field, bytes(rows))
                    self.check_beside(spoil, INVALID, field)

    def test_attending_beyond_the_end(self):
        seqs = self.create("plain_bf16", 2)
        for seq in seqs:
            self.append(seq, 40)
        response = self.stub.Decode(self.request(seqs, append=False, positions=[39, 40]))
        self.assertEqual([(e.index, e.error.code) for e in response.item_errors], [(1, 11)])


if __name__ == "__main__":
    unittest.main(verbosity=2)
