"""What a client says and hears, as plain values. Field names are those of kv.proto."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from fp8kvd._tensors import Tensor
from fp8kvd._wire import Reply

OutType = Literal["bf16", "fp32"]


class Handle(NamedTuple):
    """Names a sequence. Opaque: send back what create or fork gave."""

    seq_id: int
    generation: int
    incarnation: int  # of the daemon's run that made it
    home: int


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that share a page pool."""

    layers: tuple[int, ...]  # 0-based model layers
    window: int  # latest tokens that a query sees, its own included; 0: all
    softcap: float  # 0: off
    has_sinks: bool  # every decode of these layers must bring sink_logits
    precision: str  # "bf16" or "fp8_kv"
    pages_total: int
    pages_used: int
    pages_free: int
    page_bytes: int
    page_tokens: int


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """A model that the daemon is configured for."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    sm_scale: float
    groups: tuple[LayerGroup, ...]
    precision_reason: str  # why the precision is what it is, with its numbers


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the daemon takes at most."""

    message_bytes_max: int
    append_chunk_bytes_max: int
    items_max: int
    q_len_max: int
    seq_len_max: int
    seqs_max: int
    lease_ttl_ms_max: int


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """One of the devices that sequences are spread over; pages are the caller's part of all."""

    name: str  # "cuda:0"
    device_name: str
    pages_total: int
    pages_used: int
    pages_free: int


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """The daemon itself."""

    version: str
    incarnation: int
    device_kind: str  # "cpu" or "cuda"
    device_name: str
    models: tuple[ModelInfo, ...]
    limits: Limits
    draining: bool
    shm_socket: str  # of the same-host transport; empty: it is off
    host_id: str  # the boot id of the daemon's host
    devices: tuple[DeviceInfo, ...] = ()  # by Handle.home

    def model(self, name: str = "") -> ModelInfo:
        """The model of that name; without a name the only one. KeyError names those there are."""
        named = [model for model in self.models if model.name == name or not name]
        if len(named) != 1:
            raise KeyError(f"model {name!r}: the daemon has {[m.name for m in self.models]}")
        return named[0]


@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """What StatSequences and ListSequences say of a sequence."""

    handle: Handle
    model: str
    seq_lens: tuple[int, ...]  # [layers] committed tokens
    pages: int  # that its block tables name, over all layer groups
    pages_shared: int  # of those, the ones that other sequences name too
    bytes: int  # of those pages
    expected_tokens: int
    ttl_s: float
    ttl_left_s: float


@dataclasses.dataclass(frozen=True)
class LiveLoad:
    """What a model served over the daemon's latest window, and what the policy says of it."""

    seconds: float  # of the window
    steps: float  # decode requests / layers
    batch: float  # sequences in a step, on average
    tokens: float  # of each
    cache_share: float
    predicted_speedup: float  # of a step, for fp8_kv
    precision: str  # what auto would choose for this load with allow_fp8_kv
    contradicts: bool  # that is not what runs
    hint: str  # where it contradicts: what to change


@dataclasses.dataclass(frozen=True)
class PrecisionPlan:
    """Whether fp8_kv pays for a model, with every number of the decision."""

    precision: str  # "bf16" or "fp8_kv"
    reason: str  # with every number below in words
    kv_bytes: float  # of K and V that a step reads in bf16, window-limited
    other_bytes: float
    cache_share: float  # kv_bytes / (kv_bytes + other_bytes)
    r: float  # fp8_kv / bf16 time of attention
    r_source: str  # "measured" (calibrated on the daemon's device), "given" or "bytes"
    predicted_speedup: float  # of a whole step, for fp8_kv, whichever was chosen
    cache_share_min: float  # the share from which fp8_kv is chosen
    cache_bytes_bf16: float  # of batch x tokens, without page rounding
    cache_bytes_fp8_kv: float
    convertible_share: float  # as cache_share, without layers that stay bf16: what decides
    attention_speedup: float  # of attention alone, for fp8_kv
    speedup_with_calls: float | None  # of a step whose every layer costs rpc_us; None: unknown
    rpc_us: float | None
    read_bytes_per_s: float | None  # of the engine's device
    batch: int
    tokens: int
    live: LiveLoad | None  # what the model served lately; None: nothing yet, or a described model


@dataclasses.dataclass(frozen=True)
class ItemError:
    """The item of a batch that failed: its index, and the status that a call would have had."""

    index: int
    code: str  # "NOT_FOUND", …
    message: str
    retry_after_s: float  # 0: no advice


class Timings(NamedTuple):
    """Where the time of a decode went inside the daemon."""

    queue_us: int  # from being staged until the launch that served it
    kernel_us: int  # from the launch until its end was seen
    batch_items: int  # items in that launch, of all requests
    stage_us: int  # from arrival until it was read, checked and copied for the device
    reply_us: int  # from the launch's end until the reply was begun


class DecodeReply:
    """Result of a decode: tensors of the kind that q was (see Client.decode)."""

    __slots__ = ("_reply", "item_errors", "lse", "out")

    def __init__(self, out: Tensor, lse: Tensor | None, item_errors: tuple[ItemError, ...],
                 reply: Reply) -> None:
        self.out = out  # shape of q; rows of failed items are zero
        self.lse = lse  # float32, shape of q without its last axis, if asked for
        self.item_errors = item_errors
        self._reply = reply

    @property
    def timings(self) -> Timings:
        """Where the time went inside the daemon."""
        timings = self._reply.small.timings
        return Timings(timings.queue_us, timings.kernel_us, timings.batch_items,
                       timings.stage_us, timings.reply_us)
