"""The messages that are joined and cut by hand, against protobuf's own reading of them."""

import unittest

import numpy as np

from package import ROOT  # noqa: F401  # installs fp8kvd

from fp8kvd import _wire
from fp8kvd.v1 import kv_pb2 as kv

SIZES = (0, 1, 62, 63, 64, 8191, 8192, 1 << 20)  # around the steps of a varint


def tensor(size):
    return np.arange(size, dtype=np.uint16)


class Requests(unittest.TestCase):
    def test_decode_requests_are_what_protobuf_reads(self):
        head = kv.DecodeRequest(model="m", layer=3, want_lse=True, sink_logits=[1, 2],
                                handles=[kv.Handle(seq_id=1, incarnation=2)])
        for size in SIZES:
            for k, request_id in ((None, 0), (tensor(size), 7), (tensor(size), 1 << 40)):
                want = kv.DecodeRequest(request_id=request_id, positions=[5, size, 1 << 33])
                want.MergeFrom(head)
                want.q = tensor(size).tobytes()
                want.k = want.v = b"" if k is None else k.tobytes()
                raw = _wire.decode_request(head.SerializeToString(), request_id,
                                           [5, size, 1 << 33], tensor(size), k, k)
                self.assertEqual(kv.DecodeRequest.FromString(raw), want)

    def test_append_requests_are_what_protobuf_reads(self):
        small = kv.AppendRequest(model="m", layer=1, layers_count=2, pos=9, n=4)
        for size in SIZES:
            parts = [tensor(size), tensor(size)[::-1].copy()]
            want = kv.AppendRequest()
            want.CopyFrom(small)
            want.k, want.v = (b"".join(part.tobytes() for part in order)
                              for order in (parts, parts[::-1]))
            raw = _wire.append_request(small, parts, parts[::-1])
            self.assertEqual(kv.AppendRequest.FromString(raw), want)


class Replies(unittest.TestCase):
    def message(self, size):
        message = kv.DecodeResponse(request_id=1 << 40, out=tensor(size).tobytes(), lse=b"abcd")
        message.item_errors.add(index=3).error.code = 5
        message.error.message = "no"
        message.timings.kernel_us = 1000
        return message

    def test_replies_are_what_protobuf_wrote(self):
        for size in SIZES:
            message = self.message(size)
            reply = _wire.decode_response(message.SerializeToString())
            self.assertEqual((bytes(reply.out), reply.small.out), (message.out, b""))
            reply.small.out = message.out
            self.assertEqual(reply.small, message)

    def test_a_reply_without_a_result_has_its_error(self):
        message = kv.DecodeResponse(request_id=5, error=kv.Error(code=3, message="no"))
        reply = _wire.decode_response(message.SerializeToString())
        self.assertEqual((len(reply.out), reply.small), (0, message))

    def test_fields_of_a_later_version_are_passed_over(self):
        raw = self.message(4).SerializeToString()
        for unknown in (b"\xa0\x06\x01", b"\xa1\x06" + bytes(8), b"\xa2\x06\x02xy",
                        b"\xa5\x06" + bytes(4)):  # field 100: varint, 64 bits, bytes, 32 bits
            for more in (unknown + raw, raw + unknown):
                self.assertEqual(bytes(_wire.decode_response(more).out), tensor(4).tobytes())

    def test_a_reply_cut_short_is_refused_or_read_as_what_is_left(self):
        """As protobuf does: a message that ends between two fields is a message."""
        raw = self.message(40).SerializeToString()
        for end in range(len(raw)):
            try:
                want = kv.DecodeResponse.FromString(raw[:end]).out
            except Exception:  # noqa: BLE001  # DecodeError of whichever protobuf runs
                with self.assertRaises(Exception):
                    _wire.decode_response(raw[:end])
            else:
                self.assertEqual(bytes(_wire.decode_response(raw[:end]).out), want)

    def test_what_lies_aligned_is_not_copied(self):
        """bytes begin at a multiple of 16, so a result behind 4 others does, and behind 3 not."""
        for before, copied in (({}, True), ({"request_id": 1}, False)):
            raw = kv.DecodeResponse(out=bytes(60), **before).SerializeToString()
            self.assertEqual(raw.index(bytes(60)) % 4 != 0, copied)
            array = _wire.decode_response(raw).array(np.float32, (3, 5))
            self.assertTrue(array.flags.aligned)
            self.assertEqual(array.flags.writeable, copied)
            np.testing.assert_array_equal(array, 0)

    def test_a_result_of_another_size_is_refused(self):
        for size in (12, 20):
            reply = _wire.decode_response(kv.DecodeResponse(out=bytes(size)).SerializeToString())
            with self.assertRaises((ValueError, TypeError)):
                reply.array(np.float32, (2, 2))

    def test_lse_of_another_size_is_refused(self):
        raw = kv.DecodeResponse(out=bytes(8), lse=bytes(8)).SerializeToString()
        reply = _wire.decode_response(raw)
        self.assertEqual(_wire.lse_of(reply, (1, 2)).tolist(), [[0, 0]])
        with self.assertRaisesRegex(ValueError, "8 bytes of lse"):
            _wire.lse_of(reply, (1, 3))


if __name__ == "__main__":
    unittest.main()
