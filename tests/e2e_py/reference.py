"""The contract in numpy, double precision and loops one can read: bf16, e4m3, attention."""

import numpy as np

E4M3_MAX = 448.0


def to_bf16(x):
    """Bits of x rounded to nearest even, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_e4m3(x):
    """x to the nearest e4m3 value, ties to even, saturating: 3 bits of mantissa from 2^-6 up."""
    x = np.asarray(x, np.float64)
    magnitude = np.minimum(np.abs(x), E4M3_MAX)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-6)))
    quantum = 2.0 ** (exponent - 3)
    return np.sign(x) * np.minimum(np.rint(magnitude / quantum) * quantum, E4M3_MAX)


def quantise(rows):
    """fp8_kv of [tokens, kv_heads, head_dim] fp32: what the cache gives back, as float64."""
    rows = np.asarray(rows, np.float32)
    scale = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(E4M3_MAX)
    divisor = np.where(scale == 0, np.float32(1), scale)
    return round_e4m3((rows / divisor).astype(np.float32)) * scale.astype(np.float64)


def attend(q, k, v, positions, *, sm_scale, window=0, softcap=0.0, sinks=None):
    """q [n, q_heads, d] stands at positions [n]; k, v [tokens, kv_heads, d]. Gives out and lse."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for i, pos in enumerate(positions):
        first = max(0, pos - window + 1) if window else 0
        for head in range(q.shape[1]):
            keys, values = k[first:pos + 1, head // group], v[first:pos + 1, head // group]
            scores = keys @ q[i, head] * sm_scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            everything = scores if sinks is None else np.append(scores, sinks[head])
            top = everything.max()
            denominator = np.exp(everything - top).sum()
            out[i, head] = np.exp(scores - top) @ values / denominator
            lse[i, head] = np.log(denominator) + top
    return out, lse


def relative_l2(x, exact):
    x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
    assert x.shape == exact.shape, (x.shape, exact.shape)
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))
