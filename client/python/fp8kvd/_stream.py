"""Decode calls in a pipeline over one stream, for threads."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import grpc

from fp8kvd import _calls, _options, _sequences, _shm, _wire, errors
from fp8kvd._core import Core
from fp8kvd._sequences import AnySequence, DecodeOptions
from fp8kvd._tensors import Tensor
from fp8kvd.types import DecodeReply

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclasses.dataclass(frozen=True)
class _Unanswered:
    call: _calls.Call[DecodeReply]
    args: _calls.DecodeArgs
    sequences: Sequence[AnySequence]
    future: Future[DecodeReply]


class DecodeStream:
    """Decode calls of which many are in flight; made by Client.decode_stream.

    Calls of one (sequence, layer) run in the order of submit; results come as they are ready. When
    the connection breaks a new one is made and everything unanswered is sent again in its order.
    submit may come from any thread. One background thread takes the replies in.
    """

    def __init__(self, core: Core, in_flight_max: int, timeout_s: float) -> None:
        if in_flight_max < 1:
            raise ValueError(f"in_flight_max is {in_flight_max}: at least 1")
        self._core, self._timeout_s = core, timeout_s
        self._room = threading.BoundedSemaphore(in_flight_max)
        self._ids = itertools.count(1)
        self._changed = threading.Condition()  # guards what follows; never held over a call
        self._unanswered: dict[int, _Unanswered] = {}  # in the order of submit
        self._outbox: queue.SimpleQueue[bytes | None] | None = None  # of the open connection
        self._inbox: _shm.Inbox | None = None  # the same, of shared memory
        self._uses_grpc = False  # from the first call on that shared memory does not hold
        self._replies: Any = None
        self._closed = False
        self._reader = threading.Thread(target=self._run, daemon=True, name="fp8kvd-stream")
        self._reader.start()

    def submit(self, sequences: Sequence[AnySequence], q: Tensor, k: Tensor | None = None,
               v: Tensor | None = None, *, layer: int, positions: Sequence[int] | None = None,
               **options: Unpack[DecodeOptions]) -> Future[DecodeReply]:
        """As Client.decode, but gives a future; waits while in_flight_max are unanswered.

        The tensors are copied before it returns. Default positions count what was submitted before,
        answered or not. The future raises what decode would; a ResourceExhausted is not retried
        here, since later calls of the sequence are under way. Cancelling it drops the answer.
        """
        args = _sequences.decode_args(sequences, q, k, v, layer, positions, options)
        request_id = next(self._ids)
        call = _calls.decode(args, request_id, self._timeout_s)
        future: Future[DecodeReply] = Future()
        self._room.acquire()
        with self._changed:
            if self._closed:
                self._room.release()
                raise errors.Cancelled("DecodeStream", self._core.options.target,
                                       "this stream is closed")
            self._unanswered[request_id] = _Unanswered(call, args, sequences, future)
            _sequences.commit(sequences, args)
            if self._outbox is not None:
                self._outbox.put(call.request)
            if self._inbox is not None:
                self._send_shared(self._inbox, request_id, call)
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Unanswered futures raise Cancelled."""
        with self._changed:
            self._closed = True
            if self._replies is not None:
                self._replies.cancel()
            self._changed.notify_all()
        self._reader.join()

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        target = self._core.options.target
        error: errors.Error = errors.Cancelled("DecodeStream", target, "this stream is closed")
        retry: _options.Retry | None = None  # of breaks without a reply between them
        while self._wanted():
            try:
                self._connect()
                for raw in self._replies:
                    self._take(_wire.decode_response(raw))
                    retry = None
                broken: errors.Error = errors.Unavailable(
                    "DecodeStream", target, "the daemon ended the stream")
            except grpc.RpcError as raised:
                broken = _options.error_of(raised, "DecodeStream", target)
            except errors.Error as raised:
                broken = raised  # the client closed
            except _calls.UNREADABLE as raised:
                broken = _calls.unreadable("DecodeStream", target, raised)
            if self._hang_up():
                continue  # nobody waits: submit opens the next connection
            retry = retry or _options.Retry(self._core.options, self._timeout_s)
            delay = retry.next_s(broken)
            if delay is None or not self._core.wait(delay):
                error = broken
                break
        with self._changed:
            self._closed = True
            left, self._unanswered = self._unanswered, {}
        for unanswered in left.values():
            self._fail(unanswered, error)

    def _wanted(self) -> bool:
        """Waits until there is something to send; False when the stream is closed."""
        with self._changed:
            while not self._unanswered and not self._closed:
                self._changed.wait()
            return not self._closed

    def _send_shared(self, inbox: _shm.Inbox, request_id: int, call: _calls.Call[DecodeReply]
                     ) -> None:
        """A call that cannot be sent ends the connection; the next one takes it along."""
        if call.shared is not None and inbox.session.fits(call.shared):
            try:
                inbox.send(request_id, call.shared, self._timeout_s)
                return
            except (_shm.Broken, _shm.Full):
                pass
        else:
            self._uses_grpc = self._core.options.transport == "auto"
        inbox.cancel()

    def _connect(self) -> None:
        """Sends what is unanswered in its order, and from now on what submit adds."""
        with self._changed:
            largest = max((unanswered.call.shared for unanswered in self._unanswered.values()
                           if unanswered.call.shared is not None), key=lambda m: m.room)
        session = None if self._uses_grpc else self._core.shared(largest, "DecodeStream")
        with self._changed:
            if session is not None:
                self._replies = self._inbox = _shm.Inbox(session)
                for request_id, unanswered in self._unanswered.items():
                    self._send_shared(self._inbox, request_id, unanswered.call)
                if self._closed:
                    self._inbox.cancel()
                return
            self._outbox = queue.SimpleQueue()
            for unanswered in self._unanswered.values():
                self._outbox.put(unanswered.call.request)
            self._replies = self._core.open_stream(_until_none(self._outbox))
            if self._closed:
                self._replies.cancel()

    def _hang_up(self) -> bool:
        """Leaves the connection; True when nothing is unanswered, or the stream is closed."""
        with self._changed:
            if self._outbox is not None:
                self._outbox.put(None)  # ends the thread that gRPC sends from
            self._outbox = self._inbox = None
            return self._closed or not self._unanswered

    def _take(self, reply: _wire.Reply) -> None:
        with self._changed:
            unanswered = self._unanswered.pop(reply.small.request_id, None)
        if unanswered is None:
            return  # answered before the connection broke
        result = _calls.stream_result(reply, unanswered.call, unanswered.args,
                                      self._core.options.target)
        if isinstance(result, errors.Error):
            self._fail(unanswered, self._core.explained(result, unanswered.call))
            return
        self._room.release()
        try:
            unanswered.future.set_result(result)
        except InvalidStateError:
            pass  # cancelled by its owner

    def _fail(self, unanswered: _Unanswered, error: errors.Error) -> None:
        _sequences.step_back(unanswered.sequences, unanswered.args, error)
        self._room.release()
        try:
            unanswered.future.set_exception(error)
        except InvalidStateError:
            pass  # cancelled by its owner


def _until_none(outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    return iter(outbox.get, None)
