"""The fp8_kv format by itself: what it does to given K and V, without a daemon.

Every function takes numpy arrays, torch tensors, or what exports DLPack: bf16 (torch.bfloat16,
ml_dtypes.bfloat16, or its bits as uint16) or floats, which are used as float32. Results come back
as torch tensors where the input was one, else as numpy arrays. The codes and scales are bit for
bit those of the daemon.

>>> import numpy as np
>>> k = np.array([[1.0, -2.0, 448.0, 0.3], [0.0, 0.0, 0.0, 0.0]], np.float32)
>>> codes, scales = quantize_fp8_kv(k)
>>> scales.tolist()
[1.0, 0.0]
>>> (e4m3_values(codes) * scales[:, None]).tolist()
[[1.0, -2.0, 448.0, 0.3125], [0.0, 0.0, 0.0, 0.0]]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8kvd import _tensors
from fp8kvd._tensors import Tensor

E4M3_MAX = 448.0
_LARGEST_CODE = 0x7E  # 448; 0x7F is NaN


class Fp8Rows(NamedTuple):
    """What quantize_fp8_kv gives: row ~ value of codes x scale."""

    codes: Tensor  # uint8, shape of the input
    scales: Tensor  # float32, that shape without its last axis


@dataclasses.dataclass(frozen=True)
class Fp8KvError:
    """Relative L2 errors, ||codes x scale - row|| / ||row||: of all rows, and of the worst one."""

    k: float
    v: float
    k_worst_row: float
    v_worst_row: float


def quantize_fp8_kv(rows: Tensor) -> Fp8Rows:
    """Codes and one scale for each row, as the daemon makes them when it appends.

    rows: [..., head_dim], finite. scale = amax(|row|) / 448 in float32; code = the e4m3 nearest to
    row / scale, ties to even, saturating. A zero row has scale 0 and codes 0.

    Raises ValueError for a value that is not finite, or a row without elements.

    >>> quantize_fp8_kv(np.array([3.5, 7.0], np.float32)).codes.tolist()
    [118, 126]
    """
    codes, scales = _quantize(_tensors.float32_values(rows))
    return Fp8Rows(_tensors.like(rows, codes), _tensors.like(rows, scales))


def e4m3_values(codes: Tensor) -> Tensor:
    """What codes (uint8, any shape) are worth, exactly, as float32. NaN for 0x7F and 0xFF.

    >>> e4m3_values(np.array([0x01, 0x38, 0xFE], np.uint8)).tolist()
    [0.001953125, 1.0, -448.0]
    """
    array = codes if isinstance(codes, np.ndarray) else codes.cpu().numpy()
    return _tensors.like(codes, _VALUES[array])


class Fp8KVCache:
    """K and V of a batch of sequences of one layer, as codes and scales.

    Tokens are quantised once, when they are appended, and never again.

    >>> cache = Fp8KVCache(seqs=1, kv_heads=2, head_dim=4)
    >>> cache.append(0, np.ones((3, 2, 4), np.float32), np.ones((3, 2, 4), np.float32))
    >>> cache.seq_len(0), cache.k(0).codes.shape, cache.k(0).scales.shape
    (3, (3, 2, 4), (3, 2))
    """

    def __init__(self, seqs: int, kv_heads: int, head_dim: int) -> None:
        if min(seqs, kv_heads, head_dim) < 1:
            raise ValueError(f"Fp8KVCache of {seqs} seqs, {kv_heads} kv_heads, head_dim "
                             f"{head_dim}: each must be at least 1")
        self.seqs, self.kv_heads, self.head_dim = seqs, kv_heads, head_dim
        self._k = [_Rows(kv_heads, head_dim) for _ in range(seqs)]
        self._v = [_Rows(kv_heads, head_dim) for _ in range(seqs)]

    def append(self, seq: int, k: Tensor, v: Tensor) -> None:
        """Adds tokens behind what sequence `seq` holds. k and v: [tokens, kv_heads, head_dim].

        Raises ValueError for another shape or a value that is not finite; nothing is added then.
        """
        rows = [_tensors.float32_values(x) for x in (k, v)]
        for name, x in zip("kv", rows):
            if x.ndim != 3 or x.shape != (len(rows[0]), self.kv_heads, self.head_dim):
                raise ValueError(f"{name} is {list(x.shape)}: k and v must both be [tokens, "
                                 f"kv_heads {self.kv_heads}, head_dim {self.head_dim}]")
        quantized = [_quantize(x) for x in rows]
        self._k[seq].add(*quantized[0])
        self._v[seq].add(*quantized[1])

    def seq_len(self, seq: int) -> int:
        """Tokens that sequence `seq` holds."""
        return self._k[seq].tokens

    def k(self, seq: int) -> Fp8Rows:
        """Views: codes uint8 [tokens, kv_heads, head_dim], scales float32 [tokens, kv_heads]."""
        return self._k[seq].rows()

    def v(self, seq: int) -> Fp8Rows:
        """As k()."""
        return self._v[seq].rows()


def fp8_kv_attention(q: Tensor, cache: Fp8KVCache, seq_lens: Sequence[int] | None = None,
                     sm_scale: float | None = None) -> Tensor:
    """Attention of one query token of each sequence over the cache, in float64: the yardstick.

    q: [seqs, q_heads, head_dim]; query head h reads KV head h / (q_heads / kv_heads).
    seq_lens: [seqs] how many of its tokens each sequence sees (default: all it holds; 0: out is 0).
    sm_scale: factor of q.k before softmax (default 1 / sqrt(head_dim)).
    Returns float64 [seqs, q_heads, head_dim].

    Raises ValueError for a shape that does not fit the cache.

    >>> cache = Fp8KVCache(seqs=1, kv_heads=1, head_dim=2)
    >>> cache.append(0, np.zeros((2, 1, 2), np.float32),
    ...              np.array([[[1, 448]], [[3, 448]]], np.float32))
    >>> fp8_kv_attention(np.ones((1, 3, 2), np.float32), cache).tolist()
    [[[2.0, 448.0], [2.0, 448.0], [2.0, 448.0]]]
    """
    queries = _tensors.float32_values(q).astype(np.float64)
    if (queries.ndim != 3 or len(queries) != cache.seqs or queries.shape[2] != cache.head_dim
            or queries.shape[1] == 0 or queries.shape[1] % cache.kv_heads):
        raise ValueError(f"q is {list(queries.shape)}: it must be [seqs {cache.seqs}, q_heads (a "
                         f"multiple of {cache.kv_heads}), head_dim {cache.head_dim}]")
    held = [cache.seq_len(seq) for seq in range(cache.seqs)]
    seen = held if seq_lens is None else [int(seq_len) for seq_len in seq_lens]
    if len(seen) != cache.seqs or any(not 0 <= s <= h for s, h in zip(seen, held)):
        raise ValueError(f"seq_lens is {seen}: give each of the {cache.seqs} sequences 0 ... what "
                         f"it holds, {held}")
    factor = 1 / math.sqrt(cache.head_dim) if sm_scale is None else sm_scale
    out = np.zeros_like(queries)
    for seq, tokens in enumerate(seen):
        if tokens:
            out[seq] = _attend(queries[seq], _dequantized(cache.k(seq), tokens),
                               _dequantized(cache.v(seq), tokens), factor)
    return _tensors.like(q, out)


def fp8_kv_error(k: Tensor, v: Tensor) -> Fp8KvError:
    """What the format costs on given K and V [..., head_dim] (one row per token and KV head).

    >>> fp8_kv_error(np.array([[1.0, 448.0]], np.float32), np.array([[0.3, 448.0]], np.float32)).k
    0.0
    """
    k_error, k_worst_row = _error_of(_tensors.float32_values(k))
    v_error, v_worst_row = _error_of(_tensors.float32_values(v))
    return Fp8KvError(k_error, v_error, k_worst_row, v_worst_row)


def kv_cache_share(batch: int, tokens: int, layers: int, kv_heads: int, head_dim: int,
                   other_bytes: float) -> float:
    """The share of a decode step's bytes that K and V are in bf16, 0 ... 1.

    kv_bytes = batch * tokens * layers * 2 * kv_heads * head_dim * 2; share = kv_bytes / (kv_bytes +
    other_bytes), other_bytes being the weights and activations that the step streams. A negative
    argument counts as 0; with no bytes at all the share is 0.

    >>> kv_cache_share(batch=64, tokens=8192, layers=32, kv_heads=8, head_dim=128,
    ...                other_bytes=64 * 2**30)
    0.5
    """
    sizes = (max(0, size) for size in (batch, tokens, layers, kv_heads, head_dim))
    kv_bytes = 4.0 * math.prod(sizes)
    all_bytes = kv_bytes + max(0.0, float(other_bytes))
    return kv_bytes / all_bytes if all_bytes > 0 else 0.0


class _Rows:
    """Codes and scales that grow by doubling."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        self.tokens = 0
        self._codes = np.empty((0, kv_heads, head_dim), np.uint8)
        self._scales = np.empty((0, kv_heads), np.float32)

    def add(self, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> None:
        end = self.tokens + len(codes)
        if end > len(self._codes):
            room = max(end, 2 * len(self._codes))
            self._codes = _grown(self._codes, self.tokens, room)
            self._scales = _grown(self._scales, self.tokens, room)
        self._codes[self.tokens:end], self._scales[self.tokens:end] = codes, scales
        self.tokens = end

    def rows(self) -> Fp8Rows:
        return Fp8Rows(self._codes[:self.tokens], self._scales[:self.tokens])


def _grown(old: _tensors.Array, tokens: int, room: int) -> _tensors.Array:
    new = np.empty((room, *old.shape[1:]), old.dtype)
    new[:tokens] = old[:tokens]
    return new


def _quantize(rows: _tensors.Floats) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise ValueError(f"rows are {list(rows.shape)}: give [..., head_dim]")
    scales = np.max(np.abs(rows), axis=-1) / np.float32(E4M3_MAX)
    if not np.isfinite(scales).all():
        raise ValueError("a row holds a value that is not finite; fp8_kv stores finite K and V")
    divisor = np.where(scales == 0, np.float32(np.inf), scales)[..., None]
    return _encode(rows / divisor), np.asarray(scales, np.float32)


def _encode(values: _tensors.Floats) -> npt.NDArray[np.uint8]:
    """The nearest code, ties to even, saturating; values are finite."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # One unit in the last place of [2^14, 2^15) is 2^-9, a subnormal code's step: the sum rounds.
    shift = np.float32(2.0**14)
    subnormal = (np.abs(values) + shift).view(np.uint32) - shift.view(np.uint32)
    rounded = magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - np.uint32(120 << 3)
    code = np.where(np.abs(values) < np.float32(2.0**-6), subnormal, normal)
    sign = (bits >> 24) & np.uint32(0x80)
    return np.asarray(sign | np.minimum(code, np.uint32(_LARGEST_CODE)), np.uint8)


def _make_values() -> npt.NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


_VALUES = _make_values()


def _dequantized(rows: Fp8Rows, tokens: int) -> npt.NDArray[np.float64]:
    scales = rows.scales[:tokens, :, None].astype(np.float64)
    return np.asarray(_VALUES[rows.codes[:tokens]] * scales, np.float64)


def _attend(q: npt.NDArray[np.float64], k: npt.NDArray[np.float64], v: npt.NDArray[np.float64],
            sm_scale: float) -> npt.NDArray[np.float64]:
    """q [q_heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
    grouped = q.reshape(k.shape[1], -1, q.shape[1])  # [kv_heads, group, head_dim]
    scores = grouped @ k.transpose(1, 2, 0) * sm_scale  # [kv_heads, group, tokens]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights @ v.transpose(1, 0, 2), np.float64).reshape(q.shape)


def _error_of(rows: _tensors.Floats) -> tuple[float, float]:
    """Relative L2 of all rows, and of the worst one; a zero row has no error."""
    codes, scales = _quantize(rows)
    exact = rows.astype(np.float64).reshape(-1, rows.shape[-1])
    stored = (_VALUES[codes] * scales[..., None].astype(np.float64)).reshape(exact.shape)
    error = ((stored - exact) ** 2).sum(axis=-1)
    norm = (exact**2).sum(axis=-1)
    known = norm > 0
    if not known.any():
        return 0.0, 0.0
    worst = np.sqrt(error[known] / norm[known]).max()
    return float(math.sqrt(error.sum() / norm.sum())), float(worst)
