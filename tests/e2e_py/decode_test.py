"""Decode over a real socket, against numpy: both precisions, every kind of request."""

import functools
import unittest

import numpy as np

import reference
from harness import TestCase, kv

PRECISIONS = ("bf16", "fp8_kv")


def each_precision(kind):
    """Runs a test with the model of that kind in bf16, then in fp8_kv."""
    def decorate(test):
        @functools.wraps(test)
        def run(self):
            for precision in PRECISIONS:
                with self.subTest(precision=precision):
                    test(self, f"{kind}_{precision}")
        return run
    return decorate


class Decode(TestCase):
    @each_precision("plain")
    def test_a_batch_of_different_lengths(self, name):
        seqs = self.create(name, 6)
        for seq, n in zip(seqs, (0, 1, 63, 64, 65, 500)):
            self.append(seq, n)
        for layer in (0, 1):
            request = self.request(seqs, layer)
            self.check(seqs, request, self.stub.Decode(request))

    @each_precision("plain")
    def test_a_first_token_sees_itself_alone(self, name):
        seqs = self.create(name)
        request = self.request(seqs, want_lse=True)
        response = self.stub.Decode(request)
        self.check(seqs, request, response)
        value = reference.from_bf16(np.frombuffer(request.v, np.uint16)).reshape(1, 2, 64)
        value = reference.quantise(value) if "fp8" in name else value
        got = self.out_of(request, response, seqs[0].model)
        np.testing.assert_allclose(got, np.repeat(value, 4, axis=1), rtol=5e-3, atol=1e-6)

    @each_precision("plain")
    def test_token_by_token(self, name):
        seqs = self.create(name, 3)
        for _ in range(70):  # over the edge of a page
            request = self.request(seqs)
            self.check(seqs, request, self.stub.Decode(request))

    @each_precision("plain")
    def test_several_query_tokens_are_causal(self, name):
        seqs = self.create(name, 3)
        for seq in seqs:
            self.append(seq, 61)
        request = self.request(seqs, q_lens=[1, 5, 16], want_lse=True)
        self.check(seqs, request, self.stub.Decode(request))

    @each_precision("plain")
    def test_attend_only_at_every_kind_of_position(self, name):
        seqs = self.create(name, 4)
        for seq in seqs:
            self.append(seq, 200)
        request = self.request(seqs, positions=[0, 63, 64, 199], append=False, want_lse=True)
        self.check(seqs, request, self.stub.Decode(request))

    @each_precision("plain")
    def test_bf16_output(self, name):
        seqs = self.create(name, 8)
        for seq in seqs:
            self.append(seq, 100)
        request = self.request(seqs)
        request.out_type = kv.OUT_TYPE_UNSPECIFIED
        self.check(seqs, request, self.stub.Decode(request))

    @each_precision("rich")
    def test_window_softcap_and_sinks(self, name):
        seqs = self.create(name, 3)
        for seq, n in zip(seqs, (3, 99, 300)):
            self.append(seq, n)
        sinks = np.linspace(-2, 3, 12)
        request = self.request(seqs, q_lens=[2, 3, 4], sink_logits=sinks, want_lse=True)
        self.check(seqs, request, self.stub.Decode(request))

    @each_precision("rich")
    def test_omitted_sinks_leave_out_and_lse(self, name):
        seqs = self.create(name)
        self.append(seqs[0], 50)
        request = self.request(seqs, sink_logits=[5.0] * 12, omit_sinks=True, want_lse=True)
        self.check(seqs, request, self.stub.Decode(request))

    @each_precision("plain")
    def test_a_retry_is_answered_the_same_and_appends_once(self, name):
        seqs = self.create(name, 2)
        for seq in seqs:
            self.append(seq, 30)
        request = self.request(seqs)
        first = self.stub.Decode(request)
        again = self.stub.Decode(request)
        self.check(seqs, request, again)
        self.assertEqual(first.out, again.out)
        stat = self.stub.StatSequences(kv.StatSequencesRequest(handles=[seqs[0].handle]))
        self.assertEqual(list(stat.sequences[0].seq_lens), [31, 30])

    def test_fp8_holds_what_the_format_holds_and_no_more(self):
        """A test of the test: the bf16 reference must not pass for an fp8_kv cache."""
        seqs = self.create("plain_fp8_kv", 8)
        for seq in seqs:
            self.append(seq, 300)
        request = self.request(seqs)
        response = self.stub.Decode(request)
        self.check(seqs, request, response)
        unquantised, _ = self.expected(seqs, request, cache=lambda rows: rows)
        got = self.out_of(request, response, seqs[0].model)
        self.assertGreater(reference.relative_l2(got, unquantised), 1e-2)

    def test_a_v_scale_5_percent_off_would_show(self):
        seqs = self.create("plain_fp8_kv", 8)
        for seq in seqs:
            self.append(seq, 100)
        request = self.request(seqs)
        out, _ = self.expected(seqs, request)
        got = self.out_of(request, self.stub.Decode(request), seqs[0].model)
        self.assertGreater(reference.relative_l2(got * 1.05, out), 0.04)


class DecodeStream(TestCase):
    def test_many_in_flight_are_matched_by_id(self):
        seqs = self.create("plain_fp8_kv", 4)
        for seq in seqs:
            self.append(seq, 100)
        sent = {}
        for request_id in range(64):
            request = self.request(seqs, layer=request_id % 2, append=False,
                                   positions=[int(p) for p in self.random.integers(0, 100, 4)])
            request.request_id = request_id
            sent[request_id] = request
        got = list(self.stub.DecodeStream(iter(sent.values())))
        self.assertEqual(sorted(r.request_id for r in got), sorted(sent))
        for response in got:
            self.check(seqs, sent[response.request_id], response)

    def test_steps_of_one_sequence_run_in_the_order_sent(self):
        seqs = self.create("plain_bf16", 2)
        requests = []
        for step in range(40):
            request = self.request(seqs)
            request.request_id = step
            requests.append(request)
        got = list(self.stub.DecodeStream(iter(requests)))
        self.assertEqual(len(got), 40)
        for response in got:
            self.assertFalse(response.HasField("error"))
            self.check(seqs, requests[response.request_id], response)

    def test_a_message_that_fails_leaves_the_stream_open(self):
        seqs = self.create("plain_bf16")
        self.append(seqs[0], 10)
        bad = self.request(seqs, append=False, positions=[3])
        bad.request_id, bad.layer = 1, 99
        good = self.request(seqs, append=False, positions=[3])
        good.request_id = 2
        got = {r.request_id: r for r in self.stub.DecodeStream(iter([bad, good]))}
        self.assertEqual(got[1].error.code, 3)  # INVALID_ARGUMENT
        self.assertIn("layer", got[1].error.message)
        self.check(seqs, good, got[2])


class SharedDecode(Decode):
    uses_shared_memory = True


class SharedDecodeStream(DecodeStream):
    uses_shared_memory = True


if __name__ == "__main__":
    unittest.main(verbosity=2)
