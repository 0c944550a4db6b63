"""A test case of the client: a daemon in this process, and every test sync and asyncio."""

import unittest

import ml_dtypes
import numpy as np

from package import ROOT  # noqa: F401  # installs fp8kvd

import fp8kvd
from fake_daemon import FakeDaemon
from flavours import aio_client

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


def both_flavours(module, *cases):
    """Each case as two test classes of the module, given as its globals()."""
    for case in cases:
        for flavour in (Sync, Asyncio):
            name = f"{flavour.__name__}{case.__name__}"
            module[name] = type(name, (flavour, case, unittest.TestCase), {})
