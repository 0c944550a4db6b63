"""Talks to an fp8kvd daemon from threads; fp8kvd.aio has the same for asyncio.

    with Client("127.0.0.1:50051") as client:
        with client.create_sequence("llama", expected_tokens=4096) as seq:
            seq.append(k, v, layer=0)                  # the prompt: [n, kv_heads, head_dim]
            out = seq.decode(q, k1, v1, layer=0).out   # the next token: [1, q_heads, head_dim]

Tensors are numpy arrays, torch tensors, or export DLPack. bf16 (torch.bfloat16,
ml_dtypes.bfloat16, or its bits as uint16) goes out as it is; floats are rounded to bf16. Results
are of the kind that q was: of numpy views of the reply (read-only) where they can be, torch tensors
on q's device, and for what came by DLPack something that goes back by it.

A call that may have been lost is sent again: the daemon tells a replay from new data by position
and bytes. It waits as long as the daemon asks, and stays within its timeout. Errors are those of
fp8kvd.errors; every one of them can be raised by every call.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from fp8kvd import _calls, _options, _sequences, _tensors, errors
from fp8kvd._core import Core
from fp8kvd._options import Options, Tls
from fp8kvd._sequences import AnySequence, DecodeOptions, SequenceState, handles_of
from fp8kvd._stream import DecodeStream
from fp8kvd._tensors import Tensor
from fp8kvd.accuracy import Accuracy
from fp8kvd.format import Fp8KvError
from fp8kvd.types import DecodeReply, Handle, PrecisionPlan, SequenceInfo, ServerInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Client", "DecodeStream", "Options", "Sequence", "Tls"]


class Sequence(SequenceState):
    """A sequence of the daemon: renewed in the background, and freed when its `with` block ends.

    Without `with` it lives until free(), or until its lease ends after the client closed.
    """

    def __init__(self, client: Client, handle: Handle, model: str, ttl_s: float,
                 seq_lens: dict[int, int] | None = None) -> None:
        super().__init__(handle, model, ttl_s, seq_lens)
        self._client = client

    def append(self, k: Tensor, v: Tensor, *, layer: int = 0, pos: int | None = None,
               skip_to: int = 0, timeout_s: float | None = None, progress: bool | None = None
               ) -> None:
        """Client.append of this sequence."""
        self._client.append(self, k, v, layer=layer, pos=pos, skip_to=skip_to,
                            timeout_s=timeout_s, progress=progress)

    def decode(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, layer: int,
               pos: int | None = None, timeout_s: float | None = None,
               **options: Unpack[DecodeOptions]) -> DecodeReply:
        """Client.decode of this sequence alone.

        q [q_len, q_heads, head_dim] (or [q_heads, head_dim]: one token); k, v [q_len, kv_heads,
        head_dim]. A failed item raises its own error, for instance InvalidArgument.
        """
        shape = q.shape if hasattr(q, "shape") else _tensors.shape_of(q)
        if len(shape) == 3 and shape[0] != 1:
            options.setdefault("q_lens", (shape[0],))
        return self._client.decode([self], q, k, v, layer=layer, timeout_s=timeout_s,
                                   positions=None if pos is None else [pos], **options)

    def fork(self, *, expected_tokens: int = 0, ttl_s: float = 0) -> Sequence:
        """A new sequence that shares all committed tokens; see Client.fork_sequences."""
        return self._client.fork_sequences(self, 1, expected_tokens=expected_tokens, ttl_s=ttl_s)[0]

    def truncate(self, seq_len: int) -> None:
        """Keeps the first seq_len tokens of every layer."""
        self._client.truncate_sequences([self], [seq_len])

    def renew(self) -> None:
        """Starts the lease anew; the client does so itself at a third of it."""
        self._client.renew_sequences([self])

    def stat(self) -> SequenceInfo:
        """Committed lengths, pages and lease, as the daemon has them."""
        return self._client.stat_sequences([self])[0]

    def free(self) -> None:
        """Gives it back. NotFound when it is gone already."""
        self._client.free_sequences([self])

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees what is still there; the lease frees what a broken connection keeps from it."""
        try:
            self.free()
        except (errors.NotFound, errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled):
            pass


class Client:
    """A connection to one daemon. All calls may come from any thread at any time."""

    def __init__(self, target: str, tls: Tls | bool | None = None, token: str | None = None,
                 options: Options | None = None) -> None:
        """Starts to connect; a daemon that does not answer shows at the first call.

        target: host:port, or any name that gRPC resolves. tls: True for the system's roots, or Tls.
        token: sent as a bearer token; needs tls unless the target is this machine. options: all of
        that and the limits of retries in one; target, tls and token given here win.

        Raises ValueError for options that cannot be.
        """
        self._core = Core(_options.make(target, tls, token, options))

    def close(self) -> None:
        """Ends what is in flight with Cancelled. Sequences that are left end with their leases."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def transport(self) -> tuple[str, str]:
        """How the latest append, decode or stream sent its tensors: ("shared_memory", ""), or
        ("grpc", why not)."""
        return self._core.transport

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, incarnation, device, models with their shapes and precision, limits."""
        return self._core.run(_calls.server_info(), timeout_s)

    def create_sequence(self, model: str = "", *, expected_tokens: int = 0, ttl_s: float = 0,
                        timeout_s: float | None = None) -> Sequence:
        """One of create_sequences."""
        return self.create_sequences(1, model, expected_tokens=expected_tokens, ttl_s=ttl_s,
                                     timeout_s=timeout_s)[0]

    def create_sequences(self, count: int, model: str = "", *, expected_tokens: int = 0,
                         ttl_s: float = 0, timeout_s: float | None = None) -> list[Sequence]:
        """Empty sequences of one model, all or none.

        model: may be empty when the daemon has only one. expected_tokens: for which room is
        reserved in each, so that appends within never fail for room; 0: none. ttl_s: a sequence
        that no call names for so long is freed; 0: the daemon's default.

        Raises ResourceExhausted when the reservation does not fit.
        """
        call = _calls.create(model, count, expected_tokens, ttl_s)
        handles, lease_s = self._core.run(call, timeout_s)
        self._core.add_leases(handles, lease_s)
        return [Sequence(self, handle, model, lease_s) for handle in handles]

    def fork_sequences(self, parent: AnySequence, count: int, *, expected_tokens: int = 0,
                      ttl_s: float = 0, timeout_s: float | None = None) -> list[Sequence]:
        """Sequences that share all of the parent's committed tokens, all or none.

        expected_tokens: as in create_sequences, counted from token 0. ttl_s 0: the parent's.
        """
        if not isinstance(parent, SequenceState):
            parent = self.adopt_sequence(parent)
        handles = self._core.run(_calls.fork(parent.handle, count, expected_tokens, ttl_s),
                                 timeout_s)
        lease_s = ttl_s or parent.ttl_s
        self._core.add_leases(handles, lease_s)
        return [Sequence(self, handle, parent.model, lease_s, parent.seq_lens())
                for handle in handles]

    def adopt_sequence(self, handle: Handle) -> Sequence:
        """A sequence that somebody else made, renewed and freed by this client from now on."""
        info = self.stat_sequences([handle])[0]
        self._core.add_leases([handle], info.ttl_s)
        return Sequence(self, handle, info.model, info.ttl_s, dict(enumerate(info.seq_lens)))

    def append(self, sequence: AnySequence, k: Tensor, v: Tensor, *, layer: int = 0,
               pos: int | None = None, skip_to: int = 0, model: str = "",
               timeout_s: float | None = None, progress: bool | None = None) -> None:
        """Bulk K and V, sent in chunks: a prompt.

        k, v: [n, kv_heads, head_dim] of one layer, or [layers, n, kv_heads, head_dim] of `layer`
        and those after it; after RoPE and norms, |x| < 2^28. Not to be changed until this returns.
        pos: of the first token; default behind what this client has put there. skip_to: on layers
        with a window, the positions before it (= pos) count as committed and dropped.
        progress: shows a bar by tqdm; default: when the append is long, stderr is a terminal and
        tqdm is installed.

        After a broken connection it asks for the committed lengths and goes on from there. Raises
        OutOfRange beyond the committed length, AlreadyExists for other bytes where tokens are,
        FailedPrecondition when one layer of a windowed group runs too far ahead.
        """
        plan = _sequences.append_plan(sequence, k, v, layer, pos, skip_to, model,
                                      self._core.options.append_chunk_bytes)
        self._core.append(plan, timeout_s, progress)
        if isinstance(sequence, SequenceState):
            plan.commit(sequence.set_seq_len)

    def decode(self, sequences: Items[AnySequence], q: Tensor, k: Tensor | None = None,
               v: Tensor | None = None, *, layer: int, positions: Items[int] | None = None,
               timeout_s: float | None = None, **options: Unpack[DecodeOptions]) -> DecodeReply:
        """One layer of one step for a batch: appends k and v, then gives the attention of q.

        n is the number of query tokens of all items together, by default one each.
        q: [n, q_heads, head_dim], after RoPE and norms, not yet times sm_scale.
        k, v: [n, kv_heads, head_dim]; both None: attend only to what is committed.
        positions: [items] of each item's first query token; default: behind what this client has
        put there, or with attend-only the last token.
        options: of DecodeOptions: model, q_lens, sink_logits, omit_sinks, want_lse, out_type, out.

        Returns out [n, q_heads, head_dim] of the kind of q, before the output projection. When
        items fail: BatchError, whose reply has the others' results (a single item: its own error).
        """
        args = _sequences.decode_args(sequences, q, k, v, layer, positions, options)
        try:
            reply = self._core.run(_calls.decode(args), timeout_s)
        except errors.BatchError as error:
            _sequences.commit(sequences, args, error.item_errors)
            raise
        if k is not None:
            _sequences.commit(sequences, args)
        return reply

    def decode_stream(self, in_flight_max: int = 64, *, timeout_s: float | None = None
                      ) -> DecodeStream:
        """Decode calls in a pipeline: see DecodeStream. timeout_s: of each of them."""
        return DecodeStream(self._core, in_flight_max, timeout_s or self._core.options.timeout_s)

    def truncate_sequences(self, sequences: Items[AnySequence], seq_lens: Items[int], *,
                           timeout_s: float | None = None) -> None:
        """Keeps the first seq_lens[i] tokens of every layer of sequence i.

        Raises FailedPrecondition when a window has dropped what would have to remain.
        """
        call = _calls.truncate(handles_of(sequences), seq_lens)
        try:
            self._core.run(call, timeout_s)
        except errors.BatchError as error:
            failed = {item.index for item in error.item_errors}
            _sequences.cut(sequences, seq_lens, failed)
            raise
        _sequences.cut(sequences, seq_lens, ())

    def free_sequences(self, sequences: Items[AnySequence], *, timeout_s: float | None = None
                       ) -> None:
        """Gives sequences back. NotFound (BatchError) for those that are gone already."""
        handles = handles_of(sequences)
        self._core.drop_leases(handles)
        self._core.run(_calls.free(handles), timeout_s)

    def renew_sequences(self, sequences: Items[AnySequence], *, timeout_s: float | None = None
                        ) -> None:
        """Starts leases anew. Only needed for handles that this client did not make."""
        self._core.run(_calls.renew(handles_of(sequences)), timeout_s)

    def stat_sequences(self, sequences: Items[AnySequence], *, timeout_s: float | None = None
                       ) -> list[SequenceInfo]:
        """Committed lengths, pages and lease of each."""
        return self._core.run(_calls.stat(handles_of(sequences)), timeout_s)

    def list_sequences(self, model: str = "", *, sequences_max: int = 1 << 20,
                       timeout_s: float | None = None) -> list[SequenceInfo]:
        """The live sequences of a model (empty: of all), at most sequences_max."""
        found: list[SequenceInfo] = []
        page_token = ""
        while len(found) < sequences_max:
            page, token = self._core.run(_calls.list_page(model, page_token), timeout_s)
            found += page
            if not token or token == page_token:
                break
            page_token = token
        return found[:sequences_max]

    def plan_precision(self, model: str = "", *, hf_config_json: str | None = None, batch: int = 0,
                       tokens: int = 0, other_bytes: int = 0, allow_fp8_kv: bool | None = None,
                       timeout_s: float | None = None) -> PrecisionPlan:
        """Whether fp8_kv pays for a model, with every number of the decision.

        model: a configured one; or hf_config_json: the text of a Hugging Face config.json. batch,
        tokens: sequences in a step and the length of each; 0: the configured workload. other_bytes:
        what a step reads besides the cache; 0: computed from the model. allow_fp8_kv: None: as the
        daemon is set.
        """
        call = _calls.plan_precision(model, hf_config_json, batch, tokens, other_bytes,
                                     allow_fp8_kv)
        return self._core.run(call, timeout_s)

    def measure_kv_error(self, k: Tensor, v: Tensor, *, timeout_s: float | None = None
                         ) -> Fp8KvError:
        """fp8kvd.fp8_kv_error, computed by the daemon. k, v: [tokens, kv_heads, head_dim]."""
        return self._core.run(_calls.measure_kv_error(k, v), timeout_s)

    def measure_accuracy(self, q: Tensor, k: Tensor, v: Tensor, positions: Items[int], *,
                         sm_scale: float | None = None, window: int = 0, softcap: float = 0.0,
                         timeout_s: float | None = None) -> Accuracy:
        """fp8kvd.measure_accuracy, computed by the daemon; positions ascending.

        The daemon takes at most 16 MiB of rows and 2^28 steps x q_heads x tokens x head_dim.
        """
        call = _calls.measure_accuracy(q, k, v, positions, sm_scale, window, softcap)
        return self._core.run(call, timeout_s)
