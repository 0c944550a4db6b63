"""fp8kvd.client for asyncio: the same calls under the same names, to be awaited.

    async with Client("127.0.0.1:50051") as client:
        async with await client.create_sequence("llama", expected_tokens=4096) as seq:
            await seq.append(k, v, layer=0)
            out = (await seq.decode(q, k1, v1, layer=0)).out

fp8kvd.client says what each takes, gives and raises. A client belongs to the event loop that runs
when it is made. Cancelling a task cancels its call; what the daemon had begun may be committed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from fp8kvd import _calls, _options, _sequences, _tensors, errors
from fp8kvd._aio_core import Core
from fp8kvd._aio_stream import DecodeStream
from fp8kvd._options import Options, Tls
from fp8kvd._sequences import AnySequence, DecodeOptions, SequenceState, handles_of
from fp8kvd._tensors import Tensor
from fp8kvd.accuracy import Accuracy
from fp8kvd.format import Fp8KvError
from fp8kvd.types import DecodeReply, Handle, PrecisionPlan, SequenceInfo, ServerInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Client", "DecodeStream", "Options", "Sequence", "Tls"]


class Sequence(SequenceState):
    """fp8kvd.Sequence for asyncio."""

    def __init__(self, client: Client, handle: Handle, model: str, ttl_s: float,
                 seq_lens: dict[int, int] | None = None) -> None:
        super().__init__(handle, model, ttl_s, seq_lens)
        self._client = client

    async def append(self, k: Tensor, v: Tensor, *, layer: int = 0, pos: int | None = None,
                     skip_to: int = 0, timeout_s: float | None = None, progress: bool | None = None
                     ) -> None:
        """Client.append of this sequence."""
        await self._client.append(self, k, v, layer=layer, pos=pos, skip_to=skip_to,
                                  timeout_s=timeout_s, progress=progress)

    async def decode(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
                     layer: int, pos: int | None = None, timeout_s: float | None = None,
                     **options: Unpack[DecodeOptions]) -> DecodeReply:
        """fp8kvd.Sequence.decode."""
        shape = _tensors.shape_of(q)
        if len(shape) == 3 and shape[0] != 1:
            options.setdefault("q_lens", (shape[0],))
        return await self._client.decode([self], q, k, v, layer=layer, timeout_s=timeout_s,
                                         positions=None if pos is None else [pos], **options)

    async def fork(self, *, expected_tokens: int = 0, ttl_s: float = 0) -> Sequence:
        """A new sequence that shares all committed tokens; see Client.fork_sequences."""
        return (await self._client.fork_sequences(self, 1, expected_tokens=expected_tokens,
                                                  ttl_s=ttl_s))[0]

    async def truncate(self, seq_len: int) -> None:
        """Keeps the first seq_len tokens of every layer."""
        await self._client.truncate_sequences([self], [seq_len])

    async def renew(self) -> None:
        """Starts the lease anew; the client does so itself at a third of it."""
        await self._client.renew_sequences([self])

    async def stat(self) -> SequenceInfo:
        """Committed lengths, pages and lease, as the daemon has them."""
        return (await self._client.stat_sequences([self]))[0]

    async def free(self) -> None:
        """Gives it back. NotFound when it is gone already."""
        await self._client.free_sequences([self])

    async def __aenter__(self) -> Sequence:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Frees what is still there; the lease frees what a broken connection keeps from it."""
        try:
            await self.free()
        except (errors.NotFound, errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled):
            pass


class Client:
    """fp8kvd.Client for asyncio."""

    def __init__(self, target: str, tls: Tls | bool | None = None, token: str | None = None,
                 options: Options | None = None) -> None:
        """As fp8kvd.Client; inside a running event loop."""
        self._core = Core(_options.make(target, tls, token, options))

    async def close(self) -> None:
        """Ends what is in flight with Cancelled. Sequences that are left end with their leases."""
        await self._core.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def transport(self) -> tuple[str, str]:
        """fp8kvd.Client.transport."""
        return self._core.transport

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, incarnation, device, models with their shapes and precision, limits."""
        return await self._core.run(_calls.server_info(), timeout_s)

    async def create_sequence(self, model: str = "", *, expected_tokens: int = 0, ttl_s: float = 0,
                              timeout_s: float | None = None) -> Sequence:
        """One of create_sequences."""
        return (await self.create_sequences(1, model, expected_tokens=expected_tokens, ttl_s=ttl_s,
                                           timeout_s=timeout_s))[0]

    async def create_sequences(self, count: int, model: str = "", *, expected_tokens: int = 0,
                               ttl_s: float = 0, timeout_s: float | None = None) -> list[Sequence]:
        """fp8kvd.Client.create_sequences."""
        call = _calls.create(model, count, expected_tokens, ttl_s)
        handles, lease_s = await self._core.run(call, timeout_s)
        self._core.add_leases(handles, lease_s)
        return [Sequence(self, handle, model, lease_s) for handle in handles]

    async def fork_sequences(self, parent: AnySequence, count: int, *, expected_tokens: int = 0,
                            ttl_s: float = 0, timeout_s: float | None = None) -> list[Sequence]:
        """fp8kvd.Client.fork_sequences."""
        if not isinstance(parent, SequenceState):
            parent = await self.adopt_sequence(parent)
        handles = await self._core.run(_calls.fork(parent.handle, count, expected_tokens, ttl_s),
                                       timeout_s)
        lease_s = ttl_s or parent.ttl_s
        self._core.add_leases(handles, lease_s)
        return [Sequence(self, handle, parent.model, lease_s, parent.seq_lens())
                for handle in handles]

    async def adopt_sequence(self, handle: Handle) -> Sequence:
        """A sequence that somebody else made, renewed and freed by this client from now on."""
        info = (await self.stat_sequences([handle]))[0]
        self._core.add_leases([handle], info.ttl_s)
        return Sequence(self, handle, info.model, info.ttl_s, dict(enumerate(info.seq_lens)))

    async def append(self, sequence: AnySequence, k: Tensor, v: Tensor, *, layer: int = 0,
                     pos: int | None = None, skip_to: int = 0, model: str = "",
                     timeout_s: float | None = None, progress: bool | None = None) -> None:
        """fp8kvd.Client.append."""
        plan = _sequences.append_plan(sequence, k, v, layer, pos, skip_to, model,
                                      self._core.options.append_chunk_bytes)
        await self._core.append(plan, timeout_s, progress)
        if isinstance(sequence, SequenceState):
            plan.commit(sequence.set_seq_len)

    async def decode(self, sequences: Items[AnySequence], q: Tensor, k: Tensor | None = None,
                     v: Tensor | None = None, *, layer: int, positions: Items[int] | None = None,
                     timeout_s: float | None = None, **options: Unpack[DecodeOptions]
                     ) -> DecodeReply:
        """fp8kvd.Client.decode."""
        args = _sequences.decode_args(sequences, q, k, v, layer, positions, options)
        try:
            reply = await self._core.run(_calls.decode(args), timeout_s)
        except errors.BatchError as error:
            _sequences.commit(sequences, args, error.item_errors)
            raise
        _sequences.commit(sequences, args)
        return reply

    def decode_stream(self, in_flight_max: int = 64, *, timeout_s: float | None = None
                      ) -> DecodeStream:
        """Decode calls in a pipeline: see DecodeStream. timeout_s: of each of them."""
        return DecodeStream(self._core, in_flight_max, timeout_s or self._core.options.timeout_s)

    async def truncate_sequences(self, sequences: Items[AnySequence], seq_lens: Items[int], *,
                                 timeout_s: float | None = None) -> None:
        """fp8kvd.Client.truncate_sequences."""
        call = _calls.truncate(handles_of(sequences), seq_lens)
        try:
            await self._core.run(call, timeout_s)
        except errors.BatchError as error:
            failed = {item.index for item in error.item_errors}
            _sequences.cut(sequences, seq_lens, failed)
            raise
        _sequences.cut(sequences, seq_lens, ())

    async def free_sequences(self, sequences: Items[AnySequence], *, timeout_s: float | None = None
                             ) -> None:
        """Gives sequences back. NotFound (BatchError) for those that are gone already."""
        handles = handles_of(sequences)
        self._core.drop_leases(handles)
        await self._core.run(_calls.free(handles), timeout_s)

    async def renew_sequences(self, sequences: Items[AnySequence], *, timeout_s: float | None = None
                              ) -> None:
        """Starts leases anew. Only needed for handles that this client did not make."""
        await self._core.run(_calls.renew(handles_of(sequences)), timeout_s)

    async def stat_sequences(self, sequences: Items[AnySequence], *, timeout_s: float | None = None
                             ) -> list[SequenceInfo]:
        """Committed lengths, pages and lease of each."""
        return await self._core.run(_calls.stat(handles_of(sequences)), timeout_s)

    async def list_sequences(self, model: str = "", *, sequences_max: int = 1 << 20,
                             timeout_s: float | None = None) -> list[SequenceInfo]:
        """The live sequences of a model (empty: of all), at most sequences_max."""
        found: list[SequenceInfo] = []
        page_token = ""
        while len(found) < sequences_max:
            page, token = await self._core.run(_calls.list_page(model, page_token), timeout_s)
            found += page
            if not token or token == page_token:
                break
            page_token = token
        return found[:sequences_max]

    async def plan_precision(self, model: str = "", *, hf_config_json: str | None = None,
                             batch: int = 0, tokens: int = 0, other_bytes: int = 0,
                             allow_fp8_kv: bool | None = None, timeout_s: float | None = None
                             ) -> PrecisionPlan:
        """fp8kvd.Client.plan_precision."""
        call = _calls.plan_precision(model, hf_config_json, batch, tokens, other_bytes,
                                     allow_fp8_kv)
        return await self._core.run(call, timeout_s)

    async def measure_kv_error(self, k: Tensor, v: Tensor, *, timeout_s: float | None = None
                               ) -> Fp8KvError:
        """fp8kvd.fp8_kv_error, computed by the daemon. k, v: [tokens, kv_heads, head_dim]."""
        return await self._core.run(_calls.measure_kv_error(k, v), timeout_s)

    async def measure_accuracy(self, q: Tensor, k: Tensor, v: Tensor, positions: Items[int], *,
                               sm_scale: float | None = None, window: int = 0, softcap: float = 0.0,
                               timeout_s: float | None = None) -> Accuracy:
        """fp8kvd.Client.measure_accuracy."""
        call = _calls.measure_accuracy(q, k, v, positions, sm_scale, window, softcap)
        return await self._core.run(call, timeout_s)
