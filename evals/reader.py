"""Batched forwards over the transformers engine's model, for many items of one shape at once.

The engine answers one request at a time, which is right for serving and slow for thousands of items. This reader runs
the same model with the same positions and masks over a batch; the tests hold it against the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded
from ctxwin.kv import KVSpec, SpanKV

if TYPE_CHECKING:
    from ctxwin.engines.hf import HFEngine

Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Block:
    """KV of the same span in every item of a batch: ``k`` and ``v`` ``[L, B, H, S, D]``, keys rotated in place."""

    k: Tensor
    v: Tensor

    @property
    def tokens(self) -> int:
        return int(self.k.shape[3])

    def cut(self, item: int, begin: int, end: int, positions: Tensor, start: int) -> SpanKV:
        """Tokens ``[begin, end)`` of one item as a span in the frame ``start``; shares no layout with the cache."""
        k, v = (x[:, item, :, begin:end].transpose(1, 2).contiguous() for x in (self.k, self.v))
        return SpanKV(k=k, v=v, positions=positions, start=start)


def stack(rows: Sequence[Sequence[SpanKV]]) -> Block:
    """The block of a batch in which every item is a sequence of spans that stand where they were rotated to."""
    k, v = (
        torch.stack([torch.cat([getattr(span, name) for span in row], 1) for row in rows], 1).transpose(2, 3)
        for name in ("k", "v")
    )
    return Block(k.contiguous(), v.contiguous())


class Reader:
    """An opened transformers engine, read in batches.

    Args:
        engine: of a vision model.
        header: system prompt of every context.
        picture: any frame of the size that will be used; its tokens and positions stand for all of them.

    Attributes:
        spec: layout of the KV.
        frame: tokens and positions of one frame's chunk.
        origin: position of the first chunk.
    """

    def __init__(self, engine: HFEngine, header: str, picture: Picture) -> None:
        if not engine.spec.vision:
            raise ValueError(f"the model must be a vision model, got {engine.spec.model}")
        self.engine = engine
        self.spec: KVSpec = engine.spec.kv
        self._model: Any = engine._model  # the reader is the engine's batched twin and holds nothing of its own
        self._device = next(self._model.parameters()).device
        self.frame: Encoded = engine.encode(Chunk.image(picture))
        self.positions = torch.from_numpy(np.array(self.frame.positions))
        encoded = engine.encode_header(header)
        self.header: SpanKV = engine.prefill([], encoded, 0)
        self.origin = encoded.advance
        self._queries: dict[str, tuple[Encoded, Tensor]] = {}

    def start(self, place: int) -> int:
        """Position of the origin of the chunk at ``place``."""
        return self.origin + place * self.frame.advance

    @torch.inference_mode()
    def see(self, pictures: Sequence[Picture], at_once: int = 32) -> Tensor:
        """Input embeddings ``[N, T, hidden]`` of frames as chunks; each runs through the vision tower once.

        Raises ValueError where a picture makes another number of tokens than the reader's frame.
        """
        from PIL import Image

        media = self.frame.media[0]
        words = self._model.get_input_embeddings()(torch.tensor(self.frame.token_ids, device=self._device))
        rows = []
        processor = self.engine._checkpoint.image_processor
        for at in range(0, len(pictures), at_once):
            batch = [Image.fromarray(p) for p in pictures[at : at + at_once]]
            self.engine.counters.vision_encodes += len(batch)
            made = processor(images=batch, return_tensors="pt")
            if any(tuple(g) != media.grid_thw for g in made["image_grid_thw"].tolist()):
                raise ValueError(f"pictures must have the patch grid {media.grid_thw}, got another size")
            seen = self.engine._see(made["pixel_values"], made["image_grid_thw"]).view(len(batch), media.tokens, -1)
            row = words[None].repeat(len(batch), 1, 1)
            row[:, media.offset : media.offset + media.tokens] = seen.to(row)
            rows.append(row)
        return torch.cat(rows)

    def question(self, text: str) -> tuple[Encoded, Tensor]:
        """A question's tokens and their input embeddings ``[T, hidden]``."""
        if text not in self._queries:
            encoded = self.engine.encode_query(text)
            with torch.inference_mode():
                ids = torch.tensor(encoded.token_ids, device=self._device)
                self._queries[text] = encoded, self._model.get_input_embeddings()(ids)
        return self._queries[text]

    @torch.inference_mode()
    def forward(
        self, embeds: Tensor, positions: Tensor, past: Block | None = None, mask: Tensor | None = None
    ) -> tuple[Block, Tensor]:
        """One forward of a batch.

        Args:
            embeds: ``[B, T, hidden]``.
            positions: int64 ``[3, T]``, absolute, the same for every item.
            past: KV in front, of S tokens.
            mask: bool ``[T, S + T]``, what each token sees; causal behind all of ``past`` by default.

        Returns:
            KV of the T tokens, and the logits behind the last one, float32 ``[B, vocab]`` on the CPU.
        """
        from transformers import DynamicCache

        batch, new = int(embeds.shape[0]), int(embeds.shape[1])
        old = 0 if past is None else past.tokens
        cache = DynamicCache(config=self.engine._checkpoint.text_config)
        if past is not None:
            for layer in range(self.spec.layers):
                cache.update(past.k[layer].to(embeds), past.v[layer].to(embeds), layer)
        if mask is None:
            mask = torch.ones(new, old + new, dtype=torch.bool).tril(old)
        out = self._model(
            inputs_embeds=embeds,
            position_ids=positions.to(self._device)[:, None].expand(3, batch, new),
            attention_mask=mask.to(self._device)[None, None].expand(batch, 1, new, old + new),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        k, v = (
            torch.stack([getattr(layer, name)[:, :, old:] for layer in cache.layers]).to("cpu")
            for name in ("keys", "values")
        )
        return Block(k, v), out.logits[:, -1].to("cpu", torch.float32)

    def behind_header(self, count: int) -> Block:
        """The header's KV, ``count`` times."""
        one = stack([[self.header]])
        return Block(one.k.expand(-1, count, -1, -1, -1), one.v.expand(-1, count, -1, -1, -1))

    def run(self, embeds: Tensor) -> list[list[SpanKV]]:
        """Chunks ``[B, n, T, hidden]`` prefilled in order behind the header: their spans, by item, exact in place."""
        batch, count, tokens = (int(x) for x in embeds.shape[:3])
        starts = [self.start(i) for i in range(count)]
        positions = torch.cat([self.positions + s for s in starts], 1)
        made, _ = self.forward(embeds.flatten(1, 2), positions, self.behind_header(batch))
        return [
            [made.cut(b, i * tokens, (i + 1) * tokens, self.positions, s) for i, s in enumerate(starts)]
            for b in range(batch)
        ]

    def read(self, rows: Sequence[Sequence[SpanKV]], questions: Sequence[str]) -> Tensor:
        """Next-token logits ``[B, vocab]`` of each item's question behind the header and its placed chunks."""
        asked = [self.question(text) for text in questions]
        begin = self.start(len(rows[0]))
        logits: list[Tensor | None] = [None] * len(rows)
        for length in sorted({encoded.tokens for encoded, _ in asked}):
            some = [b for b, (encoded, _) in enumerate(asked) if encoded.tokens == length]
            past = stack([[self.header, *rows[b]] for b in some])
            positions = torch.from_numpy(np.array(asked[some[0]][0].positions)) + begin
            _, out = self.forward(torch.stack([asked[b][1] for b in some]), positions, past)
            for b, row in zip(some, out, strict=True):
                logits[b] = row
        return torch.stack([row for row in logits if row is not None])
