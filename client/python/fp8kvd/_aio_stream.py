"""Decode calls in a pipeline over one stream, for asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import grpc

from fp8kvd import _calls, _options, _sequences, _shm, _wire, errors
from fp8kvd._aio_core import Core
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
    future: asyncio.Future[DecodeReply]


class DecodeStream:
    """fp8kvd.DecodeStream for asyncio: `async with client.decode_stream() as stream`."""

    def __init__(self, core: Core, in_flight_max: int, timeout_s: float) -> None:
        if in_flight_max < 1:
            raise ValueError(f"in_flight_max is {in_flight_max}: at least 1")
        self._core, self._timeout_s = core, timeout_s
        self._room = asyncio.Semaphore(in_flight_max)
        self._ids = itertools.count(1)
        self._unanswered: dict[int, _Unanswered] = {}  # in the order of submit
        self._outbox: asyncio.Queue[int | None] | None = None  # of the open connection: ids
        self._uses_grpc = False  # from the first call on that shared memory does not hold
        self._wanted = asyncio.Event()  # something is unanswered
        self._closed = False
        self._reader = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, sequences: Sequence[AnySequence], q: Tensor, k: Tensor | None = None,
                     v: Tensor | None = None, *, layer: int,
                     positions: Sequence[int] | None = None, **options: Unpack[DecodeOptions]
                     ) -> asyncio.Future[DecodeReply]:
        """As Client.decode, but returns once it is queued, with a future; see DecodeStream of
        fp8kvd. Waits while in_flight_max are unanswered."""
        await self._room.acquire()
        try:
            if self._closed:
                raise errors.Cancelled("DecodeStream", self._core.options.target,
                                       "this stream is closed")
            args = _sequences.decode_args(sequences, q, k, v, layer, positions, options)
            request_id = next(self._ids)
            call = _calls.decode(args, request_id, self._timeout_s)
        except BaseException:
            self._room.release()
            raise
        future: asyncio.Future[DecodeReply] = asyncio.get_running_loop().create_future()
        self._unanswered[request_id] = _Unanswered(call, args, sequences, future)
        _sequences.commit(sequences, args)
        if self._outbox is not None:
            self._outbox.put_nowait(request_id)
        self._wanted.set()
        return future

    async def close(self) -> None:
        """Unanswered futures raise Cancelled."""
        self._closed = True
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def __aenter__(self) -> DecodeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        error: errors.Error = errors.Cancelled("DecodeStream", self._core.options.target,
                                               "this stream is closed")
        try:
            error = await self._serve()
        finally:
            self._closed = True
            for unanswered in self._unanswered.values():
                self._fail(unanswered, error)
            self._unanswered.clear()

    async def _serve(self) -> errors.Error:
        """Returns what ended it when the retries are used up."""
        retry: _options.Retry | None = None  # of breaks without a reply between them
        while True:
            await self._wanted.wait()
            before = next(iter(self._unanswered), 0)
            broken = await self._serve_connection()
            if not self._unanswered:
                self._wanted.clear()  # nobody waits: submit opens the next connection
                continue
            if retry is None or next(iter(self._unanswered)) != before:
                retry = _options.Retry(self._core.options, self._timeout_s)
            delay = retry.next_s(broken)
            if delay is None:
                return broken
            await asyncio.sleep(delay)

    async def _serve_connection(self) -> errors.Error:
        """Sends what is unanswered and takes replies in until the connection breaks."""
        target = self._core.options.target
        largest = max((unanswered.call.shared for unanswered in self._unanswered.values()
                       if unanswered.call.shared is not None), key=lambda m: m.room)
        try:
            session = None if self._uses_grpc else await self._core.shared(largest, "DecodeStream")
        except errors.Error as unavailable:
            return unavailable
        outbox = self._outbox = asyncio.Queue()
        for request_id in self._unanswered:
            outbox.put_nowait(request_id)
        if session is not None:
            return await self._serve_shared(session, outbox)
        try:
            replies = self._core.open_stream(self._requests(outbox))
        except errors.Cancelled as closed:
            return closed
        try:
            async for raw in replies:
                await self._take(_wire.decode_response(raw))
        except grpc.RpcError as raised:
            return _options.error_of(raised, "DecodeStream", target)
        except _calls.UNREADABLE as raised:
            replies.cancel()
            return _calls.unreadable("DecodeStream", target, raised)
        except asyncio.CancelledError:
            replies.cancel()
            raise
        finally:
            self._outbox = None
            outbox.put_nowait(None)
        return errors.Unavailable("DecodeStream", target, "the daemon ended the stream")

    async def _requests(self, outbox: asyncio.Queue[int | None]) -> AsyncIterator[bytes]:
        while (request_id := await outbox.get()) is not None:
            if request_id in self._unanswered:
                yield self._unanswered[request_id].call.request

    async def _serve_shared(self, session: _shm.Session, outbox: asyncio.Queue[int | None]
                            ) -> errors.Error:
        """The same through shared memory, until the session breaks or does not hold a call."""
        replies: asyncio.Queue[tuple[int, _shm.Pending] | errors.Error] = asyncio.Queue()
        sender = asyncio.get_running_loop().create_task(self._send(session, outbox, replies))
        try:
            while not isinstance(reply := await replies.get(), errors.Error):
                request_id, pending = reply
                if pending.error is not None and session.broken:
                    return errors.Unavailable("DecodeStream", self._core.options.target,
                                              session.broken)
                await self._take(_wire.decode_response(_shm.stream_reply(request_id, pending)))
            return reply
        finally:
            sender.cancel()
            self._outbox = None

    async def _send(self, session: _shm.Session, outbox: asyncio.Queue[int | None],
                    replies: asyncio.Queue[tuple[int, _shm.Pending] | errors.Error]) -> None:
        while (request_id := await outbox.get()) is not None:
            unanswered = self._unanswered.get(request_id)
            if unanswered is None:
                continue
            message = unanswered.call.shared
            if message is None or not session.fits(message):
                self._uses_grpc = self._core.options.transport == "auto"
                replies.put_nowait(errors.Unavailable(
                    "DecodeStream", self._core.options.target,
                    "a call is larger than the session's shared memory"))
                return
            try:
                done = await self._core.send_shared(session, message, "DecodeStream",
                                                    self._timeout_s)
            except errors.Error as error:
                replies.put_nowait(error)
                return
            done.add_done_callback(functools.partial(_deliver, replies, request_id))

    async def _take(self, reply: _wire.Reply) -> None:
        unanswered = self._unanswered.pop(reply.small.request_id, None)
        if unanswered is None:
            return  # answered before the connection broke
        result = _calls.stream_result(reply, unanswered.call, unanswered.args,
                                      self._core.options.target)
        if isinstance(result, errors.Error):
            self._fail(unanswered, await self._core.explained(result, unanswered.call))
            return
        self._room.release()
        if not unanswered.future.done():  # else cancelled by its owner
            unanswered.future.set_result(result)

    def _fail(self, unanswered: _Unanswered, error: errors.Error) -> None:
        _sequences.step_back(unanswered.sequences, unanswered.args, error)
        self._room.release()
        if not unanswered.future.done():
            unanswered.future.set_exception(error)


def _deliver(replies: asyncio.Queue[tuple[int, _shm.Pending] | errors.Error], request_id: int,
             done: asyncio.Future[_shm.Pending]) -> None:
    if not done.cancelled():
        replies.put_nowait((request_id, done.result()))
