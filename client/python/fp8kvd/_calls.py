"""Every unary call as a value: what to send and how to read the answer. Sends nothing itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from fp8kvd import _shm, _tensors, _wire, accuracy, errors
from fp8kvd._tensors import Rows, Tensor
from fp8kvd.format import Fp8KvError
from fp8kvd.types import (DecodeReply, DeviceInfo, Handle, ItemError, LayerGroup, Limits, LiveLoad,
                          ModelInfo, OutType, PrecisionPlan, SequenceInfo, ServerInfo)
from fp8kvd.v1 import kv_pb2

_SERVICE = "/fp8kvd.v1.DecodeAttention/"
_UNARY = ("GetServerInfo", "CreateSequences", "Decode", "ForkSequences", "TruncateSequences",
          "FreeSequences", "RenewSequences", "StatSequences", "ListSequences", "PlanPrecision",
          "MeasureKvError", "OpenSharedMemory")
_LIST_PAGE_SIZE = 256
_PRECISIONS = {kv_pb2.PRECISION_BF16: "bf16", kv_pb2.PRECISION_FP8_KV: "fp8_kv"}
# google.rpc.Code
_CODES = ("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
          "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
          "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
          "UNAUTHENTICATED")

T = TypeVar("T")
Made = TypeVar("Made")


@dataclasses.dataclass(slots=True)
class Call(Generic[T]):
    """name: of the rpc. read: from the reply's bytes to the result and its failed items."""

    name: str
    request: bytes
    read: Callable[[bytes], tuple[T, Sequence[ItemError]]]
    handles: Sequence[Handle] = ()
    shared: _shm.Message | None = None  # the request, where it may go through shared memory

    def failure(self, target: str, result: T, item_errors: Sequence[ItemError]
                ) -> errors.Error:
        """What failed items come to: of a single item its own error, of a batch a BatchError."""
        if len(self.handles) == 1:
            item = item_errors[0]
            return errors.from_code(item.code, self.name, target, item.message,
                                    item.retry_after_s or None)
        reply = result if isinstance(result, DecodeReply) else None
        return errors.BatchError(self.name, target, len(self.handles), item_errors, reply)

    def lost(self, error: errors.Error) -> list[Handle]:
        """The handles that the error says the daemon does not know."""
        if isinstance(error, errors.BatchError):
            return [self.handles[item.index] for item in error.item_errors
                    if item.code == errors.NotFound.code and item.index < len(self.handles)]
        return list(self.handles) if isinstance(error, errors.NotFound) else []

    def explained(self, error: errors.Error, server_info: bytes) -> errors.Error:
        """SequencesLost instead of NotFound when the handles are of an earlier run than the one
        that gives this reply to GetServerInfo."""
        incarnation = kv_pb2.GetServerInfoResponse.FromString(server_info).incarnation
        lost = [handle for handle in self.lost(error) if handle.incarnation != incarnation]
        return errors.SequencesLost(self.name, error.target, lost, incarnation) if lost else error

    def read_reply(self, raw: bytes, target: str) -> tuple[T, Sequence[ItemError]]:
        """read(), with what it raises as an Internal error of the daemon."""
        try:
            return self.read(raw)
        except UNREADABLE as raised:
            raise unreadable(self.name, target, raised) from None


class Stubs:
    """The daemon's calls on a channel, sync or asyncio; requests and replies are bytes."""

    def __init__(self, channel: Any) -> None:
        self.unary: dict[str, Callable[..., Any]] = {
            name: channel.unary_unary(_SERVICE + name) for name in _UNARY}
        self.append: Callable[..., Any] = channel.stream_unary(_SERVICE + "Append")
        self.decode_stream: Callable[..., Any] = channel.stream_stream(_SERVICE + "DecodeStream")


def server_info() -> Call[ServerInfo]:
    def read(raw: bytes) -> tuple[ServerInfo, Sequence[ItemError]]:
        reply = kv_pb2.GetServerInfoResponse.FromString(raw)
        limits = {field.name: getattr(reply.limits, field.name)
                  for field in dataclasses.fields(Limits)}
        devices = tuple(DeviceInfo(device.name, device.device_name, device.pages_total,
                                   device.pages_used, device.pages_free)
                        for device in reply.devices)
        return ServerInfo(reply.version, reply.incarnation, reply.device_kind, reply.device_name,
                          tuple(_model(model) for model in reply.models), Limits(**limits),
                          reply.draining, reply.shm_socket, reply.host_id, devices), ()

    return Call("GetServerInfo", b"", read)


def create(model: str, count: int, expected_tokens: int, ttl_s: float
           ) -> Call[tuple[list[Handle], float]]:
    """Result: handles, and the lease that they have in seconds."""
    def read(raw: bytes) -> tuple[tuple[list[Handle], float], Sequence[ItemError]]:
        reply = kv_pb2.CreateSequencesResponse.FromString(raw)
        return ([_handle(handle) for handle in reply.handles], reply.ttl_ms / 1000), ()

    request = kv_pb2.CreateSequencesRequest(
        model=model, count=count, expected_tokens=expected_tokens, ttl_ms=_milliseconds(ttl_s))
    return Call("CreateSequences", request.SerializeToString(), read)


def fork(parent: Handle, count: int, expected_tokens: int, ttl_s: float) -> Call[list[Handle]]:
    def read(raw: bytes) -> tuple[list[Handle], Sequence[ItemError]]:
        reply = kv_pb2.ForkSequencesResponse.FromString(raw)
        return [_handle(handle) for handle in reply.handles], ()

    request = kv_pb2.ForkSequencesRequest(
        parent=_to_pb(parent), count=count, expected_tokens=expected_tokens,
        ttl_ms=_milliseconds(ttl_s))
    return Call("ForkSequences", request.SerializeToString(), read, [parent])


def truncate(handles: Sequence[Handle], seq_lens: Sequence[int]) -> Call[None]:
    request = kv_pb2.TruncateSequencesRequest(handles=map(_to_pb, handles), seq_lens=seq_lens)
    return _naming("TruncateSequences", request, kv_pb2.TruncateSequencesResponse, handles)


def free(handles: Sequence[Handle]) -> Call[None]:
    request = kv_pb2.FreeSequencesRequest(handles=map(_to_pb, handles))
    return _naming("FreeSequences", request, kv_pb2.FreeSequencesResponse, handles)


def renew(handles: Sequence[Handle]) -> Call[None]:
    request = kv_pb2.RenewSequencesRequest(handles=map(_to_pb, handles))
    return _naming("RenewSequences", request, kv_pb2.RenewSequencesResponse, handles)


def stat(handles: Sequence[Handle]) -> Call[list[SequenceInfo]]:
    def read(raw: bytes) -> tuple[list[SequenceInfo], Sequence[ItemError]]:
        reply = kv_pb2.StatSequencesResponse.FromString(raw)
        return [_sequence(info) for info in reply.sequences], _item_errors(reply.item_errors)

    request = kv_pb2.StatSequencesRequest(handles=map(_to_pb, handles))
    return Call("StatSequences", request.SerializeToString(), read, handles)


def list_page(model: str, page_token: str) -> Call[tuple[list[SequenceInfo], str]]:
    """Result: the sequences, and the token of the next page, empty after the last."""
    def read(raw: bytes) -> tuple[tuple[list[SequenceInfo], str], Sequence[ItemError]]:
        reply = kv_pb2.ListSequencesResponse.FromString(raw)
        return ([_sequence(info) for info in reply.sequences], reply.next_page_token), ()

    request = kv_pb2.ListSequencesRequest(model=model, page_size=_LIST_PAGE_SIZE,
                                          page_token=page_token)
    return Call("ListSequences", request.SerializeToString(), read)


def _plain(made: type[Made], reply: Any, **others: Any) -> Made:
    """The dataclass of a message's fields; an optional one that is absent is None."""
    presence = {field.name for field in reply.DESCRIPTOR.fields if field.has_presence}
    values = {}
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        absent = field.name in presence and not reply.HasField(field.name)
        values[field.name] = None if absent else getattr(reply, field.name)
    return made(**{**values, "precision": _precision(reply.precision), **others})


def _filled(made: type[Made], message: Any, **others: Any) -> Made:
    """The dataclass of a message that has no optional fields."""
    names = [field.name for field in dataclasses.fields(made)]  # type: ignore[arg-type]
    return made(**{**{name: getattr(message, name) for name in names}, **others})


def _live(reply: kv_pb2.PlanPrecisionResponse) -> LiveLoad | None:
    return _plain(LiveLoad, reply.live) if reply.HasField("live") else None


def plan_precision(model: str, hf_config_json: str | None, batch: int, tokens: int,
                   other_bytes: int, allow_fp8_kv: bool | None) -> Call[PrecisionPlan]:
    def read(raw: bytes) -> tuple[PrecisionPlan, Sequence[ItemError]]:
        reply = kv_pb2.PlanPrecisionResponse.FromString(raw)
        return _plain(PrecisionPlan, reply, live=_live(reply)), ()

    request = kv_pb2.PlanPrecisionRequest(batch=batch, tokens=tokens, other_bytes=other_bytes)
    if allow_fp8_kv is not None:
        request.allow_fp8_kv = allow_fp8_kv
    if hf_config_json is None:
        request.model = model
    else:
        request.hf_config_json = hf_config_json
    return Call("PlanPrecision", request.SerializeToString(), read)


def measure_kv_error(k: Tensor, v: Tensor) -> Call[Fp8KvError]:
    def read(raw: bytes) -> tuple[Fp8KvError, Sequence[ItemError]]:
        reply = kv_pb2.MeasureKvErrorResponse.FromString(raw)
        return Fp8KvError(reply.k_error, reply.v_error, reply.k_error_worst_row,
                          reply.v_error_worst_row), ()

    bits = [_tensors.bf16_bits(x) for x in (k, v)]
    if bits[0].ndim != 3 or bits[0].shape != bits[1].shape:
        raise ValueError(f"k is {list(bits[0].shape)}, v {list(bits[1].shape)}: both must be "
                         "[tokens, kv_heads, head_dim]")
    request = kv_pb2.MeasureKvErrorRequest(
        kv_heads=bits[0].shape[1], head_dim=bits[0].shape[2], k=bits[0].tobytes(),
        v=bits[1].tobytes())
    return Call("MeasureKvError", request.SerializeToString(), read)


def measure_accuracy(q: Tensor, k: Tensor, v: Tensor, positions: Sequence[int],
                     sm_scale: float | None, window: int, softcap: float
                     ) -> Call[accuracy.Accuracy]:
    def read(raw: bytes) -> tuple[accuracy.Accuracy, Sequence[ItemError]]:
        reply = kv_pb2.MeasureKvErrorResponse.FromString(raw)
        if not reply.HasField("accuracy"):
            raise ValueError("it took no queries")
        got = reply.accuracy
        ways = {way.way: _filled(accuracy.WayError, way) for way in got.ways}
        return accuracy.Accuracy(ways, profile(got.k), profile(got.v), got.score_spread,
                                 got.effective_keys), ()

    def profile(rows: kv_pb2.RowsProfile) -> accuracy.RowsProfile:
        worst = tuple(_filled(accuracy.OutlierRow, row) for row in rows.worst)
        return _filled(accuracy.RowsProfile, rows, worst=worst)

    bits = accuracy.Bits.of(q, k, v, positions)
    queries = kv_pb2.AttentionQueries(
        q_heads=bits.q.shape[1], q=bits.q.tobytes(), positions=map(int, positions),
        sm_scale=sm_scale, window=window, softcap=softcap)
    request = kv_pb2.MeasureKvErrorRequest(
        kv_heads=bits.k.shape[1], head_dim=bits.k.shape[2], k=bits.k.tobytes(),
        v=bits.v.tobytes(), queries=queries)
    return Call("MeasureKvError", request.SerializeToString(), read)


@dataclasses.dataclass(slots=True)
class DecodeArgs:
    """One layer of one step for a batch; Client.decode says what each is."""

    layer: int
    handles: Sequence[Handle]
    positions: Sequence[int]
    q: Tensor  # as the caller gave it
    q_rows: Rows
    k_rows: Rows | None
    v_rows: Rows | None
    q_lens: Sequence[int] = ()
    model: str = ""
    sink_logits: Sequence[float] = ()
    omit_sinks: bool = False
    want_lse: bool = False
    out_type: OutType | None = None
    out: Tensor | None = None
    fp32: bool = dataclasses.field(init=False)  # the type of the result

    def __post_init__(self) -> None:
        out_type = self.out_type
        self.fp32 = not self.q_rows.bf16 if out_type is None else out_type == "fp32"


def decode(args: DecodeArgs, request_id: int = 0, timeout_s: float = 0) -> Call[DecodeReply]:
    """request_id and timeout_s are for a stream."""
    if args.out is not None:
        _check_out(args)
    sink_logits = tuple(map(float, args.sink_logits)) if len(args.sink_logits) else ()
    head = _decode_head(args.model, args.layer, tuple(args.handles), tuple(args.q_lens),
                        sink_logits, args.omit_sinks, args.want_lse, args.fp32,
                        _milliseconds(timeout_s) if timeout_s else 0)
    request = _wire.decode_request(head, request_id, args.positions, args.q_rows.bits,
                                   args.k_rows and args.k_rows.bits,
                                   args.v_rows and args.v_rows.bits)

    def read(raw: bytes) -> tuple[DecodeReply, Sequence[ItemError]]:
        return read_decode(_wire.decode_response(raw), args)

    out_bytes = args.q_rows.bits.nbytes * (2 if args.fp32 else 1)
    lse_bytes = args.q_rows.bits.size // 64 * 4 if args.want_lse else 0  # a head has 64 at least
    sizes = [0 if rows is None else rows.bits.nbytes
             for rows in (args.q_rows, args.k_rows, args.v_rows)]
    shared = _shm.Message(_shm.DECODE, request, (sizes[0], sizes[1], sizes[2]), len(args.handles),
                          out_bytes + lse_bytes)
    return Call("Decode", request, read, args.handles, shared)


@functools.lru_cache(maxsize=4096)
def _decode_head(model: str, layer: int, handles: tuple[Handle, ...], q_lens: tuple[int, ...],
                 sink_logits: tuple[float, ...], omit_sinks: bool, want_lse: bool, fp32: bool,
                 timeout_ms: int) -> bytes:
    """The fields of a DecodeRequest that are the same from step to step."""
    return kv_pb2.DecodeRequest(
        model=model, layer=layer, handles=map(_to_pb, handles), q_lens=q_lens,
        sink_logits=sink_logits, omit_sinks=omit_sinks, want_lse=want_lse,
        out_type=kv_pb2.OUT_TYPE_FP32 if fp32 else kv_pb2.OUT_TYPE_BF16,
        timeout_ms=timeout_ms).SerializeToString()


def read_decode(reply: _wire.Reply, args: DecodeArgs) -> tuple[DecodeReply, Sequence[ItemError]]:
    """The result as tensors of the kind of q."""
    shape, fp32, q = args.q_rows.shape, args.fp32, args.q
    out: Tensor
    if args.out is not None:
        out = args.out
        _tensors.to_numpy(out)[...] = reply.array(np.float32 if fp32 else np.uint16, shape)
    elif fp32:
        out = _tensors.like(q, reply.array(np.float32, shape))
    elif type(q) is np.ndarray and args.q_rows.bf16:
        out = reply.array(q.dtype, shape)
    else:
        dtype = _tensors.bf16_dtype_like(q)
        out = _tensors.bf16_like(q, reply.array(dtype, shape))
    if reply.plain and not args.want_lse:
        return DecodeReply(out, None, (), reply), ()
    lse, item_errors = None, _item_errors(reply.small.item_errors)
    if args.want_lse:
        lse = _tensors.like(q, _wire.lse_of(reply, shape[:-1]))
    return DecodeReply(out, lse, item_errors, reply), item_errors


def stream_result(reply: _wire.Reply, call: Call[DecodeReply], args: DecodeArgs, target: str
                  ) -> DecodeReply | errors.Error:
    """What a stream's reply comes to for its call."""
    if not reply.plain and reply.small.HasField("error"):
        item = _item_error(0, reply.small.error)
        return errors.from_code(item.code, "DecodeStream", target, item.message,
                                item.retry_after_s or None)
    try:
        result, item_errors = read_decode(reply, args)
    except UNREADABLE as raised:
        return unreadable("DecodeStream", target, raised)
    return call.failure(target, result, item_errors) if item_errors else result


def shared_error(error: kv_pb2.Error, call: str, target: str) -> errors.Error:
    """The exception for what a reply through shared memory says."""
    item = _item_error(0, error)
    return errors.from_code(item.code, call, target, item.message, item.retry_after_s or None)


UNREADABLE = (ValueError, TypeError, DecodeError)


def unreadable(call: str, target: str, raised: Exception) -> errors.Error:
    return errors.Internal(call, target, f"the reply cannot be read: {raised}; is this fp8kvd of "
                           "another version?")


def _check_out(args: DecodeArgs) -> None:
    array, dtype = _tensors.to_numpy(args.out), np.float32 if args.fp32 else np.uint16
    if array.dtype != dtype or array.shape != args.q_rows.shape or not array.flags.writeable:
        raise ValueError(f"out is {array.dtype} {list(array.shape)}: it must be writable "
                         f"{np.dtype(dtype).name} {list(args.q_rows.shape)} (uint16: bf16)")


def _naming(name: str, request: Any, response: Any, handles: Sequence[Handle]) -> Call[None]:
    """A call that only names sequences and answers only with failed items."""
    def read(raw: bytes) -> tuple[None, Sequence[ItemError]]:
        return None, _item_errors(response.FromString(raw).item_errors)

    return Call(name, request.SerializeToString(), read, handles)


@functools.lru_cache(maxsize=1 << 14)
def _to_pb(handle: Handle) -> kv_pb2.Handle:
    return kv_pb2.Handle(seq_id=handle[0], generation=handle[1], incarnation=handle[2],
                         home=handle[3])


def _handle(handle: kv_pb2.Handle) -> Handle:
    return Handle(handle.seq_id, handle.generation, handle.incarnation, handle.home)


def _milliseconds(seconds: float) -> int:
    return 0 if seconds <= 0 else max(1, round(seconds * 1000))


def _item_error(index: int, error: kv_pb2.Error) -> ItemError:
    code = _CODES[error.code] if 0 <= error.code < len(_CODES) else "UNKNOWN"
    return ItemError(index, code, error.message, error.retry_after_ms / 1000)


def _item_errors(item_errors: Any) -> tuple[ItemError, ...]:
    return tuple(_item_error(item.index, item.error) for item in item_errors)


def _sequence(info: kv_pb2.SequenceInfo) -> SequenceInfo:
    return SequenceInfo(_handle(info.handle), info.model, tuple(info.seq_lens), info.pages,
                        info.pages_shared, info.bytes, info.expected_tokens, info.ttl_ms / 1000,
                        info.ttl_left_ms / 1000)


def _precision(precision: kv_pb2.Precision) -> str:
    return _PRECISIONS.get(precision, "unknown")


def _model(model: kv_pb2.ModelInfo) -> ModelInfo:
    groups = tuple(LayerGroup(
        tuple(group.layers), group.window, group.softcap, group.has_sinks,
        _precision(group.precision), group.pages_total, group.pages_used,
        group.pages_free, group.page_bytes, group.page_tokens) for group in model.groups)
    return ModelInfo(model.name, model.layers, model.q_heads, model.kv_heads, model.head_dim,
                     model.sm_scale, groups, model.precision_reason)
