"""What becomes of sequences: append, fork, truncate, free, expiry, windows."""

import unittest

import grpc
import numpy as np

from harness import TestCase, kv


class Sequences(TestCase):
    def stat(self, seq):
        return self.stub.StatSequences(kv.StatSequencesRequest(handles=[seq.handle])).sequences[0]

    def test_append_answers_with_the_committed_lengths(self):
        seq = self.create("plain_bf16")[0]
        reply = self.append(seq, 250)
        self.assertEqual([(c.layer, c.seq_len) for c in reply.committed], [(0, 250), (1, 250)])
        self.assertEqual(list(self.stat(seq).seq_lens), [250, 250])

    def test_fp8_pages_take_about_half_of_bf16_pages(self):
        held = {}
        for precision in ("bf16", "fp8_kv"):
            seq = self.create(f"plain_{precision}")[0]
            self.append(seq, 640)
            held[precision] = self.stat(seq).bytes
        # 2 * 64 codes and two scales against 4 * 64 bytes; a device may pad, but not by much.
        self.assertLess(held["fp8_kv"] / held["bf16"], 0.56)

    def test_a_fork_shares_the_past_and_parts_from_it(self):
        parent = self.create("plain_fp8_kv")[0]
        self.append(parent, 100)
        reply = self.stub.ForkSequences(kv.ForkSequencesRequest(parent=parent.handle, count=2))
        seqs = [parent] + [parent.copy(handle) for handle in reply.handles]
        self.assertGreater(self.stat(parent).pages_shared, 0)
        for _ in range(40):  # each writes its own copy of the half-filled page
            for layer in (0, 1):
                request = self.request(seqs, layer)
                self.check(seqs, request, self.stub.Decode(request))

    def test_a_fork_outlives_its_parent(self):
        parent = self.create("plain_bf16")[0]
        self.append(parent, 130)
        handle = self.stub.ForkSequences(kv.ForkSequencesRequest(parent=parent.handle)).handles[0]
        child = parent.copy(handle)
        self.stub.FreeSequences(kv.FreeSequencesRequest(handles=[parent.handle]))
        other = self.create("plain_bf16")[0]  # takes what pages it can
        self.append(other, 400)
        request = self.request([child])
        self.check([child], request, self.stub.Decode(request))

    def test_truncate_drops_the_end_and_other_tokens_may_follow(self):
        seq = self.create("plain_fp8_kv")[0]
        self.append(seq, 200)
        self.stub.TruncateSequences(
            kv.TruncateSequencesRequest(handles=[seq.handle], seq_lens=[77]))
        seq.truncate(77)
        self.assertEqual(list(self.stat(seq).seq_lens), [77, 77])
        self.append(seq, 60)
        request = self.request([seq])
        self.check([seq], request, self.stub.Decode(request))

    def test_a_window_gives_its_old_pages_back(self):
        seq = self.create("rich_bf16")[0]
        self.append(seq, 900)
        # A window of 100 and a slack of 128 need at most 6 pages of 64, however long the text.
        self.assertLessEqual(self.stat(seq).pages, 6)
        request = self.request([seq], sink_logits=[0.0] * 12)
        self.check([seq], request, self.stub.Decode(request))

    def test_skip_to_spares_what_no_query_will_see(self):
        seq = self.create("rich_fp8_kv")[0]
        shape = (seq.model.kv_heads, seq.model.head_dim)
        for layer in (0, 1):
            k, v = self.rows(150, *shape), self.rows(150, *shape)
            self.stub.Append(iter([kv.AppendRequest(
                model=seq.model.name, handle=seq.handle, layer=layer, pos=5000, skip_to=5000, n=150,
                k=k.tobytes(), v=v.tobytes())]))
            unseen = np.zeros((5000, *shape), np.uint16)
            seq.keep(layer, unseen, unseen)
            seq.keep(layer, k, v)
        self.assertEqual(list(self.stat(seq).seq_lens), [5150, 5150])
        self.assertLessEqual(self.stat(seq).pages, 4)
        request = self.request([seq], sink_logits=[0.0] * 12)
        self.check([seq], request, self.stub.Decode(request))

    def test_a_freed_handle_is_not_found(self):
        seq = self.create("plain_bf16")[0]
        self.append(seq, 10)
        freed = self.stub.FreeSequences(kv.FreeSequencesRequest(handles=[seq.handle]))
        self.assertEqual(list(freed.item_errors), [])
        other = self.create("plain_bf16")[0]  # may get the same slot
        response = self.stub.Decode(self.request([seq], append=False, positions=[3]))
        self.assertEqual([e.error.code for e in response.item_errors], [5])
        self.assertEqual(list(self.stat(other).seq_lens), [0, 0])

    def test_an_untouched_sequence_ends_with_its_lease(self):
        handles = self.stub.CreateSequences(
            kv.CreateSequencesRequest(model="plain_bf16", count=1, ttl_ms=200)).handles
        # Any other call runs on; each answer is a moment later, until the lease has ended.
        for _ in range(100_000):
            listed = self.stub.ListSequences(kv.ListSequencesRequest()).sequences
            if not listed:
                break
        self.assertEqual(list(listed), [])
        renewed = self.stub.RenewSequences(kv.RenewSequencesRequest(handles=handles))
        self.assertEqual([e.error.code for e in renewed.item_errors], [5])

    def test_expected_tokens_beyond_the_pool_are_refused(self):
        self.fails(grpc.StatusCode.RESOURCE_EXHAUSTED,
                   lambda: self.create("plain_bf16", 64, expected_tokens=100_000))


class Resume(TestCase):
    def test_an_append_stream_that_breaks_goes_on_from_the_committed_length(self):
        seq = self.create("plain_bf16")[0]
        self.append(seq, 100, layers=[0])
        n = 50
        k, v = (self.rows(n, seq.model.kv_heads, seq.model.head_dim) for _ in "kv")

        def chunks():
            yield kv.AppendRequest(model=seq.model.name, handle=seq.handle, layer=0, pos=100, n=n,
                                   k=k.tobytes(), v=v.tobytes())
            raise ConnectionError("broken on purpose")

        with self.assertRaises(grpc.RpcError):
            self.stub.Append(chunks())
        # Whether the chunk arrived or not, the same chunk again leaves exactly one of it.
        committed = self.stub.StatSequences(
            kv.StatSequencesRequest(handles=[seq.handle])).sequences[0].seq_lens[0]
        self.assertIn(committed, (100, 150))
        self.stub.Append(iter([kv.AppendRequest(
            model=seq.model.name, handle=seq.handle, layer=0, pos=100, n=n, k=k.tobytes(),
            v=v.tobytes())]))
        seq.keep(0, k, v)
        request = self.request([seq])
        self.check([seq], request, self.stub.Decode(request))


if __name__ == "__main__":
    unittest.main(verbosity=2)
