"""Messages that carry tensors: their bytes are joined and sliced here, not copied into protobuf.

Fields of a message may come in any order, so the small ones are protobuf's work and the tensors
are put behind them; in a reply the tensors are cut out and protobuf reads the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8kvd._tensors import Array
from fp8kvd.v1 import kv_pb2

_LENGTH_DELIMITED = 2
_DECODE_Q, _DECODE_K, _DECODE_V = (
    kv_pb2.DecodeRequest.DESCRIPTOR.fields_by_name[name].number for name in "qkv")
_APPEND_K, _APPEND_V = (
    kv_pb2.AppendRequest.DESCRIPTOR.fields_by_name[name].number for name in "kv")
_OUT, _LSE = (kv_pb2.DecodeResponse.DESCRIPTOR.fields_by_name[name].number
              for name in ("out", "lse"))


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


def _field_head(field: int, size: int) -> bytes:
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(size)


def decode_request(small: kv_pb2.DecodeRequest, q: Array, k: Array | None,
                   v: Array | None) -> bytes:
    """The message with its tensors, contiguous arrays of any shape, copied once."""
    pieces: list[bytes | memoryview] = [small.SerializeToString()]
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


class Reply(NamedTuple):
    """A DecodeResponse: its tensors where they lie, and the rest without them."""

    out: memoryview
    lse: memoryview
    small: kv_pb2.DecodeResponse


def decode_response(raw: bytes) -> Reply:
    """Cuts a reply up. ValueError when it is no message."""
    view, tensors, rest, at = memoryview(raw), {_OUT: raw[:0], _LSE: raw[:0]}, bytearray(), 0
    found: dict[int, memoryview] = {field: memoryview(empty) for field, empty in tensors.items()}
    while at < len(raw):
        tag, begin = _read_varint(raw, at)
        end = _field_end(raw, tag & 7, begin)
        if tag >> 3 in found and tag & 7 == _LENGTH_DELIMITED:
            size, begin = _read_varint(raw, begin)
            found[tag >> 3] = view[begin:end]
        else:
            rest += view[at:end]
        at = end
    return Reply(found[_OUT], found[_LSE], kv_pb2.DecodeResponse.FromString(bytes(rest)))


def array_of(view: memoryview, dtype: npt.DTypeLike) -> Array:
    """The bytes as numbers: in place, read-only; copied where they lie unaligned."""
    array: Array = np.frombuffer(view, dtype)
    return array if array.flags.aligned else array.copy()


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
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
    if end > len(raw):
        raise ValueError("the reply is cut short")
    return end
