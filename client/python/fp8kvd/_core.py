"""What the calls of one sync client share: the channel, retries, and the thread that renews."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grpc

from fp8kvd import _append, _calls, _options, errors
from fp8kvd._leases import Leases
from fp8kvd._progress import Progress
from fp8kvd.types import Handle, ItemError

T = TypeVar("T")

RENEW_ITEMS = 256  # handles of one renewal, the least items_max that a daemon may have
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
        self._leases = Leases()
        self._changed = threading.Condition()
        self._renewer: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends what is in flight with Cancelled. Sequences that are left end with their leases."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
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
        invoke = self._stubs.unary[call.name]
        while True:
            try:
                raw = invoke(call.request, timeout=left_s, metadata=self._metadata)
            except (grpc.RpcError, ValueError) as raised:
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
                    self._stubs.append(_counted(plan, progress), timeout=retry.left_s(),
                                 metadata=self._metadata)
                    return
                except (grpc.RpcError, ValueError) as raised:
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

    def open_stream(self, requests: Iterator[bytes]) -> Any:
        """A DecodeStream: replies to iterate over, with cancel()."""
        try:
            return self._stubs.decode_stream(requests, metadata=self._metadata)
        except ValueError as raised:
            raise self._error_of(raised, "DecodeStream") from None

    def _error_of(self, raised: Exception, call: str) -> errors.Error:
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
            for begin in range(0, len(handles), RENEW_ITEMS):
                self._renew(handles[begin:begin + RENEW_ITEMS])

    def _renew(self, handles: list[Handle]) -> None:
        """One that does not arrive is tried again a period later, twice before the lease ends."""
        call = _calls.renew(handles)
        try:
            raw = self._stubs.unary[call.name](call.request, timeout=RENEW_TIMEOUT_S,
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
