"""Tensors by DLPack, in and out; numpy's own from_dlpack and __dlpack__ know no bf16."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

_NAME = b"dltensor"  # of a capsule that nobody has taken yet
_CPU = 1
_HOST_DEVICES = (_CPU, 3, 11)  # and kDLCUDAHost, kDLROCMHost
_FLOAT, _BFLOAT = 2, 4  # DLDataTypeCode
_DTYPES = {(_BFLOAT, 16): np.uint16, (1, 16): np.uint16, (_FLOAT, 16): np.float16,
           (_FLOAT, 32): np.float32, (_FLOAT, 64): np.float64}  # by code and bits


class _DLManagedTensor(ctypes.Structure):
    """Of dlpack.h, without a version; it begins with its DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
                ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


# A capsule travels as its address: while it is destroyed nobody may count references to it.
_api = ctypes.pythonapi
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api))
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                                 ctypes.c_void_p)(("PyCapsule_New", _api))


def array_of(x: Any) -> npt.NDArray[Any]:
    """A view of x, which exports DLPack; bf16 as uint16. TypeError for what cannot be viewed."""
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"{type(x).__name__} is no tensor: give a numpy array, a torch tensor, or "
                        "anything with __dlpack__")
    device_type = x.__dlpack_device__()[0]
    if device_type not in _HOST_DEVICES:
        raise TypeError(f"{type(x).__name__} is on a device (DLPack device type "
                        f"{int(device_type)}): copy it to the host first")
    capsule = x.__dlpack__()
    tensor = _DLManagedTensor.from_address(_pointer_of(id(capsule), _NAME))
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(f"{type(x).__name__} exports DLPack type code {tensor.code} of "
                        f"{tensor.bits} bits: give bf16, float16, float32 or float64")
    shape, size = tuple(tensor.shape[:tensor.ndim]), np.dtype(dtype).itemsize
    if 0 in shape:
        return np.empty(shape, dtype)
    if tensor.strides:
        strides = [stride * size for stride in tensor.strides[:tensor.ndim]]
    else:
        strides = [size * int(np.prod(shape[axis + 1:])) for axis in range(tensor.ndim)]
    if any(stride < 0 for stride in strides):
        raise TypeError(f"{type(x).__name__} exports negative strides: make it contiguous")
    extent = size + sum((n - 1) * stride for n, stride in zip(shape, strides))
    memory = (ctypes.c_char * extent).from_address(tensor.data + tensor.byte_offset)
    memory.owner = capsule  # so that what it points to lives as long as the view
    return np.ndarray(shape, dtype, memory, 0, strides)


class Bf16Tensor:
    """A bf16 result for a package that reads DLPack; `bits` are the same as numpy's uint16.

    >>> tensor = Bf16Tensor(np.array([0x3F80, 0xC000], np.uint16))
    >>> array_of(tensor).tolist() == tensor.bits.tolist()
    True
    """

    def __init__(self, bits: npt.NDArray[np.uint16]) -> None:
        """bits: contiguous and writable."""
        self.bits, self.shape = bits, bits.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: bool | None = None) -> Any:
        """A capsule without a version, which every reader takes. Shares the memory of `bits`."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a result is exported as it is, on the CPU; copy what you read of it")
        ndim = self.bits.ndim
        shape = (ctypes.c_int64 * ndim)(*self.bits.shape)
        strides = (ctypes.c_int64 * ndim)(*(stride // 2 for stride in self.bits.strides))
        managed = _DLManagedTensor(
            self.bits.ctypes.data, _CPU, 0, ndim, _BFLOAT, 16, 1, shape, strides, 0, None,
            ctypes.cast(_deleter, ctypes.c_void_p))
        address = ctypes.addressof(managed)
        _exported[address] = (managed, self.bits)
        return _new_capsule(address, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))


_exported: dict[int, tuple[_DLManagedTensor, npt.NDArray[np.uint16]]] = {}  # until their deleter


def _free(address: int) -> None:
    """For a reader that is done, on whichever thread."""
    _exported.pop(address, None)


def _free_untaken(capsule: int) -> None:
    """For a capsule that goes: a reader has given it another name, and frees it itself."""
    if _is_named(capsule, _NAME):
        _exported.pop(_pointer_of(capsule, _NAME), None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_free)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_free_untaken)
