"""Hugging Face causal language models whose KV cache is on a daemon. Needs torch and transformers.

    from fp8kvd import Client, hf

    with Client("127.0.0.1:50051") as client, hf.attach(model, client, "smollm2_135m_bf16"):
        model.generate(**inputs, max_new_tokens=64)

A prompt is attended to locally while its K and V go to the daemon; each later token's attention is
the daemon's answer. Batches may be padded. Greedy and sampling decode, beam search (a beam that
goes on twice is forked) and assisted generation (rejected tokens are truncated) work as they do
without. The results carry no gradient.

Models whose attention goes through transformers' AttentionInterface are served, as far as the
daemon can represent them: causal, with or without a sliding window, a softcap and sinks. A model
that the daemon is configured for differently is refused with a ValueError that names both.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from fp8kvd.client import Client, Sequence
from fp8kvd.types import LayerGroup, ModelInfo

__all__ = ["Attached", "Cache", "attach", "cache_argument"]

_NAME = "fp8kvd"  # among transformers' attention implementations
_SM_SCALE_ERROR_MAX = 1e-5  # relative: of a float that went through a configuration file


def attach(model: Any, client: Client, name: str = "", *, expected_tokens: int = 0,
           ttl_s: float = 0) -> Attached:
    """Makes a transformers causal LM use the daemon: generate() by itself, forward() with a cache.

    name: the daemon's name for it, which may be empty when it has only one model. expected_tokens,
    ttl_s: of every sequence, as in Client.create_sequences. client must stay open meanwhile.

    Returns what makes caches for forward() and undoes this, by itself at the end of a `with`.
    Raises ValueError when the daemon's model is of other heads or layers.
    """
    info = client.server_info().model(name)
    _check_shape(model.config.get_text_config(), info)
    return Attached(model, client, info, expected_tokens, ttl_s)


def cache_argument(model: Any) -> str:
    """What a model's forward() and generate() call a cache: "cache", before transformers 5.24
    "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Attached:
    """A model that uses a daemon; made by attach()."""

    def __init__(self, model: Any, client: Client, info: ModelInfo, expected_tokens: int,
                 ttl_s: float) -> None:
        self.model, self.client, self.info = model, client, info
        self._expected_tokens, self._ttl_s = expected_tokens, ttl_s
        self._q_len_max = client.server_info().limits.q_len_max
        self.cache_argument = cache_argument(model)
        self._before = model.config._attn_implementation
        self._generate = model.generate
        model.set_attn_implementation(_NAME)
        model.generate = self.generate

    def cache(self) -> Cache:
        """An empty cache, to give to the model's forward() or generate(); free it in the end."""
        return Cache(self.client, self.info, self._q_len_max, self._expected_tokens, self._ttl_s)

    def generate(self, *arguments: Any, **named: Any) -> Any:
        """The model's own generate, with a cache on the daemon unless one is given or none wanted.

        The cache is freed in the end unless it is returned (return_dict_in_generate): then that is
        the caller's to do.
        """
        given = named.get(self.cache_argument)
        if given is not None or named.get("use_cache") is False:
            if isinstance(given, Cache) and given.get_seq_length():
                # Layers of a window must not run apart by much more than it.
                windows = [group.window for group in self.info.groups if group.window]
                if windows:
                    named.setdefault("prefill_chunk_size", min(windows))
            return self._generate(*arguments, **named)
        with self.cache() as cache:
            result = self._generate(*arguments, **named, **{self.cache_argument: cache})
            if getattr(result, self.cache_argument, None) is cache:
                cache.keep()
            return result

    def detach(self) -> None:
        """The model is as it was before."""
        self.model.set_attn_implementation(self._before)
        del self.model.generate  # what hid the class's

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


class Cache(transformers.Cache):
    """A transformers cache of which nothing is here but how long it is. For one thread at a time.

    Rows of the batch are sequences of the daemon, made by the first forward(). A padded token is in
    none of them. copy.deepcopy gives a cache that shares all tokens so far (ForkSequences): the
    way to reuse a prefix. free() gives the sequences back; those of a cache that is only dropped
    end with their leases.
    """

    def __init__(self, client: Client, model: ModelInfo, q_len_max: int, expected_tokens: int = 0,
                 ttl_s: float = 0) -> None:
        super().__init__(layers=[])
        self._client, self._model, self._q_len_max = client, model, q_len_max
        self._options: dict[str, Any] = {"expected_tokens": expected_tokens, "ttl_s": ttl_s}
        self._groups = {layer: group for group in model.groups for layer in group.layers}
        self._rows: list[Sequence] = []  # [batch], the same list for ever
        self._real = torch.ones(0, 0, dtype=torch.bool)  # [batch, tokens]: is no padding
        self._seen = [0] * model.layers  # tokens of each layer, padding included
        self._pending: int | None = None  # a layer whose K and V wait for their Q
        self._checked: set[int] = set()
        self._kept = False
        weakref.finalize(self, _abandon, client, self._rows)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """[batch]"""
        return tuple(self._rows)

    def free(self) -> None:
        """Gives the sequences back; the cache is empty then."""
        rows = list(self._rows)
        self._rows.clear()
        self._seen = [0] * self._model.layers
        self._real = torch.ones(0, 0, dtype=torch.bool)
        self._pending = None
        if rows:
            self._client.free_sequences(rows)

    def keep(self) -> None:
        """The end of the `with` block around this does not free it."""
        self._kept = True

    def __enter__(self) -> Cache:
        self._kept = False
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        copy = Cache(self._client, self._model, self._q_len_max, **self._options)
        for row in self._rows:
            copy._rows.append(self._fork(row, 1)[0])
        copy._real, copy._seen = self._real, list(self._seen)
        return copy

    # What transformers asks of a cache. Its names and arguments differ a little by version.

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
               *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves K and V, [batch, kv_heads, n, head_dim], to the attention that follows."""
        if self._pending is not None:
            raise RuntimeError(
                f"the attention of layer {self._pending} did not come through fp8kvd: this model's "
                "code does not hand the cache's keys to transformers' AttentionInterface, so it "
                "cannot use a cache of fp8kvd.hf")
        self._pending = layer_idx
        # Tensors of their own, so that the mark is on no tensor that the model uses elsewhere.
        key_states = key_states.detach()
        key_states.fp8kvd_cache = self
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return self._seen[layer_idx or 0]

    def get_mask_sizes(self, query_length: Any, layer_idx: int | None = 0) -> tuple[int, int]:
        """query_length: before 5.0 a tensor of as many positions."""
        n = len(query_length) if isinstance(query_length, torch.Tensor) else int(query_length)
        return self.get_seq_length(layer_idx) + n, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length  # before 5.0

    def __len__(self) -> int:
        return self._model.layers

    @property
    def is_sliding(self) -> list[bool]:
        """No layer's mask is cut: the daemon does that."""
        return [False] * self._model.layers

    is_linear = is_dummy = is_sliding  # as little

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self._rows)

    @property
    def is_croppable(self) -> bool:
        return True

    def reset(self) -> None:
        self.free()

    def crop(self, max_length: int) -> None:
        """Negative: drops so many tokens; positive, as before 5.24: keeps so many; 0: nothing."""
        seen = self.get_seq_length()
        drop = -max_length if max_length <= 0 else max(0, seen - max_length)
        if drop == 0 or not self._rows:
            return
        kept = self._real[:, :max(0, seen - drop)]
        self._client.truncate_sequences(self._rows, kept.sum(dim=1).tolist())
        self._real, self._seen = kept, [kept.shape[1]] * self._model.layers

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows that are named, by index or as a mask."""
        self._select(torch.arange(len(self._rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times, beside each other."""
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def _select(self, indices: list[int]) -> None:
        """A row that is named once stays what it is, one named again is forked, others go."""
        if not self._rows or indices == list(range(len(self._rows))):
            return
        copies = {row: [self._rows[row]] for row in set(indices)}
        for row, found in copies.items():
            if indices.count(row) > 1:
                found += self._fork(self._rows[row], indices.count(row) - 1)
        gone = [seq for row, seq in enumerate(self._rows) if row not in copies]
        self._rows[:] = [copies[row].pop() for row in indices]
        self._real = self._real[indices]
        if gone:
            self._client.free_sequences(gone)

    def _fork(self, row: Sequence, count: int) -> list[Sequence]:
        return self._client.fork_sequences(row, count, **self._options)

    # Attention, called by _attention below with what update() was given.

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any,
               attention: _Attention) -> torch.Tensor:
        """Takes K and V in and gives out [batch, n, q_heads, head_dim] for q [batch, q_heads, n,
        head_dim]."""
        self._pending = None
        if layer not in self._checked:
            attention.check(layer, self._model, self._groups[layer], q, k)
            self._checked.add(layer)
        batch, _, n, _ = q.shape
        real = mask.real(n) if isinstance(mask, _Mask) else None
        self._take_rows(layer, batch, n, real)
        first = self._seen[layer] == 0
        self._seen[layer] += n
        if first and n > 1:
            self._append(layer, k, v)
            return attention.local(q, k, v, mask.local() if isinstance(mask, _Mask) else mask)
        if mask is not None and (not isinstance(mask, _Mask) or n > 1 and mask.custom):
            raise ValueError("fp8kvd.hf attends causally: give attention_mask as [batch, tokens], "
                             "1 for a token and 0 for padding, and no other mask")
        return self._decode(layer, q, k, v, attention)

    def _take_rows(self, layer: int, batch: int, n: int, real: torch.Tensor | None) -> None:
        """The first layer that sees new tokens says which of them are padding."""
        if not self._rows:
            self._rows += self._client.create_sequences(batch, self._model.name, **self._options)
            self._real = self._real.new_ones(batch, 0)
        if len(self._rows) != batch:
            raise ValueError(f"a batch of {batch} for a cache of {len(self._rows)} rows: use a "
                             "cache for each batch")
        if self._real.shape[1] == self._seen[layer]:
            new = self._real.new_ones(batch, n) if real is None else real.cpu()
            self._real = torch.cat([self._real, new], dim=1)

    def _new(self, layer: int, n: int) -> torch.Tensor:
        """[batch, n] of the tokens that are being added: is no padding."""
        return self._real[:, self._seen[layer] - n:self._seen[layer]]

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """A prompt's K and V; of a layer with a window only what later tokens see."""
        window = self._groups[layer].window
        for row, real in enumerate(self._new(layer, k.shape[2])):
            rows = [x[row].transpose(0, 1)[real.to(x.device)] for x in (k, v)]
            skip_to = max(0, len(rows[0]) - window) if window else 0
            if len(rows[0]):
                self._rows[row].append(*(x[skip_to:] for x in rows), layer=layer, pos=skip_to,
                                       skip_to=skip_to, progress=False)

    def _decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                attention: _Attention) -> torch.Tensor:
        """In blocks of as many tokens as the daemon takes of a row at once."""
        n = q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, n, heads, head_dim]
        outs = []
        for begin in range(0, n, self._q_len_max):
            block = slice(begin, begin + self._q_len_max)
            outs.append(self._decode_block(layer, q[:, block], k[:, block], v[:, block],
                                           self._new(layer, n)[:, block], attention))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _decode_block(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      real: torch.Tensor, attention: _Attention) -> torch.Tensor:
        """One call of the daemon; padding is left out of it and its rows of out are zero."""
        q_lens = real.sum(dim=1).tolist()
        named = [row for row, q_len in enumerate(q_lens) if q_len]
        whole = min(q_lens) == q.shape[1]
        where = real.to(q.device)
        tensors = [x.flatten(0, 1) if whole else x[where] for x in (q, k, v)]
        if not named:
            return torch.zeros_like(q)
        out: torch.Tensor = self._client.decode(
            [self._rows[row] for row in named], *tensors, layer=layer,
            model=self._model.name, q_lens=() if max(q_lens) == 1 else [q_lens[r] for r in named],
            sink_logits=attention.sink_logits).out
        if out.dtype != q.dtype:
            out = out.to(q.dtype)
        if whole:
            return out.view(q.shape)
        padded = torch.zeros_like(q)
        padded[where] = out
        return padded


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What a model says of one layer's attention."""

    sm_scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None  # [q_heads]

    @property
    def sink_logits(self) -> list[float]:
        return [] if self.sinks is None else self.sinks.float().tolist()

    def check(self, layer: int, model: ModelInfo, group: LayerGroup, q: torch.Tensor,
              k: torch.Tensor) -> None:
        """ValueError when the daemon would compute something else."""
        pairs = [
            ("q_heads", q.shape[1], model.q_heads), ("kv_heads", k.shape[1], model.kv_heads),
            ("head_dim", q.shape[3], model.head_dim), ("window", self.window, group.window),
            ("softcap", round(self.softcap, 4), round(group.softcap, 4)),
            ("sinks", self.sinks is not None, group.has_sinks)]
        if abs(self.sm_scale / model.sm_scale - 1) > _SM_SCALE_ERROR_MAX:
            pairs.append(("sm_scale", self.sm_scale, model.sm_scale))
        for what, ours, theirs in pairs:
            if ours != theirs:
                raise ValueError(
                    f"layer {layer}: {what} is {ours} here and {theirs} in the daemon's model "
                    f"{model.name}; configure it from this model's config.json (hf_config)")

    def local(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
              ) -> torch.Tensor:
        """The same attention here: [batch, n, q_heads, head_dim] of q [batch, q_heads, n, head_dim]
        and k, v [batch, kv_heads, m, head_dim]. mask [batch, 1, n, m]: True where a key is seen;
        None: causal."""
        if not self.softcap and self.sinks is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1,
                scale=self.sm_scale, enable_gqa=True)
            return out.transpose(1, 2)
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, dim=1).transpose(2, 3) * self.sm_scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None:
            mask = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min)
        if self.sinks is not None:  # a key of no value
            sinks = self.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=3)
        weights = torch.softmax(scores, dim=3)[..., :k.shape[2]].to(v.dtype)
        return (weights @ v.repeat_interleave(group, dim=1)).transpose(1, 2)


class _Mask:
    """What transformers would make a mask of, and the mask when it is wanted."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._local: list[torch.Tensor | None] = []

    @property
    def custom(self) -> bool:
        """More than causal, window and padding."""
        return self._arguments.get("allow_is_causal_skip") is False

    def real(self, n: int) -> torch.Tensor | None:
        """[batch, n] of the latest tokens: is no padding. None: none is."""
        padding = self._arguments.get("attention_mask")
        return None if padding is None else padding[:, -n:].bool()

    def local(self) -> torch.Tensor | None:
        """[batch, 1, n, m], True where a key is seen; None: causal."""
        if not self._local:
            self._local.append(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**self._arguments))
        return self._local[0]


def _mask(**arguments: Any) -> _Mask:
    """transformers' mask interface."""
    return _Mask(arguments)


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: Any, scaling: float | None = None,
               sliding_window: int | None = None, softcap: float | None = None,
               s_aux: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: remote when the keys are of a Cache above, else local."""
    attention = _Attention(query.shape[3]**-0.5 if scaling is None else scaling,
                           sliding_window or 0, softcap or 0.0, s_aux)
    cache: Cache | None = getattr(key, "fp8kvd_cache", None)
    if cache is None:
        mask = attention_mask.local() if isinstance(attention_mask, _Mask) else attention_mask
        return attention.local(query, key, value, mask), None
    return cache.attend(module.layer_idx, query, key, value, attention_mask, attention), None


def _check_shape(config: Any, info: ModelInfo) -> None:
    ours = (config.num_hidden_layers, config.num_attention_heads,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    theirs = (info.layers, info.q_heads, info.kv_heads)
    if ours != theirs:
        raise ValueError(
            f"the model has {ours[0]} layers, {ours[1]} q_heads and {ours[2]} kv_heads; the "
            f"daemon's {info.name} has {theirs[0]}, {theirs[1]} and {theirs[2]}; name another of "
            "its models, or configure it from this model's config.json (hf_config)")


def _abandon(client: Client, rows: list[Sequence]) -> None:
    """Of a cache that nobody has any more: no call from here, but no renewals either."""
    client._core.drop_leases([row.handle for row in rows])


def _register(function: Callable[..., Any], mask: Callable[..., Any]) -> None:
    transformers.AttentionInterface.register(_NAME, function)
    transformers.AttentionMaskInterface.register(_NAME, mask)


_register(_attention, _mask)
