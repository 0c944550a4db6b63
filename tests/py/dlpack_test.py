"""Tensors by DLPack: what is taken, what is refused, and who frees what is given."""

import ctypes
import gc
import unittest

import numpy as np

from package import ROOT  # noqa: F401  # installs fp8kvd

import fake_tensors
from fp8kvd import _dlpack

BITS = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)


class Taken(unittest.TestCase):
    def test_is_a_view_with_its_strides(self):
        for array in (BITS, BITS[:, ::2], BITS.transpose(2, 0, 1), BITS[:, :0]):
            got = _dlpack.array_of(fake_tensors.DLPack(array, 4))
            np.testing.assert_array_equal(got, array)
            self.assertTrue(array.size == 0 or np.shares_memory(got, array))

    def test_without_strides_is_row_major(self):
        packed = fake_tensors.DLPack(BITS, 4)
        packed.forget_strides()
        np.testing.assert_array_equal(_dlpack.array_of(packed), BITS)

    def test_of_a_device_of_other_types_and_backwards_is_refused(self):
        for words, tensor in (("copy it to the host", fake_tensors.DLPack(BITS, 4, device_type=2)),
                              ("code 0 of 16 bits", fake_tensors.DLPack(BITS, 0)),
                              ("negative strides", fake_tensors.DLPack(BITS[::-1], 4)),
                              ("int is no tensor", 3)):
            with self.assertRaisesRegex(TypeError, words):
                _dlpack.array_of(tensor)


class Given(unittest.TestCase):
    def setUp(self):
        gc.collect()
        self.assertEqual(_dlpack._exported, {})
        self.tensor = _dlpack.Bf16Tensor(BITS.copy())

    def test_is_the_same_memory(self):
        got = _dlpack.array_of(self.tensor)
        self.assertTrue(np.shares_memory(got, self.tensor.bits))
        del got
        self.assertEqual(_dlpack._exported, {})

    def test_and_not_taken_is_freed_with_its_capsule(self):
        capsule = self.tensor.__dlpack__()
        self.assertEqual(len(_dlpack._exported), 1)
        del capsule
        self.assertEqual(_dlpack._exported, {})

    def test_and_taken_lives_until_its_reader_frees_it(self):
        """As a reader does: renames the capsule, and calls the deleter when it is done."""
        capsule = self.tensor.__dlpack__()
        address = _dlpack._pointer_of(id(capsule), b"dltensor")
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        used = b"used_dltensor"
        rename(capsule, used)
        bits, self.tensor = self.tensor.bits, None
        del capsule
        managed = _dlpack._DLManagedTensor.from_address(address)
        self.assertEqual((managed.data, managed.code, managed.bits, managed.ndim),
                         (bits.ctypes.data, 4, 16, 3))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address)
        self.assertEqual(_dlpack._exported, {})

    def test_elsewhere_or_as_a_copy_is_refused(self):
        for asked in ({"copy": True}, {"dl_device": (2, 0)}):
            with self.assertRaises(BufferError):
                self.tensor.__dlpack__(**asked)


if __name__ == "__main__":
    unittest.main()
