"""The daemon's end of one session of shared memory, whose replies a test gives when it likes."""

import mmap
import os
import pathlib
import socket
import struct
import tempfile
import threading

from fp8kvd import _shm

_ENTRIES, _REQUESTS_AT, _DATA_BYTES = 8, 4096, 1 << 16
_REPLIES_AT = _REQUESTS_AT + _ENTRIES * 128
_DATA_AT = 8192
_REPLIES_TAIL = 64  # word of the head


class FakeSession:
    """`client` is a fp8kvd._shm.Session that is connected to it."""

    def __init__(self):
        fd = os.memfd_create("fake")
        size = _DATA_AT + _DATA_BYTES
        os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        self._head = memoryview(self._memory).cast("I")
        self._replies = 0
        with tempfile.TemporaryDirectory() as folder:
            path = str(pathlib.Path(folder) / "socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
                door.bind(path)
                door.listen()
                welcome = threading.Thread(target=self._welcome, args=(door, fd, size))
                welcome.start()
                self.client = _shm.Session(path, "t" * 64, _DATA_BYTES)
                welcome.join()
        os.close(fd)

    def _welcome(self, door, fd, size):
        self._socket, _ = door.accept()
        self._socket.recv(1024)
        packet = struct.pack("<IIQQQQQ", 0x4D485346, _ENTRIES, size, _REQUESTS_AT, _REPLIES_AT,
                             _DATA_AT, _DATA_BYTES)
        socket.send_fds(self._socket, [packet], [fd])

    def answer(self, tag):
        """The tag-th request has an empty reply; the client's bell rings."""
        at = _REPLIES_AT + self._replies % _ENTRIES * 64
        self._memory[at:at + 64] = struct.pack("<QI4x6Q", tag, 0, 0, 0, 0, 0, 0, 0)
        self._replies += 1
        self._head[_REPLIES_TAIL] = self._replies
        self._socket.send(b"\0")

    def close(self):
        self._socket.close()
        self.client.close()
