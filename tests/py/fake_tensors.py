"""Tensors of packages that the tests do not install: a DLPack exporter, and as much of torch's
interface as the client uses, both over numpy arrays."""

import contextlib
import ctypes
import sys
import types

import numpy as np


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h, without its version."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
                ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLPack:
    """Exports an array under a DLPack type code (2: float, 4: bfloat)."""

    def __init__(self, array, code, device_type=1):
        strides = [stride // array.itemsize for stride in array.strides]
        self._array = array
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*strides)
        self._managed = _Managed(
            data=array.ctypes.data, device_type=device_type, ndim=array.ndim, code=code,
            bits=array.itemsize * 8, lanes=1, shape=ctypes.addressof(self._shape),
            strides=ctypes.addressof(self._strides))

    def forget_strides(self):
        """Of a row-major tensor they may be left out."""
        self._managed.strides = None

    def __dlpack_device__(self):
        return self._managed.device_type, 0

    def __dlpack__(self):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p,
                                                       ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)


class _Tensor:
    """A torch tensor as far as the client looks; bf16 is kept as int16, which numpy has."""

    def __init__(self, array, dtype):
        self._array, self.dtype = array, dtype
        self.device = types.SimpleNamespace(type="cpu")

    def detach(self):
        return self

    def to(self, device):
        assert device.type == "cpu"
        return self

    def view(self, dtype):
        return _Tensor(self._array, dtype)

    def numpy(self):
        if self.dtype == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")  # as torch says
        return self._array

    @property
    def shape(self):
        return self._array.shape


def _from_numpy(array):
    if not array.flags.writeable:
        raise AssertionError("torch warns of an array that is not writable")
    return _Tensor(array, array.dtype.name)


@contextlib.contextmanager
def torch():
    """Stands in for an imported torch."""
    module = types.ModuleType("torch")
    module.Tensor, module.from_numpy = _Tensor, _from_numpy
    module.bfloat16, module.int16 = "bfloat16", "int16"
    module.bf16 = lambda bits: _Tensor(bits.view(np.int16), "bfloat16")
    sys.modules["torch"] = module
    try:
        yield module
    finally:
        del sys.modules["torch"]
