"""Tensors of numpy, torch or DLPack as bf16 bits or fp32 values, and back; copies only at need.

torch and ml_dtypes are never imported here unless the caller's own tensors came from them.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fp8kvd import _dlpack

# Anything of numpy, torch or with __dlpack__; the latter two have no types without their packages.
Tensor: TypeAlias = Any
Bits: TypeAlias = npt.NDArray[np.uint16]
Floats: TypeAlias = npt.NDArray[np.float32]
Array: TypeAlias = npt.NDArray[Any]

_UINT16, _INT16 = np.dtype(np.uint16), np.dtype(np.int16)
_FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


def _torch_of(x: Tensor) -> Any:
    """The torch module if x is one of its tensors, else None."""
    if isinstance(x, np.ndarray):
        return None
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


_holding_bf16: dict[int, bool] = {_UINT16.num: True, **{dtype.num: False for dtype in _FLOATS}}


def _holds_bf16(dtype: np.dtype[Any]) -> bool:
    """False for floats; TypeError for what is neither. By number: numpy takes its time to compare
    types, and this is on the path of every decode."""
    holds = _holding_bf16.get(dtype.num)
    if holds is None or not dtype.isnative:
        if dtype.name != "bfloat16":
            raise TypeError(f"an array of {dtype}: give bf16 (ml_dtypes.bfloat16, or its bits as "
                            "uint16), float16, float32 or float64")
        holds = _holding_bf16[dtype.num] = True
    return holds


def shape_of(x: Tensor) -> tuple[int, ...]:
    """DLPack by itself promises no shape attribute."""
    return tuple(x.shape) if hasattr(x, "shape") else to_numpy(x).shape


def to_numpy(x: Tensor) -> Array:
    """x as a numpy array of its floats, or of uint16 where it is bf16. No copy on the CPU."""
    torch = _torch_of(x)
    if torch is not None:
        x = x.detach()
        if x.device.type != "cpu":
            x = x.cpu()  # the one copy that a remote call cannot spare
        if x.dtype == torch.bfloat16:
            return np.asarray(x.view(torch.int16).numpy()).view(np.uint16)
        x = np.asarray(x.numpy())
    elif not isinstance(x, np.ndarray):
        x = _dlpack.array_of(x)
    array: Array = x
    return array.view(np.uint16) if _holds_bf16(array.dtype) else array


class Rows(NamedTuple):
    """A tensor as it travels, and what of it the result must be like."""

    bits: Bits  # contiguous
    shape: tuple[int, ...]
    bf16: bool  # and not floats that were rounded


def rows_of(x: Tensor) -> Rows:
    """bf16 is not converted; floats are rounded to nearest even."""
    if type(x) is np.ndarray and _holding_bf16.get(x.dtype.num) and x.flags.carray:
        return Rows(x.view(np.uint16), x.shape, True)  # the short way, for every decode's sake
    array = to_numpy(x)
    bf16 = array.dtype.num == _UINT16.num
    bits = array if bf16 else round_to_bf16(np.asarray(array, np.float32))
    return Rows(bits if bits.flags.c_contiguous else np.ascontiguousarray(bits), array.shape, bf16)


def bf16_bits(x: Tensor) -> Bits:
    """x as contiguous bf16 bits; as in rows_of."""
    return rows_of(x).bits


def float32_values(x: Tensor) -> Floats:
    """x as fp32 values; exact for bf16 and float16."""
    array = to_numpy(x)
    return bf16_values(array) if array.dtype == _UINT16 else np.asarray(array, np.float32)


def bf16_values(bits: Bits) -> Floats:
    """What bf16 bits are worth, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: Floats) -> Bits:
    """Bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    nan = (bits >> 16) | 0x40
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).astype(np.uint16)


def like(x: Tensor, array: Array) -> Tensor:
    """array in the form of x: a torch tensor on x's device, else array itself.

    torch and older readers of DLPack have no read-only tensors, so it is copied for them then.
    """
    if isinstance(x, np.ndarray):
        return array
    array = array if array.flags.writeable else array.copy()
    torch = _torch_of(x)
    return array if torch is None else torch.from_numpy(array).to(x.device)


def bf16_dtype_like(x: Tensor) -> np.dtype[Any]:
    """What bf16_like wants its bits as: of numpy x's own bf16, for torch int16."""
    if isinstance(x, np.ndarray):
        return x.dtype if _holds_bf16(x.dtype) else _UINT16
    return _UINT16 if _torch_of(x) is None else _INT16


def bf16_like(x: Tensor, bits: Array) -> Tensor:
    """bf16 in the form of x: torch.bfloat16, a numpy array as by bf16_dtype_like, or for what came
    by DLPack a Bf16Tensor, which goes back by it."""
    if isinstance(x, np.ndarray):
        return bits
    torch, array = _torch_of(x), like(x, bits)
    return _dlpack.Bf16Tensor(array) if torch is None else array.view(torch.bfloat16)
