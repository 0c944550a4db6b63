"""One session of the same-host transport: requests into the daemon's shared memory, replies out of
it. proto/fp8kvd/v1/shared_memory.h has the layout; the numbers here are those.

A request and a reply are the bytes that gRPC would carry; only where they lie differs. Python has
no fences, so stores must become visible in the order in which they are made: x86-64 does that, and
the system calls between a store and the look that must come after it (send, recv) are fences.
Elsewhere the transport is not used.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fp8kvd import _wire
from fp8kvd.v1 import kv_pb2

_MAGIC, _VERSION = 0x4D485346, 1
_HELLO = struct.Struct("<II64sQ")
_WELCOME = struct.Struct("<IIQQQQQ")
_FAREWELL = struct.Struct("<II496s")
_REQUEST = struct.Struct("<II11Q32x")
_REPLY = struct.Struct("<QI4x6Q")
# Words of the Head, a cache line (32 of them) apart.
_REQUESTS_TAIL, _REPLIES_TAIL, _REPLIES_HEAD, _CLIENT_SLEEPS = 0, 64, 96, 160
_ALIGN, _REPLY_BYTES, _REPLY_BYTES_PER_ITEM = 64, 1024, 192
_HEAD_BYTES_MAX = 128 << 10
_WELCOME_S = 2.0
_SPIN_S = 30e-6  # a look at the ring costs a tenth of that
_POLL_S_MAX = 1.0
_CLOSE_S = 0.1  # until a stream that waits for replies sees that it was closed

DECODE, APPEND = 1, 2


class Message(NamedTuple):
    """A request as gRPC would carry it, its tensors (q, k, v) last, and what the reply takes."""

    kind: int
    request: bytes
    sizes: tuple[int, int, int]  # of q, k and v
    items: int
    reply_bytes: int = 0  # of out and lse

    @property
    def room(self) -> int:
        return _aligned(len(self.request)) + _aligned(self.reply_room)

    @property
    def reply_room(self) -> int:
        return (_aligned(self.reply_bytes) + 2 * _ALIGN + _REPLY_BYTES
                + _REPLY_BYTES_PER_ITEM * self.items)


class Pending:
    """A request under way: its reply's bytes, or why there are none."""

    __slots__ = ("at", "bytes", "changed", "done", "error", "on_done", "raw", "waits")

    def __init__(self, at: int, size: int, on_done: Callable[[Pending], None] | None) -> None:
        self.at, self.bytes, self.on_done = at, size, on_done
        self.raw: bytes = b""
        self.error: kv_pb2.Error | None = None
        self.done = self.waits = False
        self.changed = threading.Event()


class Full(Exception):
    """No room until replies come."""


class Broken(Exception):
    """The session is over; the text says why."""


def host_id() -> str:
    """What the daemon knows this host by; empty where the transport is not used."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(socket, "recv_fds"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class Session:
    """send and take from any thread. `_lock` guards all; it is not held over a wait."""

    def __init__(self, unix_socket: str, ticket: str, memory_bytes: int) -> None:
        """Raises Broken, or OSError where the socket cannot be had."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.socket.settimeout(_WELCOME_S)
            self.socket.connect(unix_socket)
            self.socket.send(_HELLO.pack(_MAGIC, _VERSION, ticket.encode(), memory_bytes))
            packet, fds, _, _ = socket.recv_fds(self.socket, _FAREWELL.size, 1)
            try:
                if len(packet) != _WELCOME.size or not fds:
                    raise Broken(_reason(packet))
                _, self._entries, size, self._requests_at, self._replies_at, self._data_at, \
                    self.bytes_max = _WELCOME.unpack(packet)
                self._memory = mmap.mmap(fds[0], size)
            finally:
                for fd in fds:  # of a packet that is no welcome, too
                    os.close(fd)
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        self._head = memoryview(self._memory).cast("I")
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._leader = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._free = [(0, self.bytes_max)]  # gaps in order: where and how long
        self._tag = self._tail = self._taken = 0
        self.broken = ""  # why, once it is

    def fits(self, message: Message) -> bool:
        head = len(message.request) - sum(message.sizes)
        return message.room <= self.bytes_max and head <= _HEAD_BYTES_MAX

    def send(self, message: Message, timeout_s: float,
             on_done: Callable[[Pending], None] | None = None) -> Pending:
        """Puts the request into the ring. Raises Full or Broken."""
        with self._lock:
            if self.broken:
                raise Broken(self.broken)
            at = self._place(message.room) if len(self._pending) < self._entries else None
            if at is None:
                raise Full
            pending = Pending(at, message.room, on_done)
            begin, size = self._data_at + at, len(message.request)
            self._memory[begin:begin + size] = message.request
            reply_at = at + _aligned(size)
            self._tag += 1
            _REQUEST.pack_into(
                self._memory, self._requests_at + self._tail % self._entries * _REQUEST.size,
                message.kind, min(2**31, max(1, round(timeout_s * 1000))), self._tag,
                *_places(message, at), reply_at, at + message.room - reply_at)
            self._pending[self._tag] = pending
            self._tail = (self._tail + 1) & 0xFFFFFFFF
            self._head[_CLIENT_SLEEPS] = 1  # before the bell, which is a fence
            self._head[_REQUESTS_TAIL] = self._tail
            self._ring()
        return pending

    def wait(self, pending: Pending, timeout_s: float) -> bool:
        """Until it is done; False when it is not by then: it goes on, and nobody hears of it.
        One of those who wait takes replies in for all."""
        deadline = time.monotonic() + timeout_s
        pending.waits = True
        try:
            while not pending.done:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._leader.acquire(blocking=False):
                    try:
                        if not pending.done:
                            self.hear(left)
                    finally:
                        self._leader.release()
                        self._wake_one()
                else:
                    pending.changed.wait(left)
                    pending.changed.clear()
        finally:
            pending.waits = False
            if not pending.done:  # the word to lead may have come to this one, who leaves
                self._wake_one()
        return True

    def wait_for_room(self, timeout_s: float) -> None:
        """After Full: until something may have become free."""
        if not self.lead(timeout_s):
            with self._lock:
                self._room.wait(min(timeout_s, _POLL_S_MAX))

    def lead(self, timeout_s: float) -> bool:
        """hear(), unless another thread is at it."""
        if not self._leader.acquire(blocking=False):
            return False
        try:
            self.hear(timeout_s)
        finally:
            self._leader.release()
            self._wake_one()
        return True

    def hear(self, timeout_s: float) -> None:
        """Waits for replies or the end, and takes them in. For one thread at a time."""
        until = time.perf_counter() + min(_SPIN_S, timeout_s)
        while self._head[_REPLIES_TAIL] == self._taken:
            if time.perf_counter() > until:
                poll = select.poll()
                poll.register(self.socket, select.POLLIN)
                poll.poll(min(timeout_s, _POLL_S_MAX) * 1000)
                break
        self.take()

    def take(self) -> None:
        """Takes in what is there, without waiting."""
        why = self._drain()
        finished: list[Pending] = []
        with self._lock:
            while self._taken != self._head[_REPLIES_TAIL]:
                at = self._replies_at + self._taken % self._entries * _REPLY.size
                tag, code, *places = _REPLY.unpack_from(self._memory, at)
                self._taken = (self._taken + 1) & 0xFFFFFFFF
                pending = self._pending.pop(tag, None)
                if pending is not None:
                    self._read(pending, code, places)
                    self._give_back(pending.at, pending.bytes)
                    finished.append(pending)
            self._head[_REPLIES_HEAD] = self._taken
            if why:
                self.broken = why
                for pending in self._pending.values():
                    pending.error = kv_pb2.Error(code=_UNAVAILABLE, message=why)
                finished += self._pending.values()
                self._pending.clear()
            if finished:
                self._room.notify_all()
        for pending in finished:
            pending.done = True
            pending.changed.set()
            if pending.on_done is not None:
                pending.on_done(pending)

    def close(self, why: str = "this client is closed") -> None:
        """What is in flight ends with an error; the daemon cancels it."""
        with self._lock:
            self.broken = self.broken or why
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.take()

    def __del__(self) -> None:
        self.socket.close()  # not earlier: a thread may wait for it

    def _drain(self) -> str:
        """Reads the bells. Why the session is over, when it is."""
        self._head[_CLIENT_SLEEPS] = 1  # before recv, which is a fence, before the look at the ring
        while True:
            try:
                packet = self.socket.recv(_FAREWELL.size)
            except (BlockingIOError, InterruptedError):
                return ""
            except OSError as error:
                return f"the daemon ended the session: {error}"
            if len(packet) != 1:
                return self.broken or _reason(packet)

    def _ring(self) -> None:
        try:
            self.socket.send(b"\0")
        except OSError:
            pass  # full: it has bells enough; gone: recv will say so

    def _wake_one(self) -> None:
        with self._lock:
            for pending in self._pending.values():
                if pending.waits:
                    pending.changed.set()
                    return

    def _read(self, pending: Pending, code: int, places: list[int]) -> None:
        head_at, head_bytes, out_at, out_bytes, lse_at, lse_bytes = places
        head = self._part(head_at, head_bytes)
        if code:
            pending.error = kv_pb2.Error.FromString(head)
            pending.error.code = code  # also where the room was too small for words
        else:
            pending.raw = _wire.join_reply(head, self._part(out_at, out_bytes),
                                           self._part(lse_at, lse_bytes))

    def _part(self, at: int, size: int) -> bytes:
        return self._memory[self._data_at + at:self._data_at + at + size] if size else b""

    def _place(self, size: int) -> int | None:
        """First fit."""
        for index, (at, gap) in enumerate(self._free):
            if gap >= size:
                self._free[index:index + 1] = [(at + size, gap - size)] if gap > size else []
                return at
        return None

    def _give_back(self, at: int, size: int) -> None:
        free = sorted([*self._free, (at, size)])
        joined = [free[0]]
        for begin, gap in free[1:]:
            last, before = joined[-1]
            if last + before == begin:
                joined[-1] = (last, before + gap)
            else:
                joined.append((begin, gap))
        self._free = joined


def stream_reply(request_id: int, pending: Pending) -> bytes:
    """What a DecodeStream of gRPC would carry."""
    if pending.error is None:
        return pending.raw
    return kv_pb2.DecodeResponse(request_id=request_id, error=pending.error).SerializeToString()


class Inbox:
    """Decodes of one stream: the thread that iterates gets their replies, as gRPC's bytes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._done: deque[tuple[int, Pending]] = deque()
        self._unanswered = 0
        self._wakes = threading.Event()
        self._closed = False

    def send(self, request_id: int, message: Message, timeout_s: float) -> None:
        """Waits for room. Raises Broken; Full when there is none within timeout_s."""
        deadline = time.monotonic() + timeout_s
        self._unanswered += 1

        def put(pending: Pending) -> None:
            self._done.append((request_id, pending))
            self._wakes.set()

        while True:
            try:
                self.session.send(message, timeout_s, put)
                break
            except Full:
                if time.monotonic() >= deadline:
                    raise
                self.session.wait_for_room(deadline - time.monotonic())
        self._wakes.set()

    def cancel(self) -> None:
        """Ends the iteration."""
        self._closed = True
        self._wakes.set()

    def __iter__(self) -> Iterator[bytes]:
        """Ends when the session does, or by cancel()."""
        while True:
            while self._done:
                request_id, pending = self._done.popleft()
                self._unanswered -= 1
                if pending.error is not None and self.session.broken:
                    return  # sent again elsewhere, as is all that is unanswered
                yield stream_reply(request_id, pending)
            if self._closed or self.session.broken:
                return
            waits = self._unanswered > 0
            if not waits or not self.session.lead(_CLOSE_S):
                self._wakes.wait(_CLOSE_S if waits else None)
                self._wakes.clear()


_UNAVAILABLE = 14


def _aligned(size: int) -> int:
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN


def _places(message: Message, at: int) -> list[int]:
    """Where head, q, k and v lie, with their sizes: the tensors are the message's last fields."""
    places: list[int] = []
    end = at + len(message.request)
    for size in reversed(message.sizes):
        places[:0] = (end - size, size)
        end -= size + (_wire.field_head_bytes(size) if size else 0)
    return [at, end - at, *places]


def _reason(packet: bytes) -> str:
    if len(packet) == _FAREWELL.size:
        words: bytes = _FAREWELL.unpack(packet)[2]
        return words.split(b"\0")[0].decode(errors="replace")
    return "the daemon ended the session without a word"
