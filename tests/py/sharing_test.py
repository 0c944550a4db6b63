"""Several clients fork, append, truncate and free at random, on a pool that is often full: whatever
a sequence is said to hold, its attention is that of the tokens that it was given."""

import threading
import unittest

import ml_dtypes
import numpy as np

from package import ROOT  # noqa: F401  # installs fp8kvd

import fp8kvd
import reference
from daemon_process import DaemonProcess
from fp8kvd import errors

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 2, 2, 6, 64
PAGES = 24  # of 64 tokens; the sequences of all clients would like to have more
CONFIG = f"""
policy {{ allow_fp8_kv: true }}
cache {{ poison_freed_pages: true }}
models {{ name: "small" layers: {LAYERS} q_heads: {Q_HEADS} kv_heads: {KV_HEADS}
          head_dim: {HEAD_DIM} expected_seqs: {PAGES} expected_tokens: 64 precision: fp8_kv }}
"""
CLIENTS, OPERATIONS, OWN_MAX, TOKENS_MAX = 4, 400, 4, 300


def rows(random, *shape):
    return random.standard_normal(shape).astype(ml_dtypes.bfloat16)


class Public:
    """A sequence that anyone may fork while its owner appends to it. `kv` [2, layers, n, kv_heads,
    head_dim] has what is being sent before it is sent, and never loses anything."""

    def __init__(self, client, random):
        self.lock = threading.Lock()
        self.kv = rows(random, 2, LAYERS, 100, KV_HEADS, HEAD_DIM)
        self.seq = client.create_sequence("small", expected_tokens=TOKENS_MAX)
        self.seq.append(*self.kv)

    def append(self, random):
        new = rows(random, 2, LAYERS, int(random.integers(1, 9)), KV_HEADS, HEAD_DIM)
        if self.kv.shape[2] + new.shape[2] <= TOKENS_MAX:
            with self.lock:
                self.kv = np.concatenate([self.kv, new], axis=2)
            self.seq.append(*new)


class Own:
    """A sequence of one client. `kv` [layers] of [2, n, kv_heads, head_dim]."""

    def __init__(self, seq, kv):
        self.seq, self.kv = seq, kv

    def resync(self):
        """After an append that may have stopped half-way, some of what was to come is there."""
        for layer, n in enumerate(self.seq.stat().seq_lens):
            self.kv[layer] = self.kv[layer][:, :n]
            self.seq.set_seq_len(layer, n)

    def error(self, random):
        """Of the attention of a random layer at a random place."""
        layer = int(random.integers(LAYERS))
        n = self.kv[layer].shape[1]
        if n == 0:
            return 0.0
        pos = int(random.integers(n))
        q = rows(random, 1, Q_HEADS, HEAD_DIM)
        got = self.seq.decode(q, layer=layer, pos=pos, out_type="fp32").out
        cache = fp8kvd.Fp8KVCache(1, KV_HEADS, HEAD_DIM)
        cache.append(0, *self.kv[layer][:, :pos + 1])
        return reference.relative_l2(got, fp8kvd.fp8_kv_attention(q, cache))


class Worker(threading.Thread):
    """One client and its sequences."""

    def __init__(self, address, public, seed, owns_public):
        super().__init__()
        self.client = fp8kvd.Client(address, options=fp8kvd.Options(address, retries_max=0))
        self.public, self.owns_public = public, owns_public
        self.random = np.random.default_rng(seed)
        self.mine, self.worst, self.full, self.done, self.failure = [], 0.0, 0, {}, None

    def run(self):
        try:
            for _ in range(OPERATIONS):
                self.operate()
            if self.mine:
                self.client.free_sequences([own.seq for own in self.mine])
        except BaseException as error:  # for the test to raise
            self.failure = error
        finally:
            self.client.close()

    def operate(self):
        names = ["create", "fork", "fork_public", "append", "append", "append", "truncate", "free"]
        name = str(self.random.choice(names + ["append_public"] * self.owns_public))
        if not self.mine and name in ("fork", "append", "truncate", "free"):
            name = "create"
        if len(self.mine) >= OWN_MAX and name in ("create", "fork", "fork_public"):
            name = "free"
        self.done[name] = self.done.get(name, 0) + 1
        try:
            getattr(self, f"_{name}")()
        except errors.ResourceExhausted:
            self.full += 1
            if self.mine:
                self._free()
        if self.mine:
            self.worst = max(self.worst, self._any().error(self.random))

    def _any(self):
        return self.mine[int(self.random.integers(len(self.mine)))]

    def _create(self):
        seq = self.client.create_sequence("small")
        self.mine.append(Own(seq, [np.zeros((2, 0, KV_HEADS, HEAD_DIM), ml_dtypes.bfloat16)
                                   for _ in range(LAYERS)]))

    def _fork(self):
        parent = self._any()
        self.mine.append(Own(parent.seq.fork(), list(parent.kv)))

    def _fork_public(self):
        handle = self.client.fork_sequences(self.public.seq.handle, 1)[0].handle
        seq = self.client.adopt_sequence(handle)  # with the lengths that it has
        with self.public.lock:
            kv = self.public.kv
        self.mine.append(Own(seq, [kv[:, layer, :seq.seq_len(layer)] for layer in range(LAYERS)]))

    def _append(self):
        own, n = self._any(), int(self.random.integers(1, 70))
        if max(kv.shape[1] for kv in own.kv) + n > TOKENS_MAX:
            return
        new = rows(self.random, LAYERS, 2, n, KV_HEADS, HEAD_DIM)
        own.kv = [np.concatenate(pair, axis=1) for pair in zip(own.kv, new)]
        try:
            for layer in self.random.permutation(LAYERS):
                own.seq.append(*new[layer], layer=int(layer))
        except errors.ResourceExhausted:
            own.resync()
            raise

    def _truncate(self):
        own = self._any()
        keep = int(self.random.integers(1 + max(kv.shape[1] for kv in own.kv)))
        own.seq.truncate(keep)
        own.kv = [kv[:, :keep] for kv in own.kv]

    def _free(self):
        self.mine.pop(int(self.random.integers(len(self.mine)))).seq.free()

    def _append_public(self):
        self.public.append(self.random)


class Sharing(unittest.TestCase):
    def test_random_operations_of_several_clients(self):
        daemon = DaemonProcess(CONFIG)
        self.addCleanup(daemon.stop)
        with fp8kvd.Client(daemon.address) as client:
            public = Public(client, np.random.default_rng(0))
            workers = [Worker(daemon.address, public, seed, seed == 1)
                       for seed in range(1, CLIENTS + 1)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(100)
                if worker.failure:
                    raise worker.failure
                self.assertFalse(worker.is_alive())
                self.assertLessEqual(worker.worst, 2e-3)
            done = {name for worker in workers for name in worker.done}
            self.assertEqual(len(done), 7, done)
            self.assertGreater(sum(worker.full for worker in workers), 0, "never full")
            own = Own(public.seq, list(public.kv.swapaxes(0, 1)))
            self.assertLessEqual(own.error(np.random.default_rng(9)), 2e-3)
            public.seq.free()
            (group,) = client.server_info().model().groups
            self.assertEqual((group.pages_used, group.pages_free), (0, group.pages_total))
            self.assertEqual(group.pages_total, PAGES)

    def test_a_wrong_token_would_show(self):
        """A test of the test: one token of 100 that is another's."""
        daemon = DaemonProcess(CONFIG)
        self.addCleanup(daemon.stop)
        with fp8kvd.Client(daemon.address) as client:
            random = np.random.default_rng(0)
            public = Public(client, random)
            kv = public.kv.copy()
            kv[:, :, 50] = rows(random, 2, LAYERS, KV_HEADS, HEAD_DIM)
            own = Own(public.seq, [kv[:, layer, :] for layer in range(LAYERS)])
            self.assertGreater(max(own.error(random) for _ in range(20)), 1e-2)
            public.seq.free()


if __name__ == "__main__":
    unittest.main()
