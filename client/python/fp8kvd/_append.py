"""Where an append stands: which chunks are left to send, also after a broken stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fp8kvd import _shm, _wire
from fp8kvd._tensors import Bits
from fp8kvd.types import Handle
from fp8kvd.v1 import kv_pb2

# Tokens of one layer before the next layer's turn: layers of a windowed group may run apart by
# their window and a slack, which is no less than this.
_TOKENS_APART_MAX = 128
_HEAD_BYTES = 1024  # of a chunk without its tensors


class Plan:
    """k and v: bf16 bits [layers_count, n, kv_heads, head_dim], read until the append ends."""

    def __init__(self, model: str, handle: Handle, layer: int, pos: int, k: Bits, v: Bits,
                 skip_to: int, chunk_bytes: int) -> None:
        self._model, self._of = model, handle
        self._handle = kv_pb2.Handle(**handle._asdict())
        self._layer, self._pos, self._skip_to = layer, pos, skip_to
        self._k, self._v = k, v
        layers, self._n = k.shape[:2]
        self._next = [pos] * layers
        self._sent = [pos] * layers  # the end of each layer's chunks that were handed over
        token_bytes = max(1, 2 * k[0, :1].nbytes)
        apart = self._n if layers == 1 else _TOKENS_APART_MAX
        self._chunk_tokens = max(1, min(apart, self._n, chunk_bytes // token_bytes))
        self._chunk_layers = max(1, chunk_bytes // (token_bytes * self._chunk_tokens))

    @property
    def kv_bytes(self) -> int:
        return self._k.nbytes + self._v.nbytes

    @property
    def handle(self) -> Handle:
        return self._of

    @property
    def layers(self) -> int:
        """Of one chunk, at most."""
        return int(min(self._chunk_layers, len(self._next)))

    @property
    def largest(self) -> _shm.Message:
        """A chunk as large as any, for the question whether shared memory holds it."""
        token_bytes = 2 * self._k[0, :1].nbytes
        size = token_bytes * min(self._chunk_tokens, self._n) * self.layers
        return _shm.Message(_shm.APPEND, bytes(_HEAD_BYTES), (0, 0, 0), self.layers, size)

    def commit(self, set_seq_len: Callable[[int, int], None]) -> None:
        """Tells the new length of each layer, by (layer, seq_len)."""
        for index in range(len(self._next)):
            set_seq_len(self._layer + index, self._pos + self._n)

    @property
    def done(self) -> bool:
        """Everything is committed, as far as update() was told."""
        return self._n > 0 and all(pos == self._pos + self._n for pos in self._next)

    def update(self, seq_lens: Sequence[int]) -> bool:
        """Takes the daemon's committed lengths [layers of the model]; True when there is more.

        A length below the first position is not ours to fill, and tokens that were never sent are
        not ours: the answer to the resent chunk says so."""
        before = list(self._next)
        for index in range(min(len(self._next), len(seq_lens) - self._layer)):
            seq_len = seq_lens[self._layer + index]
            self._next[index] = max(self._next[index], min(seq_len, self._sent[index]))
        return self._next != before

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """The messages that are left, in order, and the k and v bytes of each."""
        layers = len(self._next)
        for begin in range(self._pos, self._pos + max(1, self._n), self._chunk_tokens):
            end = min(begin + self._chunk_tokens, self._pos + self._n)
            for first in range(0, layers, self._chunk_layers):
                last = min(first + self._chunk_layers, layers)
                if all(pos <= begin for pos in self._next[first:last]):
                    yield self._chunk(first, last, begin, end)
                    continue
                for index in range(first, last):
                    if self._next[index] < end:
                        yield self._chunk(index, index + 1, max(begin, self._next[index]), end)

    def _chunk(self, first: int, last: int, begin: int, end: int) -> tuple[bytes, int]:
        self._sent[first:last] = [max(end, sent) for sent in self._sent[first:last]]
        rows = slice(begin - self._pos, end - self._pos)
        k, v = ([x[index, rows] for index in range(first, last)] for x in (self._k, self._v))
        small = kv_pb2.AppendRequest(
            model=self._model, handle=self._handle, layer=self._layer + first,
            layers_count=last - first, pos=begin, n=end - begin,
            skip_to=self._skip_to if begin == self._pos else 0)
        return _wire.append_request(small, k, v), sum(x.nbytes for x in (*k, *v))
