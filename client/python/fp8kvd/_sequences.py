"""What the sync and the asyncio Sequence share: the handle and where its next token goes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypedDict

import numpy as np

from fp8kvd import _append, _calls, _tensors, errors
from fp8kvd._tensors import Tensor
from fp8kvd.types import Handle, ItemError, OutType


class DecodeOptions(TypedDict, total=False):
    """Of decode and submit."""

    # The handles' model; needed when bare handles are given and the daemon has several models.
    model: str
    # [items] query tokens of each item; default all 1. Their sum is n.
    q_lens: Sequence[int]
    # [q_heads] fp32, finite; needed for layers with sinks, refused for others.
    sink_logits: Sequence[float]
    # Leaves the sink out of out and lse: in a merge of several daemons exactly one includes it.
    omit_sinks: bool
    # Asks for lse: float32 [n, q_heads], the natural log of the softmax denominator.
    want_lse: bool
    # Default: "bf16" when q is bf16, "fp32" when it is float.
    out_type: OutType
    # Filled with the result and returned as reply.out: float32, or bf16 by out_type.
    out: Tensor


class SequenceState:
    """A handle, and the committed length of each layer as far as this client wrote it.

    A length moves when a call succeeds. So a call that failed may be made again as it was: it goes
    to the same position, and if the daemon has those tokens already it takes it for a replay.
    """

    def __init__(self, handle: Handle, model: str, ttl_s: float,
                 seq_lens: dict[int, int] | None = None) -> None:
        self.handle, self.model, self.ttl_s = handle, model, ttl_s
        self._seq_lens = dict(seq_lens or {})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.handle.seq_id} of {self.model or 'the model'!r}>"

    def seq_len(self, layer: int) -> int:
        """Committed tokens of a layer as this client knows it; stat() asks the daemon."""
        return self._seq_lens.get(layer, 0)

    def seq_lens(self) -> dict[int, int]:
        return dict(self._seq_lens)

    def set_seq_len(self, layer: int, seq_len: int) -> None:
        self._seq_lens[layer] = seq_len

    def cut(self, seq_len: int) -> None:
        """The tokens from seq_len on were dropped."""
        self._seq_lens = {layer: min(n, seq_len) for layer, n in self._seq_lens.items()}


AnySequence = SequenceState | Handle


def handle_of(sequence: AnySequence) -> Handle:
    return sequence.handle if isinstance(sequence, SequenceState) else sequence


def handles_of(sequences: Sequence[AnySequence]) -> Sequence[Handle]:
    if len(sequences) == 1:
        return (handle_of(sequences[0]),)
    return [sequence.handle if isinstance(sequence, SequenceState) else sequence
            for sequence in sequences]


def decode_args(sequences: Sequence[AnySequence], q: Tensor, k: Tensor | None, v: Tensor | None,
                layer: int, positions: Sequence[int] | None, options: DecodeOptions
                ) -> _calls.DecodeArgs:
    """Fills in what the sequences know: positions and model."""
    q_rows = _tensors.rows_of(q)
    shape, q_lens, items = q_rows.shape, options.get("q_lens") or (), len(sequences)
    n = shape[0] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or (sum(q_lens) if q_lens else items) != n:
        raise ValueError(f"q is {list(shape)} for {items} sequences with q_lens "
                         f"{list(q_lens) or 'all 1'}: give [sum of q_lens, q_heads, head_dim]")
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or neither to attend only")
    handles = handles_of(sequences)
    if positions is None:
        back = (0,) * items if k is not None else q_lens or (1,) * items
        if items == 1:
            positions = (_position(sequences[0], layer, back[0]),)
        else:
            positions = [_position(sequence, layer, n) for sequence, n in zip(sequences, back)]
    if "model" not in options:
        first = sequences[0] if items else None
        options["model"] = first.model if isinstance(first, SequenceState) else ""
    return _calls.DecodeArgs(
        layer, handles, positions, q, q_rows, None if k is None else _tensors.rows_of(k),
        None if v is None else _tensors.rows_of(v), **options)


def _position(sequence: AnySequence, layer: int, back: int) -> int:
    """So many tokens before its end."""
    if not isinstance(sequence, SequenceState):
        raise ValueError(f"positions are needed: the length of {sequence} is not known here")
    seq_len = sequence._seq_lens.get(layer, 0)
    if seq_len < back:
        raise ValueError(f"layer {layer} of {sequence} holds {seq_len} tokens as far as known "
                         f"here: nothing for {back} query tokens to stand at")
    return seq_len - back


def commit(sequences: Sequence[AnySequence], args: _calls.DecodeArgs,
           item_errors: Sequence[ItemError] = ()) -> None:
    """The items that did not fail have their tokens now; the others stand where they stood."""
    if args.k_rows is None:
        return
    failed = {item.index for item in item_errors}
    q_lens = args.q_lens or [1] * len(sequences)
    for index, sequence in enumerate(sequences):
        if isinstance(sequence, SequenceState):
            q_len = 0 if index in failed else q_lens[index]
            sequence.set_seq_len(args.layer, args.positions[index] + q_len)


def step_back(sequences: Sequence[AnySequence], args: _calls.DecodeArgs, error: errors.Error
              ) -> None:
    """Items failed after commit() took them for done, as did all that came behind them."""
    failed: Sequence[int] = range(len(sequences))
    if isinstance(error, errors.BatchError):
        failed = [item.index for item in error.item_errors]
    for index in failed if args.k_rows is not None else ():
        sequence = sequences[index]
        if isinstance(sequence, SequenceState):
            seq_len = min(sequence.seq_len(args.layer), args.positions[index])
            sequence.set_seq_len(args.layer, seq_len)


def append_plan(sequence: AnySequence, k: Tensor, v: Tensor, layer: int, pos: int | None,
                skip_to: int, model: str, chunk_bytes: int) -> _append.Plan:
    """k and v [n, kv_heads, head_dim], or [layers, n, kv_heads, head_dim]. ValueError for others,
    and when layers of different lengths are to be appended without pos."""
    bits = [_tensors.bf16_bits(x) for x in (k, v)]
    bits = [x[np.newaxis] if x.ndim == 3 else x for x in bits]
    if bits[0].ndim != 4 or bits[0].shape != bits[1].shape or 0 in bits[0].shape[:1]:
        shapes = [list(_tensors.shape_of(x)) for x in (k, v)]
        raise ValueError(f"k is {shapes[0]}, v {shapes[1]}: both must be "
                         "[n, kv_heads, head_dim] or [layers, n, kv_heads, head_dim]")
    if isinstance(sequence, SequenceState):
        model = model or sequence.model
    if pos is None:
        pos = _next_pos(sequence, range(layer, layer + len(bits[0])))
    return _append.Plan(model, handle_of(sequence), layer, pos, bits[0], bits[1], skip_to,
                        chunk_bytes)


def _next_pos(sequence: AnySequence, layers: range) -> int:
    if not isinstance(sequence, SequenceState):
        raise ValueError(f"pos is needed, for the length of {sequence} is not known here")
    seq_lens = {sequence.seq_len(layer) for layer in layers}
    if len(seq_lens) != 1:
        raise ValueError(f"layers {layers.start} ... {layers.stop - 1} hold {sorted(seq_lens)} "
                         "tokens: give pos, or append to those of one length")
    return seq_lens.pop()


def cut(sequences: Sequence[AnySequence], seq_lens: Sequence[int], failed: Collection[int]) -> None:
    """Those that did not fail have lost the tokens from seq_lens on."""
    for index, sequence in enumerate(sequences):
        if isinstance(sequence, SequenceState) and index not in failed:
            sequence.cut(seq_lens[index])
