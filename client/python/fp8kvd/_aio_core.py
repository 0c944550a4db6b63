"""What the calls of one asyncio client share: the channel, retries, and the task that renews."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import grpc

from fp8kvd import _append, _calls, _options, _shm, _transport, errors
from fp8kvd._core import CHUNKS_IN_FLIGHT, RENEW_ITEMS, RENEW_TIMEOUT_S, gone
from fp8kvd._leases import Leases
from fp8kvd._progress import Progress
from fp8kvd.types import Handle

T = TypeVar("T")

_FULL_S = 1e-3  # between looks for room in shared memory


class Core:
    """For one event loop, the one that runs when it is made."""

    def __init__(self, options: _options.Options) -> None:
        self.options = options
        if options.tls is None:
            self._channel = grpc.aio.insecure_channel(options.target, options.channel_options())
        else:
            self._channel = grpc.aio.secure_channel(
                options.target, options.tls.credentials(), options.channel_options())
        self._metadata = options.metadata()
        self._stubs = _calls.Stubs(self._channel)
        self._choice = _transport.Choice(options)
        self._opens = asyncio.Lock()
        self._leases = Leases()
        self._changed = asyncio.Event()
        self._renewer: asyncio.Task[None] | None = None
        self.closed = False

    async def close(self) -> None:
        """Ends what is in flight with Cancelled. Sequences that are left end with their leases."""
        self.closed = True
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        if self._choice.session is not None:
            asyncio.get_running_loop().remove_reader(self._choice.session.socket)
        self._choice.close()
        await self._channel.close()

    async def run(self, call: _calls.Call[T], timeout_s: float | None = None) -> T:
        """Makes a call, again where a retry helps, and raises what failed."""
        retry = _options.Retry(self.options, timeout_s or self.options.timeout_s)
        while True:
            try:
                self._check_open(call.name)
                raw = await self._invoke(call, retry.left_s())
            except errors.Error as raised:
                error = raised
            else:
                result, item_errors = call.read_reply(raw, self.options.target)
                if not item_errors:
                    return result
                error = call.failure(self.options.target, result, item_errors)
            delay = retry.next_s(error)
            if delay is None or self.closed:
                raise await self.explained(error, call) from None
            await asyncio.sleep(delay)

    @property
    def transport(self) -> tuple[str, str]:
        return self._choice.state

    async def shared(self, message: _shm.Message | None, call: str) -> _shm.Session | None:
        """The session that the message goes through; None: gRPC."""
        if message is not None and self._choice.wants_open():
            async with self._opens:
                if self._choice.wants_open():
                    await self._open()
        return self._choice.session_for(message, call)

    async def _open(self) -> None:
        try:
            raw = await self._await(self._stubs.unary["OpenSharedMemory"](
                self._choice.open_request(), metadata=self._metadata,
                timeout=min(_transport.OPEN_S, self.options.timeout_s)), "OpenSharedMemory")
        except errors.Error as raised:
            self._choice.failed(str(raised))
            return
        self._choice.opened(raw)
        session = self._choice.session
        if session is not None:
            loop, socket = asyncio.get_running_loop(), session.socket

            def readable() -> None:
                session.take()
                if session.broken:
                    loop.remove_reader(socket)

            loop.add_reader(socket, readable)

    async def _invoke(self, call: _calls.Call[Any], timeout_s: float) -> bytes:
        session = await self.shared(call.shared, call.name)
        if session is not None and call.shared is not None:
            return await self._raw_of(await self.send_shared(session, call.shared, call.name,
                                                             timeout_s), call.name, timeout_s)
        raw: bytes = await self._await(self._stubs.unary[call.name](
            call.request, timeout=timeout_s, metadata=self._metadata), call.name)
        return raw

    async def send_shared(self, session: _shm.Session, message: _shm.Message, call: str,
                          timeout_s: float) -> asyncio.Future[_shm.Pending]:
        """Waits for room; the future is done with the reply."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_shm.Pending] = loop.create_future()
        deadline = loop.time() + timeout_s

        def on_done(pending: _shm.Pending) -> None:
            if not done.done():
                done.set_result(pending)

        while True:
            try:
                session.send(message, timeout_s, on_done)
                return done
            except _shm.Broken as raised:
                raise self._broken(call, str(raised)) from None
            except _shm.Full:
                if loop.time() >= deadline:
                    raise errors.DeadlineExceeded(
                        call, self.options.target, "shared memory was in use until then") from None
                await asyncio.sleep(_FULL_S)

    async def _raw_of(self, done: asyncio.Future[_shm.Pending], call: str, timeout_s: float
                      ) -> bytes:
        try:
            pending = await asyncio.wait_for(done, timeout_s)
        except asyncio.TimeoutError:
            raise errors.DeadlineExceeded(call, self.options.target,
                                          "no reply came through shared memory") from None
        if pending.error is None:
            return pending.raw
        if self.closed:
            raise self._broken(call, "")
        raise _calls.shared_error(pending.error, call, self.options.target)

    def _broken(self, call: str, why: str) -> errors.Error:
        return self._closed_error(call) if self.closed else errors.Unavailable(
            call, self.options.target, why)

    async def _append_shared(self, session: _shm.Session, plan: _append.Plan, progress: Progress,
                             timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        sent: deque[asyncio.Future[_shm.Pending]] = deque()

        async def take_oldest() -> None:
            await self._raw_of(sent.popleft(), "Append", deadline - time.monotonic())

        try:
            for chunk, size in plan.chunks():
                if len(sent) >= CHUNKS_IN_FLIGHT:
                    await take_oldest()
                message = _shm.Message(_shm.APPEND, chunk, (0, size // 2, size // 2), plan.layers)
                sent.append(await self.send_shared(session, message, "Append",
                                                   deadline - time.monotonic()))
                progress.advance(size)
            while sent:
                await take_oldest()
        finally:  # the first failure is the reason of later ones
            if sent:
                await asyncio.wait(sent, timeout=max(0.0, deadline - time.monotonic()))

    async def _await(self, pending: Any, call: str) -> Any:
        """The reply, or the exception of ours. A cancelled task cancels the call."""
        try:
            return await pending
        except grpc.RpcError as raised:
            raise _options.error_of(raised, call, self.options.target) from None
        except asyncio.CancelledError:
            if not self.closed:
                raise
            raise self._closed_error(call) from None

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise self._closed_error(call)

    def _closed_error(self, call: str) -> errors.Error:
        return errors.Cancelled(call, self.options.target, "this client is closed")

    async def explained(self, error: errors.Error, call: _calls.Call[Any]) -> errors.Error:
        """SequencesLost instead of NotFound when the handles are of an earlier run."""
        if call.lost(error):
            try:
                self._check_open(call.name)
                raw = await self._await(self._stubs.unary["GetServerInfo"](
                    b"", timeout=RENEW_TIMEOUT_S, metadata=self._metadata), call.name)
            except errors.Error:
                return error
            return call.explained(error, raw)
        return error

    async def append(self, plan: _append.Plan, timeout_s: float | None, shown: bool | None
                     ) -> None:
        """Sends a plan's chunks; after a break asks what is committed and goes on from there."""
        retry = _options.Retry(self.options, timeout_s or self.options.append_timeout_s)
        progress = Progress(plan.kv_bytes, shown)
        stat = _calls.stat([plan.handle])
        chunks_max: int | None = None
        try:
            while True:
                try:
                    self._check_open("Append")
                    session = await self.shared(plan.largest, "Append")
                    if session is not None:
                        await self._append_shared(session, plan, progress, retry.left_s())
                        return
                    chunks = _counted(plan, progress, chunks_max)
                    await self._await(self._stubs.append(chunks, timeout=retry.left_s(),
                                                         metadata=self._metadata), "Append")
                    if chunks_max is None:
                        return
                    chunks_max = None
                except errors.Error as raised:
                    delay = retry.next_s(raised)
                    if delay is None or self.closed:
                        call = _calls.Call("Append", b"", stat.read, [plan.handle])
                        raise await self.explained(raised, call) from None
                    await asyncio.sleep(delay)
                    # A write that fails hides the daemon's words from grpc.aio; one chunk alone
                    # has none behind it.
                    chunks_max = 1 if raised.details == _options.BROKEN_WRITE else None
                if plan.update((await self.run(stat, retry.left_s()))[0].seq_lens):
                    retry.reset()
                if plan.done:
                    return
        finally:
            progress.close()

    def open_stream(self, requests: AsyncIterator[bytes]) -> Any:
        """A DecodeStream: replies to iterate over, with cancel()."""
        self._check_open("DecodeStream")
        return self._stubs.decode_stream(requests, metadata=self._metadata)

    def add_leases(self, handles: Sequence[Handle], ttl_s: float) -> None:
        for handle in handles:
            self._leases.add(handle, ttl_s, time.monotonic())
        if self._renewer is None and not self.closed:
            self._renewer = asyncio.get_running_loop().create_task(self._renew_loop())
        self._changed.set()

    def drop_leases(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            self._leases.drop(handle)

    async def _renew_loop(self) -> None:
        while not self.closed:  # a cancelled renewal ends as its call, not as this task
            self._changed.clear()
            due, now = self._leases.next_due(), time.monotonic()
            if due is None or due > now:
                try:
                    await asyncio.wait_for(self._changed.wait(), None if due is None else due - now)
                except asyncio.TimeoutError:
                    pass
                continue
            handles = self._leases.take_due(now)
            patience_s = self._leases.patience(RENEW_TIMEOUT_S)
            for begin in range(0, len(handles), RENEW_ITEMS):
                await self._renew(handles[begin:begin + RENEW_ITEMS], patience_s)

    async def _renew(self, handles: list[Handle], patience_s: float) -> None:
        """One that does not arrive is tried again a period later, twice before the lease ends."""
        call = _calls.renew(handles)
        try:
            raw = await self._await(self._stubs.unary[call.name](
                call.request, timeout=patience_s, metadata=self._metadata), call.name)
        except errors.Error:
            return
        self.drop_leases(gone(handles, call.read(raw)[1]))


async def _counted(plan: _append.Plan, progress: Progress, chunks_max: int | None
                   ) -> AsyncIterator[bytes]:
    for chunk, size in itertools.islice(plan.chunks(), chunks_max):
        yield chunk
        progress.advance(size)
