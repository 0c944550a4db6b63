"""How a client connects and how long it tries: what the sync and the asyncio client share."""

from __future__ import annotations

import dataclasses
import random
import re
import time
from typing import Any, Literal

import grpc

from fp8kvd import _wire, errors

# A reply may be larger than any request: fp32 out is twice the bytes of q.
_REPLY_BYTES_MAX = 256 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _REPLY_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # the daemon's limit decides, with a message of its own
    ("grpc.use_local_subchannel_pool", 1),  # each client has its own connection
    ("grpc.enable_retries", 0),  # Retry below does it, by the daemon's advice
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
# grpc.aio says no more when the connection or the call ends under a write.
BROKEN_WRITE = "the stream broke while it was written to"
_THIS_MACHINE = re.compile(r"unix:.*|(ipv4:)?127(\.\d{1,3}){3}(:\d+)?|localhost(:\d+)?"
                           r"|(ipv6:)?\[::1\](:\d+)?")


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM texts. Without root_certificates those of the system; the other two for mutual TLS."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key,
                                            self.certificate_chain)


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a client; all times in seconds."""

    target: str  # host:port, or any name that gRPC resolves ("unix:/run/fp8kvd.sock")
    tls: Tls | None = None
    token: str | None = None
    timeout_s: float = 30.0  # of one call, its retries and waits included
    append_timeout_s: float = 600.0  # the same of one append, which may carry gigabytes
    # How often a call is tried again after UNAVAILABLE, or RESOURCE_EXHAUSTED with a delay. An
    # append counts anew whenever the daemon has committed more.
    retries_max: int = 5
    backoff_s_min: float = 0.05  # first wait when the daemon names none; doubled up to the next
    backoff_s_max: float = 2.0
    # k and v bytes of one message of an append. Larger ones cost less, smaller ones let the
    # decodes of others in sooner and lose less when a connection breaks.
    append_chunk_bytes: int = 1 << 20
    # How tensors travel: "auto" takes shared memory where the daemon is on this host and gives it
    # and gRPC elsewhere; "grpc" or "shared_memory" that alone.
    transport: Literal["auto", "grpc", "shared_memory"] = "auto"
    shared_memory_bytes: int = 32 << 20  # for requests and replies in flight; larger ones: gRPC

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target is empty: give host:port of the daemon")
        if (min(self.timeout_s, self.append_timeout_s, self.backoff_s_min) <= 0
                or self.backoff_s_max < self.backoff_s_min or self.retries_max < 0
                or min(self.append_chunk_bytes, self.shared_memory_bytes) < 1):
            raise ValueError(f"{self}: times and sizes must be positive (retries_max may be 0) and "
                             "backoff_s_min no more than backoff_s_max")
        is_here = _THIS_MACHINE.fullmatch(self.target) is not None
        if self.token is not None and self.tls is None and not is_here:
            raise ValueError(f"a token for {self.target} would travel in the clear: give tls, too")

    def channel_options(self) -> list[tuple[str, int]]:
        return list(_CHANNEL_OPTIONS)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


class Retry:
    """How often, and how long apart, one call is tried."""

    def __init__(self, options: Options, timeout_s: float) -> None:
        self._options, self._tries = options, 0
        self._deadline = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """What is left of the timeout; a little when nothing is, so that gRPC says so."""
        return max(1e-3, self._deadline - time.monotonic())

    def reset(self) -> None:
        """Progress was made: the tries count anew."""
        self._tries = 0

    def next_s(self, error: errors.Error) -> float | None:
        """How long to wait before the next try. None when there shall be none: a retry does not
        cure the error, the daemon forbade it, the tries are used up or the wait would pass the
        timeout."""
        advice = error.retry_after_s
        if not isinstance(error, errors.Unavailable) and (advice is None or not _is_full(error)):
            return None
        if (advice is not None and advice < 0) or self._tries >= self._options.retries_max:
            return None
        backoff = min(self._options.backoff_s_max,
                      self._options.backoff_s_min * 2.0 ** min(self._tries, 20))
        self._tries += 1
        delay = random.uniform(backoff / 2, backoff) if advice is None else advice
        return delay if time.monotonic() + delay < self._deadline else None


def _is_full(error: errors.Error) -> bool:
    """The daemon has no room now. A batch is tried again when nothing else is wrong with it."""
    if isinstance(error, errors.BatchError):
        return all(item.code == errors.ResourceExhausted.code for item in error.item_errors)
    return isinstance(error, errors.ResourceExhausted)


def error_of(rpc_error: grpc.RpcError, call: str, target: str) -> errors.Error:
    """The exception for what gRPC raised."""
    code = rpc_error.code().name
    details = rpc_error.details() or "no details given"
    if code == "INTERNAL" and details == "Internal error from Core":  # of grpc.aio, not the daemon
        code, details = "UNAVAILABLE", BROKEN_WRITE
    trailers: Any = rpc_error.trailing_metadata() or ()  # pairs
    if code == "UNAVAILABLE" and "connect" in details.lower():
        details = f"cannot be reached: {details}; check that fp8kvd runs there and the address"
    return errors.from_code(code, call, target, details,
                            _advice_s({key: value for key, value in trailers}))


def _advice_s(trailers: dict[str, Any]) -> float | None:
    """The delay that the daemon asks for: by gRPC's pushback, which is -1 or no number to forbid a
    retry, else by a RetryInfo in the status's details. None: neither is there.

    >>> _advice_s({"grpc-retry-pushback-ms": "20"}), _advice_s({}), _advice_s({
    ...     "grpc-status-details-bin": bytes.fromhex(
    ...         "1a330a28747970652e676f6f676c65617069732e636f6d2f676f6f676c652e7270632e5265747279"
    ...         "496e666f12070a051080e1eb17")})
    (0.02, None, 0.05)
    """
    pushback = trailers.get("grpc-retry-pushback-ms")
    if pushback is None:
        return _wire.retry_delay_s(trailers.get("grpc-status-details-bin", b""))
    try:
        return int(pushback) / 1000
    except ValueError:
        return -1.0


def make(target: str, tls: Tls | bool | None, token: str | None, options: Options | None
         ) -> Options:
    """options with what a client was given by itself."""
    given: dict[str, Any] = {"target": target}
    if tls is not None:
        given["tls"] = (Tls() if tls else None) if isinstance(tls, bool) else tls
    if token is not None:
        given["token"] = token
    return dataclasses.replace(options, **given) if options is not None else Options(**given)
