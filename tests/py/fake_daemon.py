"""A daemon in this process that keeps rows and computes nothing: out is q. Faults are asked for."""

import collections
import dataclasses
import threading
from concurrent import futures

import grpc
from google.protobuf import any_pb2, duration_pb2

from fp8kvd.v1 import kv_pb2 as kv

TOKEN_BYTES = 2 * 2 * 4  # of k or v: kv_heads 2, head_dim 4


@dataclasses.dataclass
class Fault:
    """What happens to the next call of a method."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    details: str = "asked for by the test"
    pushback_ms: int | None = None  # in the trailer
    retry_info_ms: int | None = None  # in the status's details, the other place for it
    late: bool = False  # after the work is done: the answer is lost, not the request
    messages: int = 0  # of a stream, that are served before


class FakeDaemon:
    """Serves on a loopback port. `calls` has (method, request); `metadata` the latest call's."""

    def __init__(self, credentials=None):
        """credentials: of grpc, for TLS."""
        self._credentials = credentials
        self.calls, self.metadata, self.faults = [], {}, collections.defaultdict(list)
        self.item_faults = []  # kv.Error: for the first item of the next decodes
        self.reverse = 0  # replies that a stream holds back, to send them in reverse
        self.hold = threading.Event()  # cleared: decodes and renewals wait for it
        self.hold.set()
        self.waits, self.ended = threading.Event(), threading.Event()  # a held decode
        self.out = None  # bytes: the result of every decode
        self.ttl_ms = 60_000
        self._lock = threading.Lock()
        self._port = 0
        self.start(incarnation=1)

    def start(self, incarnation):
        self.incarnation, self.rows, self._next_id = incarnation, {}, 1
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((_Handler(self),))
        address = f"127.0.0.1:{self._port}"
        if self._credentials is None:
            self._port = self._server.add_insecure_port(address)
        else:
            self._port = self._server.add_secure_port(address, self._credentials)
        self._server.start()
        self.target = f"127.0.0.1:{self._port}"

    def stop(self):
        self.hold.set()
        self._server.stop(None).wait(10)

    def restart(self):
        """The same port, nothing of what was there."""
        self.stop()
        self.start(self.incarnation + 1)

    def called(self, method):
        return [request for name, request in self.calls if name == method]

    # What follows runs on the server's threads.

    def unary(self, method, request, context):
        fault = self._begin(method, request, context)
        if fault and not fault.late:
            _abort(context, fault)
        reply = getattr(self, f"_{method}")(request, context)
        if fault:
            _abort(context, fault)
        return reply

    def _begin(self, method, request, context):
        with self._lock:
            self.calls.append((method, request))
            self.metadata = dict(context.invocation_metadata())
            faults = self.faults[method]
            return faults.pop(0) if faults else None

    def append(self, chunks, context):
        fault = self._begin("Append", None, context)
        for served, chunk in enumerate(chunks):
            if fault and served == fault.messages:
                _abort(context, fault)
            with self._lock:
                self.calls.append(("Chunk", chunk))
                error = self._append(chunk.handle, chunk.layer, chunk.layers_count or 1, chunk.pos,
                                     chunk.k, chunk.v, chunk.skip_to)
            if error:
                _abort(context, Fault(_code(error.code), error.message))
        if fault:
            _abort(context, fault)
        return kv.AppendResponse()

    def stream(self, requests, context):
        fault, held = self._begin("DecodeStream", None, context), []
        for served, request in enumerate(requests):
            if fault and served == fault.messages:
                _abort(context, fault)
            held.append(self._Decode(request, context))
            if len(held) > self.reverse:
                yield from reversed(held)
                held = []
        yield from held

    def _append(self, handle, layer, layers, pos, k, v, skip_to=0):
        """The exactly-once rule over the rows themselves; an Error or None."""
        rows = self.rows.get(handle.seq_id)
        if rows is None or handle.incarnation != self.incarnation:
            return kv.Error(code=5, message="unknown handle")
        size = len(k) // layers
        for index in range(layers):
            mine = rows.setdefault(layer + index, bytearray())
            if skip_to and not mine:
                mine += bytes(2 * TOKEN_BYTES * skip_to)
            begin = 2 * TOKEN_BYTES * pos
            new = b"".join(x[index * size:][at:at + TOKEN_BYTES]
                           for at in range(0, size, TOKEN_BYTES) for x in (k, v))
            if begin > len(mine):
                return kv.Error(code=11, message=f"seq_len is {len(mine) // TOKEN_BYTES // 2}")
            if mine[begin:begin + len(new)] not in (b"", new):
                return kv.Error(code=6, message="other bytes are there")
            mine[begin:] = new
        return None

    def _Decode(self, request, context):
        if not self.hold.is_set():
            context.add_callback(self.ended.set)
            self.waits.set()
            self.hold.wait(10)
        reply = kv.DecodeResponse(request_id=request.request_id, out=request.q)
        reply.timings.queue_us, reply.timings.batch_items = 7, len(request.handles)
        if request.out_type == kv.OUT_TYPE_FP32:  # bf16 to fp32: two zero bytes before each
            reply.out = b"".join(b"\0\0" + request.q[at:at + 2]
                                 for at in range(0, len(request.q), 2))
        if request.want_lse:
            reply.lse = bytes(len(request.q) // 2)
        if self.out is not None:
            reply.out = self.out
        q_lens, row = request.q_lens or [1] * len(request.handles), 0
        with self._lock:
            for index, handle in enumerate(request.handles):
                part = slice(row * TOKEN_BYTES, (row + q_lens[index]) * TOKEN_BYTES)
                row += q_lens[index]
                error = self.item_faults.pop(0) if self.item_faults else self._append(
                    handle, request.layer, 1, request.positions[index], request.k[part],
                    request.v[part])
                if error is not None:
                    reply.item_errors.add(index=index, error=error)
        return reply

    def _GetServerInfo(self, request, context):
        return kv.GetServerInfoResponse(version="1.2.3", incarnation=self.incarnation,
                                        shm_socket="/run/fake.sock", host_id="a-boot-id", models=[
            kv.ModelInfo(name="small", layers=3, q_heads=2, kv_heads=2, head_dim=4)])

    def _CreateSequences(self, request, context):
        reply = kv.CreateSequencesResponse(ttl_ms=request.ttl_ms or self.ttl_ms)
        for _ in range(request.count):
            reply.handles.append(self._new({}))
        return reply

    def _new(self, rows):
        with self._lock:
            seq_id, self._next_id = self._next_id, self._next_id + 1
            self.rows[seq_id] = rows
        return kv.Handle(seq_id=seq_id, generation=1, incarnation=self.incarnation)

    def _ForkSequences(self, request, context):
        parent = self.rows[request.parent.seq_id]
        return kv.ForkSequencesResponse(handles=[
            self._new({layer: bytearray(rows) for layer, rows in parent.items()})
            for _ in range(request.count)])

    def _named(self, request, reply, act):
        for index, handle in enumerate(request.handles):
            if handle.seq_id in self.rows and handle.incarnation == self.incarnation:
                act(index, handle)
            else:
                reply.item_errors.add(index=index, error=kv.Error(code=5, message="unknown handle"))
        return reply

    def _TruncateSequences(self, request, context):
        def cut(index, handle):
            for rows in self.rows[handle.seq_id].values():
                del rows[2 * TOKEN_BYTES * request.seq_lens[index]:]
        return self._named(request, kv.TruncateSequencesResponse(), cut)

    def _FreeSequences(self, request, context):
        return self._named(request, kv.FreeSequencesResponse(),
                           lambda _, handle: self.rows.pop(handle.seq_id))

    def _RenewSequences(self, request, context):
        self.hold.wait(10)
        return self._named(request, kv.RenewSequencesResponse(), lambda *_: None)

    def _info(self, handle):
        rows = self.rows[handle.seq_id]
        return kv.SequenceInfo(handle=handle, model="small", ttl_ms=self.ttl_ms, seq_lens=[
            len(rows.get(layer, b"")) // TOKEN_BYTES // 2 for layer in range(3)])

    def _StatSequences(self, request, context):
        reply = kv.StatSequencesResponse()
        return self._named(request, reply,
                           lambda _, handle: reply.sequences.append(self._info(handle)))

    def _ListSequences(self, request, context):
        """Two a page."""
        begin = int(request.page_token or 0)
        ids = sorted(self.rows)
        handles = [kv.Handle(seq_id=seq_id, generation=1, incarnation=self.incarnation)
                   for seq_id in ids[begin:begin + 2]]
        more = str(begin + 2) if begin + 2 < len(ids) else ""
        return kv.ListSequencesResponse(sequences=[self._info(handle) for handle in handles],
                                        next_page_token=more)


class _Handler(grpc.GenericRpcHandler):
    """Finds the FakeDaemon's function for each method that kv.proto names."""

    def __init__(self, daemon):
        self._daemon = daemon
        self._methods = kv.DESCRIPTOR.services_by_name["DecodeAttention"].methods_by_name

    def service(self, details):
        name = details.method.rpartition("/")[2]
        method = self._methods[name]
        coding = {"request_deserializer": getattr(kv, method.input_type.name).FromString,
                  "response_serializer": getattr(kv, method.output_type.name).SerializeToString}
        if name == "Append":
            return grpc.stream_unary_rpc_method_handler(self._daemon.append, **coding)
        if name == "DecodeStream":
            return grpc.stream_stream_rpc_method_handler(self._daemon.stream, **coding)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._daemon.unary(name, request, context), **coding)


def _abort(context, fault):
    trailers = []
    if fault.pushback_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", str(fault.pushback_ms)))
    if fault.retry_info_ms is not None:
        trailers.append(("grpc-status-details-bin", _status_details(fault.retry_info_ms)))
    context.set_trailing_metadata(trailers)
    context.abort(fault.code, fault.details)


def _status_details(delay_ms):
    """A google.rpc.Status with one google.rpc.RetryInfo; each length is below 128."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(delay_ms)
    detail = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo")
    detail.value = b"\x0a" + bytes([delay.ByteSize()]) + delay.SerializeToString()
    return b"\x08\x08\x1a" + bytes([detail.ByteSize()]) + detail.SerializeToString()


def _code(number):
    return next(code for code in grpc.StatusCode if code.value[0] == number)
