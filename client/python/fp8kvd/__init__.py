"""Client of fp8kvd, a daemon that keeps the KV cache and answers decode attention.

Client and Sequence talk to it from threads, fp8kvd.aio from asyncio. The functions of
fp8kvd.format show what fp8_kv does to given K and V, without a daemon.
"""

from fp8kvd.accuracy import Accuracy, measure_accuracy
from fp8kvd.client import Client, DecodeStream, Options, Sequence, Tls
from fp8kvd.errors import BatchError, Error, SequencesLost
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
from fp8kvd.types import (
    DecodeReply,
    DeviceInfo,
    Handle,
    ItemError,
    LiveLoad,
    PrecisionPlan,
    SequenceInfo,
    ServerInfo,
)

__all__ = [
    "Accuracy", "BatchError", "Client", "DecodeReply", "DecodeStream", "DeviceInfo", "Error",
    "Fp8KVCache", "Fp8KvError", "Fp8Rows", "Handle", "ItemError", "LiveLoad", "Options",
    "PrecisionPlan", "Sequence", "SequenceInfo", "SequencesLost", "ServerInfo", "Tls",
    "e4m3_values", "fp8_kv_attention", "fp8_kv_error", "kv_cache_share", "measure_accuracy",
    "quantize_fp8_kv",
]
