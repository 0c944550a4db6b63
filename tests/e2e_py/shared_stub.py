"""The calls with tensors through shared memory, behind the interface of a gRPC stub.

Written from proto/fp8kvd/v1/shared_memory.h alone, apart from the client packages: a second reading
of the contract. One request at a time lies at the beginning of its own part of the data area.
"""

import mmap
import os
import select
import socket
import struct
import time

MAGIC = 0x4D485346
WAIT_S = 30


class SharedStub:
    """Decode, DecodeStream and Append go through the session; all else by the stub of gRPC."""

    PARTS = 8  # of the data area, one for each request in flight

    def __init__(self, stub, kv):
        self._stub, self._kv = stub, kv
        answer = stub.OpenSharedMemory(kv.OpenSharedMemoryRequest())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(answer.unix_socket)
        self._socket.send(struct.pack("<II64sQ", MAGIC, 1, answer.ticket.encode(), 16 << 20))
        welcome, fds, _, _ = socket.recv_fds(self._socket, 1024, 1)
        (magic, self._entries, size, self._requests_at, self._replies_at, self._data_at,
         self._data_bytes) = struct.unpack("<IIQQQQQ", welcome)
        assert magic == MAGIC, welcome
        self._memory = mmap.mmap(fds[0], size)
        os.close(fds[0])
        self._sent = self._taken = 0

    def __getattr__(self, name):
        return getattr(self._stub, name)

    def close(self):
        self._socket.close()

    def Decode(self, request):
        self._send(1, request, request.q)
        return self._reply(self._kv.DecodeResponse)

    def DecodeStream(self, requests):
        for request in requests:
            self._send(1, request, request.q)
            if self._sent - self._taken == self.PARTS:  # replies come in any order: all, then more
                yield from self._stream_replies()
        yield from self._stream_replies()

    def Append(self, chunks):
        reply = self._kv.AppendResponse()
        for chunk in chunks:
            self._send(2, chunk, b"")
            reply = self._reply(self._kv.AppendResponse)
        return reply

    def _stream_replies(self):
        while self._taken != self._sent:
            tag, error, message = self._take(self._kv.DecodeResponse)
            yield self._kv.DecodeResponse(request_id=tag, error=error) if error else message

    def _reply(self, kind):
        _, error, message = self._take(kind)
        if error:
            raise RuntimeError(f"{error.code}: {error.message}")
        return message

    def _send(self, kind, request, q):
        part = self._data_bytes // self.PARTS
        begin = at = self._sent % self.PARTS * part
        head = type(request)()
        head.CopyFrom(request)
        for field in ("q", "k", "v") if kind == 1 else ("k", "v"):
            head.ClearField(field)
        places = []
        for piece in (head.SerializeToString(), q, request.k, request.v):
            self._memory[self._data_at + at:self._data_at + at + len(piece)] = piece
            places += (at, len(piece))
            at += (len(piece) + 63) // 64 * 64
        tag = request.request_id if kind == 1 else self._sent
        entry = struct.pack("<II11Q32x", kind, WAIT_S * 1000, tag, *places, at, begin + part - at)
        offset = self._requests_at + self._sent % self._entries * 128
        self._memory[offset:offset + 128] = entry
        self._sent += 1
        self._set(0, self._sent)  # requests_tail
        self._socket.send(b"\0")

    def _take(self, kind):
        deadline = time.monotonic() + WAIT_S
        while self._get(256) == self._taken:  # replies_tail
            self._set(640, 1)  # client_sleeps
            if not select.select([self._socket], [], [], 0.01)[0]:
                assert time.monotonic() < deadline, "no reply"
            elif len(packet := self._socket.recv(1024)) != 1:
                raise RuntimeError(f"the session ended: {packet!r}")
        offset = self._replies_at + self._taken % self._entries * 64
        tag, code, head_at, head_bytes, out_at, out_bytes, lse_at, lse_bytes = struct.unpack(
            "<QI4x6Q", self._memory[offset:offset + 64])
        self._taken += 1
        head = self._part(head_at, head_bytes)
        error = message = None
        if code:
            error = self._kv.Error.FromString(head)
        else:
            message = kind.FromString(head)
            if out_bytes:
                message.out = self._part(out_at, out_bytes)
            if lse_bytes:
                message.lse = self._part(lse_at, lse_bytes)
        self._set(384, self._taken)  # replies_head
        return tag, error, message

    def _part(self, at, size):
        return self._memory[self._data_at + at:self._data_at + at + size]

    def _get(self, at):
        return struct.unpack("<I", self._memory[at:at + 4])[0]

    def _set(self, at, value):
        self._memory[at:at + 4] = struct.pack("<I", value)
