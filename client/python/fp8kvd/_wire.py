"""Messages that carry tensors: their bytes are joined and sliced here, not copied into protobuf.

Fields of a message may come in any order, so the small ones are protobuf's work and the tensors
are put behind them; out of a reply the result is cut and protobuf reads the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError

from fp8kvd._tensors import Array
from fp8kvd.v1 import kv_pb2

_LENGTH_DELIMITED = 2
_STATUS_DETAILS, _RETRY_INFO_DELAY = 3, 1  # of google.rpc.Status and google.rpc.RetryInfo
_DECODE_Q, _DECODE_K, _DECODE_V = (
    kv_pb2.DecodeRequest.DESCRIPTOR.fields_by_name[name].number for name in "qkv")
_APPEND_K, _APPEND_V = (
    kv_pb2.AppendRequest.DESCRIPTOR.fields_by_name[name].number for name in "kv")
_POSITIONS = kv_pb2.DecodeRequest.DESCRIPTOR.fields_by_name["positions"].number
_OUT, _LSE = (kv_pb2.DecodeResponse.DESCRIPTOR.fields_by_name[name].number
              for name in ("out", "lse"))
_OUT_TAG = _OUT << 3 | _LENGTH_DELIMITED
_TIMINGS_TAG = (kv_pb2.DecodeResponse.DESCRIPTOR.fields_by_name["timings"].number << 3
                | _LENGTH_DELIMITED)
_REQUEST_ID_TAG = kv_pb2.DecodeResponse.DESCRIPTOR.fields_by_name["request_id"].number << 3


@functools.lru_cache(maxsize=1 << 16)
def varint(number: int) -> bytes:
    """The wire's variable-length integer.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_REQUEST_ID_HEAD = varint(
    kv_pb2.DecodeRequest.DESCRIPTOR.fields_by_name["request_id"].number << 3)


@functools.lru_cache(maxsize=1024)
def _field_head(field: int, size: int) -> bytes:
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(size)


def decode_request(head: bytes, request_id: int, positions: Sequence[int], q: Array,
                   k: Array | None, v: Array | None) -> bytes:
    """The message: head has its other fields, tensors are contiguous arrays, copied once."""
    if len(positions) == 1:
        packed = varint(int(positions[0]))
    else:
        packed = b"".join([varint(int(position)) for position in positions])
    pieces: list[bytes | memoryview] = [head, _field_head(_POSITIONS, len(packed)), packed]
    if request_id:
        pieces += (_REQUEST_ID_HEAD, varint(request_id))
    for field, x in ((_DECODE_Q, q), (_DECODE_K, k), (_DECODE_V, v)):
        if x is not None and x.nbytes:
            pieces += (_field_head(field, x.nbytes), x.data)
    return b"".join(pieces)


def append_request(small: kv_pb2.AppendRequest, k: Sequence[Array], v: Sequence[Array]) -> bytes:
    """The message with k and v, each given as the contiguous arrays of its layers."""
    pieces: list[bytes | memoryview] = [small.SerializeToString()]
    for field, parts in ((_APPEND_K, k), (_APPEND_V, v)):
        size = sum(part.nbytes for part in parts)
        if size:
            pieces += (_field_head(field, size), *(part.data for part in parts))
    return b"".join(pieces)


def field_head_bytes(size: int) -> int:
    """Of a tensor's field in a message, its tag and length."""
    return len(_field_head(1, size))


def join_reply(head: bytes, out: bytes, lse: bytes) -> bytes:
    """A DecodeResponse whose tensors came beside it."""
    pieces = [head]
    for field, part in ((_OUT, out), (_LSE, lse)):
        if part:
            pieces += (_field_head(field, len(part)), part)
    return b"".join(pieces)


class Reply:
    """A DecodeResponse: its result where it lies, and the rest, read by protobuf when asked for."""

    __slots__ = ("_begin", "_end", "_raw", "_small", "_tag", "plain")

    def __init__(self, raw: bytes, tag: int, begin: int, end: int, plain: bool) -> None:
        """tag, begin, end: where the result's field begins, the result itself, and its end."""
        self._raw, self._tag, self._begin, self._end = raw, tag, begin, end
        self._small: kv_pb2.DecodeResponse | None = None
        self.plain = plain  # no lse, no error and no failed item is in it

    @property
    def out(self) -> memoryview:
        return memoryview(self._raw)[self._begin:self._end]

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """The result as numbers: in place, read-only; copied where it lies unaligned. ValueError or
        TypeError when it is of another size."""
        array: Array = np.ndarray(shape, dtype, self._raw, self._begin)
        if array.nbytes != self._end - self._begin:
            raise ValueError(f"the reply holds {self._end - self._begin} bytes for {array.dtype} "
                             f"{list(shape)}")
        # numpy would copy what is not aligned element by element.
        return array if array.flags.aligned else np.ndarray(shape, dtype, bytearray(self.out))

    @property
    def small(self) -> kv_pb2.DecodeResponse:
        """All fields but out. protobuf's DecodeError when they are none."""
        if self._small is None:
            raw = self._raw[:self._tag] + self._raw[self._end:]
            self._small = kv_pb2.DecodeResponse.FromString(raw)
        return self._small


def decode_response(raw: bytes) -> Reply:
    """Finds the result in a reply. ValueError or protobuf's DecodeError when it is no message.

    On the path of every decode: most replies are read without protobuf, whose code would only push
    gRPC's out of the caches.
    """
    at = begin_of_tag = begin = end = 0
    plain, size = True, len(raw)
    while at < size:
        tag = raw[at]
        if tag == _TIMINGS_TAG and at + 1 < size and raw[at + 1] < 0x80:  # short, in every reply
            at += 2 + raw[at + 1]
        elif tag == _OUT_TAG:
            length, begin = _read_varint(raw, at + 1)
            begin_of_tag, end = at, begin + length
            at = end
        else:
            tag, at = _read_varint(raw, at)
            at = _field_end(raw, tag & 7, at)
            plain = plain and tag in (_TIMINGS_TAG, _REQUEST_ID_TAG)
    if at > size:
        raise ValueError("the reply is cut short")
    reply = Reply(raw, begin_of_tag, begin, end, plain)
    if not plain:
        reply.small  # noqa: B018  # so that what cannot be read is refused here
    return reply


def lse_of(reply: Reply, shape: tuple[int, ...]) -> Array:
    """[n, q_heads] float32. ValueError when it is of another size."""
    raw = reply.small.lse
    if len(raw) != 4 * math.prod(shape):
        raise ValueError(f"the reply holds {len(raw)} bytes of lse for {list(shape)}")
    return np.frombuffer(raw, np.float32).reshape(shape)


def retry_delay_s(status: bytes) -> float | None:
    """The delay of a google.rpc.RetryInfo in a google.rpc.Status, which no package that we need
    declares. None when it has none, or is no such message."""
    try:
        for number, detail in _fields(status):
            if number == _STATUS_DETAILS and isinstance(detail, bytes):
                any_message = any_pb2.Any.FromString(detail)
                if any_message.type_url.endswith("/google.rpc.RetryInfo"):
                    return _duration_s(any_message.value)
    except (ValueError, DecodeError):
        pass
    return None


def _duration_s(retry_info: bytes) -> float:
    for number, delay in _fields(retry_info):
        if number == _RETRY_INFO_DELAY and isinstance(delay, bytes):
            duration = duration_pb2.Duration.FromString(delay)
            return duration.seconds + duration.nanos / 1e9
    return 0.0


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: the bytes of those with a length, of the others
    where they end."""
    at = 0
    while at < len(raw):
        tag, begin = _read_varint(raw, at)
        at = _field_end(raw, tag & 7, begin)
        if at > len(raw):
            raise ValueError("the message is cut short")
        with_length = tag & 7 == _LENGTH_DELIMITED
        yield tag >> 3, raw[_read_varint(raw, begin)[1]:at] if with_length else at


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    if at < len(raw) and raw[at] < 0x80:
        return raw[at], at + 1
    number = shift = 0
    while at < len(raw) and shift < 64:
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise ValueError("the reply is cut short")


def _field_end(raw: bytes, wire_type: int, at: int) -> int:
    if wire_type == 0:
        end = _read_varint(raw, at)[1]
    elif wire_type == _LENGTH_DELIMITED:
        size, begin = _read_varint(raw, at)
        end = begin + size
    else:
        end = at + {1: 8, 5: 4}.get(wire_type, len(raw) + 1)
    return end
