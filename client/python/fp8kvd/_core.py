"""What the calls of one sync client share: the channel, retries, and the thread that renews."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grpc

from fp8kvd import _append, _calls, _options, _shm, _transport, errors
from fp8kvd._leases import Leases
from fp8kvd._progress import Progress
from fp8kvd.types import Handle, ItemError

T = TypeVar("T")

RENEW_ITEMS = 256  # handles of one renewal, the least items_max that a daemon may have
CHUNKS_IN_FLIGHT = 4  # of an append through shared memory: one is copied while others run
RENEW_TIMEOUT_S = 5.0  # nobody waits for it longer


class Core:
    """Calls may come from any thread. `_changed` guards the leases; never held over a call."""

    def __init__(self, options: _options.Options) -> None:
        self.options = options
        arguments = options.target, options.channel_options()
        if options.tls is None:
            self._channel = grpc.insecure_channel(*arguments)
        else:
            self._channel = grpc.secure_channel(arguments[0], options.tls.credentials(),
                                                arguments[1])
        self._metadata = options.metadata()
        self._stubs = _calls.Stubs(self._channel)
        self._choice = _transport.Choice(options)
        self._opens = threading.Lock()
        self._leases = Leases()
        self._changed = threading.Condition()
        self._renewer: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends what is in flight with Cancelled. Sequences that are left end with their leases."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._choice.close()
        self._channel.close()
        if self._renewer is not None:
            self._renewer.join()

    def wait(self, delay_s: float) -> bool:
        """False when the client closed meanwhile."""
        return not self._closed.wait(delay_s)

    def run(self, call: _calls.Call[T], timeout_s: float | None = None) -> T:
        """Makes a call, again where a retry helps, and raises what failed."""
        left_s = timeout_s or self.options.timeout_s
        deadline = time.monotonic() + left_s
        retry: _options.Retry | None = None  # most calls need none
        while True:
            try:
                raw = self._invoke(call, left_s)
            except (grpc.RpcError, ValueError, errors.Error) as raised:
                error = self._error_of(raised, call.name)
            else:
                try:
                    result, item_errors = call.read(raw)
                except _calls.UNREADABLE as raised:
                    raise _calls.unreadable(call.name, self.options.target, raised) from None
                if not item_errors:
                    return result
                error = call.failure(self.options.target, result, item_errors)
            retry = retry or _options.Retry(self.options, deadline - time.monotonic())
            delay = retry.next_s(error)
            if delay is None or not self.wait(delay):
                raise self.explained(error, call) from None
            left_s = retry.left_s()

    @property
    def transport(self) -> tuple[str, str]:
        return self._choice.state

    def shared(self, message: _shm.Message | None, call: str) -> _shm.Session | None:
        """The session that the message goes through; None: gRPC."""
        if message is not None and self._choice.wants_open():
            with self._opens:
                if self._choice.wants_open():
                    self._open()
        return self._choice.session_for(message, call)

    def _open(self) -> None:
        timeout_s = min(_transport.OPEN_S, self.options.timeout_s)
        try:
            raw = self._stubs.unary["OpenSharedMemory"](
                self._choice.open_request(), timeout=timeout_s, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as raised:
            self._choice.failed(str(self._error_of(raised, "OpenSharedMemory")))
        else:
            self._choice.opened(raw)

    def _invoke(self, call: _calls.Call[Any], timeout_s: float) -> bytes:
        session = self.shared(call.shared, call.name)
        if session is None or call.shared is None:
            raw: bytes = self._stubs.unary[call.name](call.request, timeout=timeout_s,
                                                      metadata=self._metadata)
            return raw
        return self._raw_of(self._send(session, call.shared, call.name, timeout_s), session,
                            call.name, timeout_s)

    def _send(self, session: _shm.Session, message: _shm.Message, call: str, timeout_s: float
              ) -> _shm.Pending:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return session.send(message, timeout_s)
            except _shm.Broken as raised:
                raise self._broken(call, str(raised)) from None
            except _shm.Full:
                if time.monotonic() >= deadline:
                    raise errors.DeadlineExceeded(
                        call, self.options.target, "shared memory was in use until then") from None
                session.wait_for_room(deadline - time.monotonic())

    def _raw_of(self, pending: _shm.Pending, session: _shm.Session, call: str, timeout_s: float
                ) -> bytes:
        """The reply's bytes, or the exception for what it says."""
        if not session.wait(pending, timeout_s):
            raise errors.DeadlineExceeded(call, self.options.target,
                                          "no reply came through shared memory")
        if pending.error is None:
            return pending.raw
        if self._closed.is_set():
            raise self._broken(call, "")
        raise _calls.shared_error(pending.error, call, self.options.target)

    def _broken(self, call: str, why: str) -> errors.Error:
        if self._closed.is_set():
            return errors.Cancelled(call, self.options.target, "this client is closed")
        return errors.Unavailable(call, self.options.target, why)

    def explained(self, error: errors.Error, call: _calls.Call[Any]) -> errors.Error:
        """SequencesLost instead of NotFound when the handles are of an earlier run."""
        if call.lost(error):
            try:
                raw = self._stubs.unary["GetServerInfo"](b"", timeout=RENEW_TIMEOUT_S,
                                                         metadata=self._metadata)
            except (grpc.RpcError, ValueError):
                return error
            return call.explained(error, raw)
        return error

    def append(self, plan: _append.Plan, timeout_s: float | None, shown: bool | None) -> None:
        """Sends a plan's chunks; after a break asks what is committed and goes on from there."""
        retry = _options.Retry(self.options, timeout_s or self.options.append_timeout_s)
        progress = Progress(plan.kv_bytes, shown)
        stat = _calls.stat([plan.handle])
        try:
            while True:
                try:
                    self._append(plan, progress, retry.left_s())
                    return
                except (grpc.RpcError, ValueError, errors.Error) as raised:
                    error = self._error_of(raised, "Append")
                delay = retry.next_s(error)
                if delay is None or not self.wait(delay):
                    call = _calls.Call("Append", b"", stat.read, [plan.handle])
                    raise self.explained(error, call) from None
                if plan.update(self.run(stat, retry.left_s())[0].seq_lens):
                    retry.reset()
                if plan.done:
                    return
        finally:
            progress.close()

    def _append(self, plan: _append.Plan, progress: Progress, timeout_s: float) -> None:
        session = self.shared(plan.largest, "Append")
        if session is None:
            self._stubs.append(_counted(plan, progress), timeout=timeout_s,
                               metadata=self._metadata)
            return
        deadline = time.monotonic() + timeout_s
        sent: deque[_shm.Pending] = deque()
        try:
            for chunk, size in plan.chunks():
                if len(sent) >= CHUNKS_IN_FLIGHT:
                    self._raw_of(sent.popleft(), session, "Append", deadline - time.monotonic())
                message = _shm.Message(_shm.APPEND, chunk, (0, size // 2, size // 2),
                                       plan.layers)
                sent.append(self._send(session, message, "Append", deadline - time.monotonic()))
                progress.advance(size)
            while sent:
                self._raw_of(sent.popleft(), session, "Append", deadline - time.monotonic())
        finally:  # the first failure is the reason of later ones
            for pending in sent:
                session.wait(pending, deadline - time.monotonic())

    def open_stream(self, requests: Iterator[bytes]) -> Any:
        """A DecodeStream: replies to iterate over, with cancel()."""
        try:
            return self._stubs.decode_stream(requests, metadata=self._metadata)
        except ValueError as raised:
            raise self._error_of(raised, "DecodeStream") from None

    def _error_of(self, raised: Exception, call: str) -> errors.Error:
        if isinstance(raised, errors.Error):
            return raised
        if isinstance(raised, grpc.RpcError):
            return _options.error_of(raised, call, self.options.target)
        if not self._closed.is_set():  # else gRPC's ValueError for a closed channel
            raise raised
        return errors.Cancelled(call, self.options.target, "this client is closed")

    def add_leases(self, handles: Sequence[Handle], ttl_s: float) -> None:
        with self._changed:
            for handle in handles:
                self._leases.add(handle, ttl_s, time.monotonic())
            if self._renewer is None and not self._closed.is_set():
                self._renewer = threading.Thread(target=self._renew_loop, daemon=True,
                                                 name="fp8kvd-renew")
                self._renewer.start()
            self._changed.notify_all()

    def drop_leases(self, handles: Sequence[Handle]) -> None:
        with self._changed:
            for handle in handles:
                self._leases.drop(handle)

    def _renew_loop(self) -> None:
        while True:
            with self._changed:
                if self._closed.is_set():
                    return
                due = self._leases.next_due()
                now = time.monotonic()
                if due is None or due > now:
                    self._changed.wait(None if due is None else due - now)
                    continue
                handles = self._leases.take_due(now)
                patience_s = self._leases.patience(RENEW_TIMEOUT_S)
            for begin in range(0, len(handles), RENEW_ITEMS):
                self._renew(handles[begin:begin + RENEW_ITEMS], patience_s)

    def _renew(self, handles: list[Handle], patience_s: float) -> None:
        """One that does not arrive is tried again a period later, twice before the lease ends."""
        call = _calls.renew(handles)
        try:
            raw = self._stubs.unary[call.name](call.request, timeout=patience_s,
                                         metadata=self._metadata)
        except (grpc.RpcError, ValueError):
            return
        self.drop_leases(gone(handles, call.read(raw)[1]))


def gone(handles: Sequence[Handle], item_errors: Sequence[ItemError]) -> list[Handle]:
    """Those of a renewal that the daemon does not know any more."""
    return [handles[item.index] for item in item_errors
            if item.code == errors.NotFound.code and item.index < len(handles)]


def _counted(plan: _append.Plan, progress: Progress) -> Iterator[bytes]:
    for chunk, size in plan.chunks():
        yield chunk
        progress.advance(size)
