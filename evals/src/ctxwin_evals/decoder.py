"""The decoder of an opened transformers engine, run in batches, layer by layer, over any set of tokens.

The engine answers one request at a time, from whole spans. Evaluation needs more: batches of items, tokens recomputed in
the middle of a context (`at`), layers skipped or run alone, and attention weights. One primitive does it all, `Decoder.run`
over a `Memory` of KV slots in prompt order; the tests compare it with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Encoded
from ctxwin.errors import UnsupportedModel
from ctxwin.kv.config import sliding_window
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin_evals.items import grouped

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

Watch = Callable[[int, Tensor], None]
"""Called with a layer and its attention weights ``[B, heads, T, S]`` (rows: the tokens run; columns: slots).

Long inputs come in blocks of rows, so that sums over rows must be accumulated."""
AT_ONCE = 1024
"""Tokens of one block of a long input."""
_SLIDING = "sliding_attention"
ROOM = 64
"""Slots that are added at once while an answer grows."""


@dataclass(frozen=True)
class Tokens:
    """A batch of tokens to run.

    Attributes:
        embeds: input of the first layer ``[B, T, hidden]``, pictures included.
        positions: int64 ``[3, B, T]``, absolute.
        deep: ``[D, B, T, hidden]``, added after the first D layers (deepstack); None where the model has none.
    """

    embeds: Tensor
    positions: Tensor
    deep: Tensor | None = None

    @property
    def count(self) -> int:
        """Tokens of an item."""
        return int(self.embeds.shape[1])

    def moved(self, shift: int) -> Tokens:
        """The same tokens, ``shift`` positions later."""
        return Tokens(self.embeds, self.positions + shift, self.deep)

    def of(self, items: Sequence[int]) -> Tokens:
        """The same tokens of some items of the batch."""
        some = list(items)
        return Tokens(self.embeds[some], self.positions[:, some], None if self.deep is None else self.deep[:, some])

    def pick(self, at: Tensor) -> Tokens:
        """Tokens ``at`` (int64 ``[B, n]``) of each item."""
        width = at[..., None].expand(-1, -1, self.embeds.shape[-1])
        deep = self.deep if self.deep is None else self.deep.gather(2, width[None].expand(len(self.deep), -1, -1, -1))
        return Tokens(self.embeds.gather(1, width), self.positions.gather(2, at[None].expand(3, -1, -1)), deep)


def concatenated(parts: Sequence[Tokens], *, items: bool = False) -> Tokens:
    """Tokens of one batch, one part after the other; with ``items``, the items of several batches in one."""
    along = 0 if items else 1
    deep = None if parts[0].deep is None else torch.cat([p.deep for p in parts if p.deep is not None], along + 1)
    positions = torch.cat([p.positions for p in parts], along + 1)
    return Tokens(torch.cat([p.embeds for p in parts], along), positions, deep)


@dataclass
class Memory:
    """KV of a batch, one slot per token in prompt order; `Decoder.run` writes into it.

    Attributes:
        k, v: rope and content channel ``[L, B, H, S, D]``, keys rotated in place.
    """

    k: Tensor
    v: Tensor

    @property
    def slots(self) -> int:
        """Slots of an item."""
        return int(self.k.shape[3])

    @property
    def items(self) -> int:
        """Items of the batch."""
        return int(self.k.shape[1])

    def of(self, items: Sequence[int]) -> Memory:
        """The same slots of some items of the batch."""
        return self if len(items) == self.items else Memory(self.k[:, list(items)], self.v[:, list(items)])

    def grown(self, slots: int) -> Memory:
        """Return a copy with ``slots`` empty slots (zeros) appended."""
        return Memory(*(torch.cat([x, x.new_zeros(*x.shape[:3], slots, x.shape[4])], 3) for x in (self.k, self.v)))

    def select(self, slots: Tensor) -> Memory:
        """Return a copy of these slots: int64 ``[n]``, or ``[L, B, n]`` where they differ by layer and item."""
        if slots.ndim == 1:
            return Memory(self.k[:, :, :, slots].contiguous(), self.v[:, :, :, slots].contiguous())
        at = slots[:, :, None, :, None]
        return Memory(*(x.gather(3, at.expand(-1, -1, x.shape[2], -1, x.shape[4])) for x in (self.k, self.v)))

    def span(self, item: int, begin: int, end: int, positions: Tensor, start: int) -> SpanKV:
        """Slots ``[begin, end)`` of one item as a span in the frame ``start``, copied to the CPU.

        ``positions`` are int64 ``[3, T]``, relative to the span's origin.
        """
        k, v = (x[:, item, :, begin:end].transpose(1, 2).contiguous().to("cpu") for x in (self.k, self.v))
        return SpanKV(k=k, v=v, positions=positions, start=start)


class Held:
    """KV that grows while an answer is generated, and that policies thin out; starts with a copy of a memory.

    ``slots`` are those held now, by every layer and item.
    """

    def __init__(self, memory: Memory) -> None:
        self._room, self.slots = memory.grown(ROOM), memory.slots

    @property
    def memory(self) -> Memory:
        """The slots held; shares memory with this object."""
        return Memory(self._room.k[:, :, :, : self.slots], self._room.v[:, :, :, : self.slots])

    def grow(self, slots: int) -> Memory:
        """Append empty slots; return all slots."""
        if self.slots + slots > self._room.slots:
            self._room = self.memory.grown(slots + ROOM)
        self.slots += slots
        return self.memory

    def drop(self, slot: int) -> None:
        """Remove one slot from every layer and item; later slots move up, in place."""
        for x in (self._room.k, self._room.v):
            x[:, :, :, slot : self.slots - 1] = x[:, :, :, slot + 1 : self.slots].clone()
        self.slots -= 1

    def replace(self, memory: Memory) -> None:
        """Holds a copy of this instead."""
        self._room, self.slots = memory.grown(ROOM), memory.slots


class _Slots:
    """Stands in for a decoder layer's cache: writes the new KV to its slots and returns all of them."""

    def __init__(self, memory: Memory, at: Tensor, latent: bool) -> None:
        self._memory = memory
        self._at = at[:, None, :, None]
        self._latent = latent  # transformers caches MLA's latent as "keys" and its rope keys as "values"

    def update(self, first: Tensor, second: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        k, v = (second, first) if self._latent else (first, second)
        for new, slots in ((k, self._memory.k[layer_idx]), (v, self._memory.v[layer_idx])):
            slots.scatter_(2, self._at.expand(-1, new.shape[1], -1, new.shape[3]), new.to(slots.dtype))
        k, v = self._memory.k[layer_idx].to(k.dtype), self._memory.v[layer_idx].to(v.dtype)
        return (v, k) if self._latent else (k, v)


class Reader:
    """Interface of an opened engine that groups of items use.

    Attributes:
        spec: layout of its KV.
        layers: number of decoder layers.
        query: from a question to its tokens, the end of the turn included.
        system_prompt: from a system prompt to its tokens and its KV at position 0.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Any = engine
        self.spec: KVSpec = engine.spec.kv
        self.layers = self.spec.layers
        self.query: Callable[[str], Encoded] = lru_cache(4096)(engine.encode_query)
        self.system_prompt: Callable[[str], tuple[Encoded, SpanKV]] = lru_cache(256)(
            lambda text: (first := engine.encode_system_prompt(text), engine.prefill([], first, 0))
        )


class Decoder(Reader):
    """An opened transformers engine, read in batches.

    ``window`` is how many tokens sliding layers see, their own included; None where no layer slides.

    Raises UnsupportedModel for a model that sees and has layers that slide, or whose layers differ in their heads or their
    inputs, or whose logits are capped.
    """

    def __init__(self, engine: HFEngine) -> None:
        config = engine.text_model.config
        self.window = sliding_window(config)
        uneven = engine.spec.kv.in_rows or getattr(config, "hidden_size_per_layer_input", None)
        slides = engine.spec.kv.kinds or self.window is not None
        if uneven or (slides and (engine.spec.vision or getattr(config, "final_logit_softcapping", None))):
            raise UnsupportedModel(f"{engine.spec.model} has layers that do not see and turn alike; measure it on vLLM")
        super().__init__(engine)
        types = getattr(config, "layer_types", None) if slides else None
        self._types: list[str] = list(types or [_SLIDING if self.window is not None else ""] * self.layers)
        self._text: Any = engine.text_model
        self._head: Any = engine.lm_head
        self._device = next(self._text.parameters()).device

    @torch.inference_mode()
    def tokens(self, rows: Sequence[Encoded], start: int = 0) -> Tokens:
        """One encoded piece an item, all of the same number of tokens and the same positions, at ``start``."""
        inputs = [self.engine.inputs([row]) for row in rows]
        positions = torch.from_numpy(np.array(rows[0].positions)).to(self._device) + start
        deep = [m.deep for m in inputs if m.deep is not None]
        embeds, positions = torch.stack([m.embeds for m in inputs]), positions[:, None].expand(3, len(rows), -1)
        return Tokens(embeds, positions, torch.stack(deep, 1) if deep else None)

    def memory(self, rows: Sequence[Sequence[SpanKV]]) -> Memory:
        """A batch whose items are sequences of spans, each standing where it was rotated to."""
        k, v = (
            torch.stack([torch.cat([getattr(span, name) for span in row], 1) for row in rows], 1).transpose(2, 3)
            for name in ("k", "v")
        )
        return Memory(k.contiguous().to(self._device), v.contiguous().to(self._device))

    @torch.inference_mode()
    def run(
        self,
        tokens: Tokens,
        memory: Memory,
        at: Tensor,
        *,
        mask: Tensor | None = None,
        layers: range | None = None,
        hidden: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Run tokens through decoder layers; their KV is written into ``memory``.

        Long inputs run in blocks of `AT_ONCE` tokens, one after the other, so that masks stay small.

        Args:
            tokens: B items of T tokens.
            memory: B items of S slots; changed in place.
            at: int64 ``[B, T]`` (or ``[T]`` for all), the slot of each token, ascending.
            mask: bool ``[B, T, S]`` (or ``[T, S]``), the slots a token sees, none after its own; all of these by default.
            layers: which ones; all by default.
            hidden: ``[B, T, hidden]``, input of the first of these layers; the embeddings by default.
            watch: receives the attention weights of each layer (eager attention, T x S numbers a head), block by block.

        Returns ``[B, T, hidden]`` after the last of these layers, not normalised.
        """
        batch, count = int(tokens.embeds.shape[0]), tokens.count
        if not count:
            return tokens.embeds if hidden is None else hidden
        at = at.to(self._device).expand(batch, -1)
        chosen = layers if layers is not None else range(self.layers)
        out, first = [], tokens.embeds if hidden is None else hidden
        for begin in range(0, count, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            deep = None if tokens.deep is None else tokens.deep[:, :, part]
            block = Tokens(first[:, part], tokens.positions[:, :, part], deep)
            visible = None if mask is None else mask.expand(batch, -1, -1)[:, part]
            out.append(self._block(block, memory, at[:, part], visible, chosen, watch))
        return torch.cat(out, 1) if len(out) > 1 else out[0]

    def _block(
        self, tokens: Tokens, memory: Memory, at: Tensor, mask: Tensor | None, layers: range, watch: Watch | None
    ) -> Tensor:
        """`run` over tokens that fit at once; ``tokens.embeds`` are the first layer's inputs."""
        if mask is None:
            mask = torch.arange(memory.slots, device=self._device) <= at[..., None]
        x = tokens.embeds
        mask = mask.to(self._device)
        positions = tokens.positions if self.spec.rope.sections else tokens.positions[0]
        masks: dict[str, Tensor] = {}
        angles: dict[str, Any] = {}
        for kind in set(self._types):
            visible = mask
            if kind == _SLIDING and self.window is not None:
                visible = mask & (torch.arange(memory.slots, device=self._device) > at[..., None] - self.window)
            additive = torch.zeros(mask.shape, dtype=x.dtype, device=self._device)
            masks[kind] = additive.masked_fill_(~visible, torch.finfo(x.dtype).min)[:, None]
            angles[kind] = self._text.rotary_emb(x, positions, *([kind] if self.spec.kinds else []))
        cache = _Slots(memory, at, self.spec.family == "mla")
        with self._watching(watch) as weights:
            for index in layers:
                output = self._text.layers[index](
                    x,
                    attention_mask=masks[self._types[index]],
                    position_embeddings=angles[self._types[index]],
                    position_ids=tokens.positions[0],
                    past_key_values=cache,
                    use_cache=True,
                )
                x = output[0] if isinstance(output, tuple) else output
                if tokens.deep is not None and index < len(tokens.deep):
                    x = x + tokens.deep[index]
                if watch is not None:
                    watch(index, weights.pop())
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32 ``[B, T, vocab]`` on the CPU, of hidden states after the last layer."""
        out: Tensor = self._head(self._text.norm(hidden)).to("cpu", torch.float32)
        return out

    def append(self, tokens: Tokens, memory: Memory, watch: Watch | None = None) -> tuple[Memory, Tensor]:
        """Run tokens after all of ``memory``; return a grown copy of it, and the hidden states ``[B, T, hidden]``."""
        grown = memory.grown(tokens.count)
        return grown, self.run(tokens, grown, torch.arange(memory.slots, grown.slots), watch=watch)

    def read(self, memory: Memory, queries: Sequence[str], begin: int) -> Tensor:
        """Next-token logits ``[B, vocab]`` after one question an item, asked at position ``begin``."""
        encoded = [self.query(text) for text in queries]
        out: list[Tensor | None] = [None] * len(encoded)
        for some in grouped(range(len(encoded)), lambda b: encoded[b].tokens).values():
            tokens = self.tokens([encoded[b] for b in some], begin)
            _, hidden = self.append(tokens, memory.of(some))
            for b, row in zip(some, self.logits(hidden[:, -1:])[:, 0], strict=True):
                out[b] = row
        return torch.stack([row for row in out if row is not None])

    @contextmanager
    def _watching(self, watch: Watch | None) -> Iterator[list[Tensor]]:
        """Attention weights of each layer that is run; switches to eager attention meanwhile, since others give none."""
        weights: list[Tensor] = []
        if watch is None:
            yield weights
            return
        attentions = [layer.self_attn for layer in self._text.layers]
        implementations = [module.config._attn_implementation for module in attentions]
        hooks = [m.register_forward_hook(lambda module, args, output: weights.append(output[1])) for m in attentions]
        try:
            for module in attentions:
                module.config._attn_implementation = "eager"
            yield weights
        finally:
            for module, implementation, hook in zip(attentions, implementations, hooks, strict=True):
                module.config._attn_implementation = implementation
                hook.remove()
