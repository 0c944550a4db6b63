"""What fp8_kv does to a layer's real attention, beside other ways to keep K and V in e4m3.

Plain numpy in double precision, no daemon: the errors are the format's own and no kernel's.

>>> import numpy as np
>>> rows = np.random.default_rng(1).standard_normal((3, 40, 2, 64)).astype(np.float32)
>>> q = np.random.default_rng(2).standard_normal((4, 6, 64)).astype(np.float32)
>>> measured = measure_accuracy(q, rows[0], rows[1], positions=[36, 37, 38, 39])
>>> 0.01 < measured.ways["row"].op < 0.06
True
>>> list(measured.ways)
['row', 'row_k_only', 'row_v_only', 'head', 'tensor', 'scale_1.0', 'transformers']
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp8kvd import _tensors
from fp8kvd._tensors import Tensor
from fp8kvd.format import E4M3_MAX, _encode, _VALUES

WAYS = ("row", "row_k_only", "row_v_only", "head", "tensor", "scale_1.0", "transformers")
_OUTLIER_ROWS = 5
_SMALLEST_NORMAL = 2.0**-6

_Doubles = npt.NDArray[np.float64]
_Bits = npt.NDArray[np.uint16]


@dataclasses.dataclass(frozen=True)
class WayError:
    """Errors of one way, relative L2 (||x - exact|| / ||exact||) over all steps and heads."""

    op: float  # of the attention output
    op_worst_row: float  # the worst (step, query head)
    k: float
    v: float
    saturated: float  # share of elements larger than 448 x scale: clipped
    subnormal: float  # share below 2^-6 x scale: kept with fewer bits, or as zero


@dataclasses.dataclass(frozen=True)
class OutlierRow:
    """A row that fp8_kv keeps worse than others."""

    token: int
    kv_head: int
    error: float
    amax: float


@dataclasses.dataclass(frozen=True)
class RowsProfile:
    """Of K or of V, under a scale for each row."""

    amax: float
    amax_over_rms: float  # of a row, median: how far its largest element stands out
    channel_amax_ratio: float  # the largest channel's amax over the median channel's
    subnormal: float
    worst: tuple[OutlierRow, ...]  # by error, worst first


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """What measure_accuracy gives."""

    ways: Mapping[str, WayError]  # by the names of WAYS
    k: RowsProfile
    v: RowsProfile
    score_spread: float  # standard deviation of the scores over the keys seen, median
    effective_keys: float  # 1 / sum p^2, the keys that a (step, head) averages, median


def measure_accuracy(q: Tensor, k: Tensor, v: Tensor, positions: Sequence[int], *,
                     sm_scale: float | None = None, window: int = 0, softcap: float = 0.0
                     ) -> Accuracy:
    """Errors of attention, of K and of V, for fp8_kv and for the alternatives to it.

    k, v: [tokens, kv_heads, head_dim], after RoPE and norms, as they enter the cache; floats are
    rounded to bf16. q: [steps, q_heads, head_dim]. positions: [steps] where each query stands; it
    sees the tokens up to there, or the latest `window` of them. sm_scale: default 1 /
    sqrt(head_dim).

    Exact is attention over the bf16 rows. The ways:
      row           ours: a scale for each (token, KV head), amax / 448; K alone; V alone
      head, tensor  static scales for each KV head, or for K and V as wholes, from the tokens before
                    the first step, clipping what comes later
      scale_1.0     no scale
      transformers  the fp8 cache layer of transformers 5.24: as tensor, and what is read back is
                    rounded to bf16

    Raises ValueError for shapes that do not fit each other.
    """
    bits = Bits.of(q, k, v, positions)
    rows = _Rows(_doubles(bits.q), _doubles(bits.k), _doubles(bits.v),
                 np.asarray(positions, np.int64), sm_scale or 1 / math.sqrt(bits.k.shape[2]),
                 window, softcap)
    exact = rows.attend(rows.k, rows.v)
    ways = {way: _measure_way(rows, exact, way) for way in WAYS}
    spread, effective = rows.scores_profile()
    return Accuracy(ways, _profile(rows, rows.k), _profile(rows, rows.v), spread, effective)


class Bits(NamedTuple):
    """The bf16 bits of what measure_accuracy was given."""

    q: _Bits
    k: _Bits
    v: _Bits

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, positions: Sequence[int]) -> Bits:
        """ValueError for shapes that do not fit each other."""
        bits = cls(_tensors.bf16_bits(q), _tensors.bf16_bits(k), _tensors.bf16_bits(v))
        qs, ks = bits.q.shape, bits.k.shape
        if len(ks) != 3 or ks != bits.v.shape or len(qs) != 3:
            raise ValueError(f"q {list(qs)}, k {list(ks)}, v {list(bits.v.shape)}: give [steps, "
                             "q_heads, head_dim] and twice [tokens, kv_heads, head_dim]")
        if qs[2] != ks[2] or qs[1] % ks[1]:
            raise ValueError(f"q {list(qs)}: q_heads must be a multiple of {ks[1]}, head_dim "
                             f"{ks[2]}")
        places, last = np.asarray(positions), ks[0] - 1
        if places.shape != qs[:1] or not qs[0] or places.min() < 0 or places.max() > last:
            raise ValueError(f"positions must be {qs[0]} numbers from 0 to {last}")
        return bits


@dataclasses.dataclass(frozen=True)
class _Rows:
    q: _Doubles
    k: _Doubles
    v: _Doubles
    positions: npt.NDArray[np.int64]
    sm_scale: float
    window: int
    softcap: float

    def _scores(self, k: _Doubles, step: int) -> tuple[int, int, _Doubles]:
        """[kv_heads, group, keys], and the keys' range."""
        end = int(self.positions[step]) + 1
        begin = max(0, end - self.window) if self.window else 0
        grouped = self.q[step].reshape(k.shape[1], -1, k.shape[2])
        scores = grouped @ k[begin:end].transpose(1, 2, 0) * self.sm_scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        return begin, end, scores

    def attend(self, k: _Doubles, v: _Doubles) -> _Doubles:
        """[steps, q_heads, head_dim]"""
        out = np.empty_like(self.q)
        for step in range(len(self.q)):
            begin, end, scores = self._scores(k, step)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[step] = (weights @ v[begin:end].transpose(1, 0, 2)).reshape(out[step].shape)
        return out

    def scores_profile(self) -> tuple[float, float]:
        spreads, effective = [], []
        for step in range(len(self.q)):
            _, _, scores = self._scores(self.k, step)
            spreads.append(scores.std(-1).ravel())
            p = np.exp(scores - scores.max(-1, keepdims=True))
            effective.append((p.sum(-1)**2 / (p * p).sum(-1)).ravel())
        return _median(np.concatenate(spreads)), _median(np.concatenate(effective))


def _doubles(bits: _Bits) -> _Doubles:
    return _tensors.bf16_values(bits).astype(np.float64)


def _bf16(x: Tensor) -> _Doubles:
    return _doubles(_tensors.bf16_bits(x))


def _median(values: _Doubles) -> float:
    """Of an even number the upper one of the two in the middle."""
    return float(np.partition(values, len(values) // 2)[len(values) // 2]) if len(values) else 0.0


def _relative(x: _Doubles, exact: _Doubles, axis: int | None = None) -> _Doubles:
    error = np.sqrt(((x - exact)**2).sum(axis))
    norm = np.sqrt((exact**2).sum(axis))
    return np.asarray(np.divide(error, norm, out=np.zeros_like(error), where=norm > 0), np.float64)


def _scales(rows: _Rows, exact: _Doubles, way: str) -> npt.NDArray[np.float32]:
    """[tokens, kv_heads]"""
    by_row = np.abs(exact).max(-1).astype(np.float32)
    known = by_row[:int(rows.positions[0])]
    if way == "scale_1.0":
        return np.ones_like(by_row)
    if way == "head":
        by_row = np.broadcast_to(known.max(0, initial=0), by_row.shape)
    elif way in ("tensor", "transformers"):
        by_row = np.full_like(by_row, known.max(initial=0))
    return np.asarray(by_row / np.float32(E4M3_MAX), np.float32)


def _stored(rows: _Rows, exact: _Doubles, way: str) -> tuple[_Doubles, int, int]:
    """What is read back, and how many elements were clipped, and fell below the normal codes."""
    scales = _scales(rows, exact, way)[..., None]
    known = np.broadcast_to(scales != 0, exact.shape)
    scaled = np.divide(exact.astype(np.float32), scales, where=known,
                       out=np.zeros(exact.shape, np.float32))
    size = np.abs(scaled)
    saturated = int((size > E4M3_MAX).sum())
    subnormal = int(((size < _SMALLEST_NORMAL) & known).sum())
    values = _VALUES[_encode(np.clip(scaled, -E4M3_MAX, E4M3_MAX))]
    if way == "transformers":
        return _bf16(values * scales), saturated, subnormal
    return values.astype(np.float64) * scales, saturated, subnormal


def _measure_way(rows: _Rows, exact_out: _Doubles, way: str) -> WayError:
    k, k_saturated, k_subnormal = _stored(rows, rows.k, way)
    v, v_saturated, v_subnormal = _stored(rows, rows.v, way)
    k, v = (rows.k if way == "row_v_only" else k), (rows.v if way == "row_k_only" else v)
    out = rows.attend(k, v)
    elements = rows.k.size + rows.v.size
    return WayError(float(_relative(out, exact_out)), float(_relative(out, exact_out, -1).max()),
                    float(_relative(k, rows.k)), float(_relative(v, rows.v)),
                    (k_saturated + v_saturated) / elements, (k_subnormal + v_subnormal) / elements)


def _profile(rows: _Rows, exact: _Doubles) -> RowsProfile:
    stored, _, subnormal = _stored(rows, exact, "row")
    errors, amax = _relative(stored, exact, -1), np.abs(exact).max(-1)
    rms = np.sqrt((exact**2).mean(-1))
    channels = np.abs(exact).max(0).ravel()
    median = _median(channels)
    order = np.argsort(-errors.ravel(), kind="stable")[:_OUTLIER_ROWS]
    heads = exact.shape[1]
    worst = tuple(OutlierRow(int(at) // heads, int(at) % heads, float(errors.ravel()[at]),
                             float(amax.ravel()[at])) for at in order if rms.ravel()[at] > 0)
    return RowsProfile(float(amax.max()), _median((amax[rms > 0] / rms[rms > 0]).ravel()),
                       float(channels.max() / median) if median else 0.0, subnormal / exact.size,
                       worst)
