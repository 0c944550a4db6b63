"""The built daemon with its stub, which comes from proto/, and what tests of it share."""

import atexit
import shutil
import sys
import tempfile
import unittest

import grpc
import numpy as np
from grpc_tools import protoc

import reference
from daemon_process import ROOT, DaemonProcess
from shared_stub import SharedStub


def generate_stubs():
    """kv_pb2 and kv_pb2_grpc, made from proto/ in a directory that goes away with the process."""
    directory = tempfile.mkdtemp(prefix="fp8kvd_stubs_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    proto = ROOT / "proto"
    arguments = ["protoc", f"-I{proto}", f"--python_out={directory}",
                 f"--grpc_python_out={directory}",
                 *map(str, (proto / "fp8kvd/v1").glob("*.proto"))]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc refused proto/fp8kvd/v1")
    sys.path.insert(0, directory)


generate_stubs()
from fp8kvd.v1 import kv_pb2 as kv  # noqa: E402
from fp8kvd.v1 import kv_pb2_grpc as kv_grpc  # noqa: E402

# Two models of each precision: a plain one, and one with all that a model can have.
MODEL = """
models {{
  name: "plain_{precision}" layers: 2 q_heads: 8 kv_heads: 2 head_dim: 64
  expected_seqs: 16 expected_tokens: 1024 precision: {precision}
}}
models {{
  name: "rich_{precision}" layers: 2 q_heads: 12 kv_heads: 4 head_dim: 128 sm_scale: 0.05
  window: 100 softcap: 20 has_sinks: true
  expected_seqs: 8 expected_tokens: 1024 precision: {precision}
}}
"""
CONFIG = ("policy { allow_fp8_kv: true }\ncache { poison_freed_pages: true }\n"
          + MODEL.format(precision="bf16") + MODEL.format(precision="fp8_kv"))


class Daemon(DaemonProcess):
    """The process with a stub for it."""

    def __init__(self, config=CONFIG, flags=(), http_address=""):
        super().__init__(config, flags, http_address=http_address)
        self.channel = grpc.insecure_channel(
            self.address, options=[("grpc.max_receive_message_length", -1),
                                   ("grpc.max_send_message_length", -1)])
        self.stub = kv_grpc.DecodeAttentionStub(self.channel)

    def stop(self):
        self.channel.close()
        super().stop()


class Sequence:
    """A sequence of the daemon and, beside it, the rows that it should hold (as fp32 of bf16)."""

    def __init__(self, stub, model, handle):
        self.stub, self.model, self.handle = stub, model, handle
        shape = (0, model.kv_heads, model.head_dim)
        self.k = {layer: np.zeros(shape, np.float32) for layer in range(model.layers)}
        self.v = dict(self.k)

    def copy(self, handle):
        """The same rows under another handle: what a fork holds."""
        twin = Sequence(self.stub, self.model, handle)
        twin.k, twin.v = dict(self.k), dict(self.v)
        return twin

    def keep(self, layer, k, v):
        self.k[layer] = np.concatenate([self.k[layer], reference.from_bf16(k)])
        self.v[layer] = np.concatenate([self.v[layer], reference.from_bf16(v)])

    def truncate(self, tokens):
        for rows in (self.k, self.v):
            for layer in rows:
                rows[layer] = rows[layer][:tokens]


class TestCase(unittest.TestCase):
    """A daemon for all tests of a class, and what they share."""

    config = CONFIG
    uses_shared_memory = False

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(cls.config)
        cls.stub = cls.daemon.stub
        if cls.uses_shared_memory:
            cls.stub = SharedStub(cls.daemon.stub, kv)
            cls.addClassCleanup(cls.stub.close)
        info = cls.stub.GetServerInfo(kv.GetServerInfoRequest())
        cls.models = {model.name: model for model in info.models}

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()

    def setUp(self):
        self.random = np.random.default_rng(sum(self.id().encode()))

    def tearDown(self):
        """Frees what the test made; then every page must be back."""
        self.free_all()
        for model in self.stub.GetServerInfo(kv.GetServerInfoRequest()).models:
            for group in model.groups:
                self.assertEqual(group.pages_used, 0, f"{model.name} leaks pages")
                self.assertEqual(group.pages_free, group.pages_total)

    def free_all(self):
        """Frees every live sequence, page by page of the list."""
        while True:
            listed = self.stub.ListSequences(kv.ListSequencesRequest()).sequences
            if not listed:
                return
            self.stub.FreeSequences(kv.FreeSequencesRequest(handles=[s.handle for s in listed]))

    def create(self, name, count=1, expected_tokens=0):
        reply = self.stub.CreateSequences(kv.CreateSequencesRequest(
            model=name, count=count, expected_tokens=expected_tokens))
        self.assertEqual(len(reply.handles), count)
        return [Sequence(self.stub, self.models[name], handle) for handle in reply.handles]

    def rows(self, *shape):
        """Random bf16 rows whose size differs from row to row."""
        sizes = 2.0 ** self.random.integers(-2, 3, (*shape[:-1], 1))
        return reference.to_bf16(self.random.standard_normal(shape) * sizes)

    def append(self, seq, n, layers=None, chunk=100):
        """n tokens to each layer (all of them unless named), in chunks of one stream."""
        layers = range(seq.model.layers) if layers is None else layers
        chunks = []
        for begin in range(0, n, chunk):
            for layer in layers:
                m = min(chunk, n - begin)
                k = self.rows(m, seq.model.kv_heads, seq.model.head_dim)
                v = self.rows(m, seq.model.kv_heads, seq.model.head_dim)
                chunks.append(kv.AppendRequest(
                    model=seq.model.name, handle=seq.handle, layer=layer, pos=len(seq.k[layer]),
                    n=m, k=k.tobytes(), v=v.tobytes()))
                seq.keep(layer, k, v)
        return self.stub.Append(iter(chunks))

    def request(self, seqs, layer=0, q_lens=None, positions=None, append=True, **fields):
        """A DecodeRequest for the next tokens of the sequences (attend only: at `positions`)."""
        model = seqs[0].model
        q_lens = q_lens or [1] * len(seqs)
        n = sum(q_lens)
        if positions is None:
            positions = [len(seq.k[layer]) for seq in seqs]
        q = self.rows(n, model.q_heads, model.head_dim)
        request = kv.DecodeRequest(
            model=model.name, layer=layer, handles=[seq.handle for seq in seqs],
            positions=positions, q_lens=[] if q_lens == [1] * len(seqs) else q_lens, q=q.tobytes(),
            out_type=kv.OUT_TYPE_FP32, **fields)
        if append:
            k, v = (self.rows(n, model.kv_heads, model.head_dim) for _ in "kv")
            request.k, request.v = k.tobytes(), v.tobytes()
            ends = np.cumsum(q_lens)
            for seq, begin, end in zip(seqs, ends - q_lens, ends):
                seq.keep(layer, k[begin:end], v[begin:end])
        return request

    def expected(self, seqs, request, cache=None):
        """Out and lse that the request should give, from the rows that the sequences hold now."""
        model, layer = seqs[0].model, request.layer
        group = next(g for g in model.groups if layer in g.layers)
        if cache is None:
            fp8 = group.precision == kv.PRECISION_FP8_KV
            cache = reference.quantise if fp8 else (lambda rows: rows)
        q = reference.from_bf16(np.frombuffer(request.q, np.uint16)).reshape(
            -1, model.q_heads, model.head_dim)
        sinks = None if request.omit_sinks or not request.sink_logits else list(request.sink_logits)
        outs, lses, row = [], [], 0
        for seq, pos, q_len in zip(seqs, request.positions, request.q_lens or [1] * len(seqs)):
            out, lse = reference.attend(
                q[row:row + q_len], cache(seq.k[layer]), cache(seq.v[layer]),
                range(pos, pos + q_len), sm_scale=model.sm_scale, window=group.window,
                softcap=group.softcap, sinks=sinks)
            outs.append(out)
            lses.append(lse)
            row += q_len
        return np.concatenate(outs), np.concatenate(lses)

    def out_of(self, request, response, model):
        """The reply's out as numbers [n, q_heads, head_dim]."""
        n = len(request.q) // (2 * model.q_heads * model.head_dim)
        if request.out_type == kv.OUT_TYPE_FP32:
            out = np.frombuffer(response.out, np.float32)
        else:
            out = reference.from_bf16(np.frombuffer(response.out, np.uint16))
        return out.reshape(n, model.q_heads, model.head_dim)

    def check(self, seqs, request, response):
        """The reply against the reference, within the kernel's contract."""
        self.assertEqual(list(response.item_errors), [])
        out, lse = self.expected(seqs, request)
        bound = 2e-3 if request.out_type == kv.OUT_TYPE_FP32 else 3e-3
        got = self.out_of(request, response, seqs[0].model)
        self.assertLessEqual(reference.relative_l2(got, out), bound)
        if request.want_lse:
            got_lse = np.frombuffer(response.lse, np.float32).reshape(lse.shape)
            np.testing.assert_allclose(got_lse, lse, rtol=1e-4, atol=1e-4)

    def fails(self, code, call, *words):
        """The call fails with this code, and its message has these words."""
        with self.assertRaises(grpc.RpcError) as raised:
            call()
        self.assertEqual(raised.exception.code(), code, raised.exception.details())
        for word in words:
            self.assertIn(word, raised.exception.details())
