"""Whether tensors go through shared memory: which session there is, and when to try for one."""

from __future__ import annotations

import logging
import time

from fp8kvd import _options, _shm, errors
from fp8kvd.v1 import kv_pb2

OPEN_S = 2.0  # an attempt to open a session
_RETRY_S = 10.0  # gRPC serves so long after one that failed

_log = logging.getLogger("fp8kvd")


class Choice:
    """Of one client. Makes no call itself: who asks sends open_request() when wants_open()."""

    def __init__(self, options: _options.Options) -> None:
        self._options = options
        self._host_id = "" if options.transport == "grpc" else _shm.host_id()
        self._session: _shm.Session | None = None
        self._next_try = 0.0
        self._why = "nothing was sent yet"
        if options.transport == "grpc":
            self._why = "the options say gRPC"
        elif not self._host_id:
            self._why = "this machine has no use for it (x86-64 Linux has)"

    @property
    def state(self) -> tuple[str, str]:
        """("shared_memory", "") or ("grpc", why not)."""
        if self._session is not None and not self._session.broken:
            return "shared_memory", ""
        return "grpc", self._why

    @property
    def session(self) -> _shm.Session | None:
        return self._session

    def wants_open(self) -> bool:
        if self._session is not None and self._session.broken:
            self._session.close()
            self._session, self._next_try = None, 0.0  # the daemon may be there again
        return (self._session is None and bool(self._host_id)
                and time.monotonic() >= self._next_try)

    def open_request(self) -> bytes:
        return kv_pb2.OpenSharedMemoryRequest(host_id=self._host_id).SerializeToString()

    def opened(self, raw: bytes) -> None:
        """Takes the daemon's answer."""
        answer = kv_pb2.OpenSharedMemoryResponse.FromString(raw)
        try:
            self._session = _shm.Session(answer.unix_socket, answer.ticket,
                                         self._options.shared_memory_bytes)
        except (OSError, _shm.Broken) as raised:
            self.failed(f"{answer.unix_socket}: {raised}")

    def failed(self, why: str) -> None:
        _log.info("tensors go to %s by gRPC, not shared memory: %s", self._options.target, why)
        self._why, self._next_try = why, time.monotonic() + _RETRY_S

    def session_for(self, message: _shm.Message | None, call: str) -> _shm.Session | None:
        """None: gRPC. Raises Unavailable where gRPC is not to be used."""
        if message is None:
            return None
        session = self._session
        if session is not None and session.fits(message):
            return session
        if self._options.transport == "shared_memory":
            self._next_try = 0.0
            why = self._why if session is None else (
                f"the call takes {message.room} bytes, the session has {session.bytes_max}")
            raise errors.Unavailable(call, self._options.target,
                                     f"no shared memory, and nothing else is to be used: {why}")
        return None

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
