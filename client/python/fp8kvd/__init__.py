"""Client of fp8kvd, a daemon that keeps the KV cache and answers decode attention."""

from fp8kvd.format import (
    Fp8KVCache,
    Fp8KvError,
    Fp8Rows,
    e4m3_values,
    fp8_kv_attention,
    fp8_kv_error,
    kv_cache_share,
    quantize_fp8_kv,
)
__all__ = [
    "Fp8KVCache", "Fp8KvError", "Fp8Rows", "e4m3_values", "fp8_kv_attention", "fp8_kv_error",
    "kv_cache_share", "quantize_fp8_kv",
]
