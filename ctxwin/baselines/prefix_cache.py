"""Tokens that a prefix cache computes for a prompt, counted as vLLM counts them.

A prompt is split into whole blocks; a block is found only behind the same blocks, so hits are the longest common prefix
with anything served before. The last token is always computed. Wherever there is a choice the count favours the cache: it
never forgets a block, and looking one up costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from ctxwin.store.lru import LRUCache

if TYPE_CHECKING:
    from ctxwin.engines.segments import Encoded

BLOCK = 16
ENCODER_CACHE = 4096
"""Vision embeddings that vLLM keeps by default on a CPU; 64 frames of the bundled model."""


@dataclass(frozen=True)
class Media:
    """An image or video in a prompt: its key, and the half-open range of prompt tokens that represent it."""

    key: str
    begin: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """A prompt as a prefix cache sees it.

    Attributes:
        tokens: one symbol a token. Placeholders of different media differ, equal symbols are equal tokens.
        media: in order.
    """

    tokens: tuple[str, ...]
    media: tuple[Media, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Encoded]) -> Prompt:
        """The prompt of encoded chunks in a row."""
        tokens: list[str] = []
        media: list[Media] = []
        for part in parts:
            symbols = [str(token) for token in part.token_ids]
            for span in part.media:
                for i in range(span.offset, span.offset + span.tokens):
                    symbols[i] = f"{span.key}+{i - span.offset}"
                begin = len(tokens) + span.offset
                media.append(Media(span.key, begin, begin + span.tokens))
            tokens += symbols
        return cls(tuple(tokens), tuple(media))


class PrefixCache:
    """Automatic prefix caching over everything served so far, and the encoder cache beside it.

    Args:
        block: tokens a block.
        encoder_size: embeddings the encoder cache holds; the least recently used medium leaves first.
    """

    def __init__(self, block: int = BLOCK, encoder_size: int = ENCODER_CACHE) -> None:
        if block < 1 or encoder_size < 0:
            raise ValueError(f"block must be >= 1 and encoder_size >= 0, got {block} and {encoder_size}")
        self._block = block
        self._blocks: set[bytes] = set()
        self._encoded: LRUCache[bool] = LRUCache(encoder_size)

    def hold(self, prompt: Prompt) -> None:
        """Keep a prompt's blocks without counting them: what was generated behind a served prompt. O(prompt)."""
        self._blocks.update(self._chain(prompt.tokens))

    def serve(self, prompt: Prompt) -> tuple[int, int]:
        """Serve a prompt: (tokens computed, vision encodes run). O(prompt)."""
        if not prompt.tokens:
            raise ValueError("a prompt must have at least one token, got none")
        chain = self._chain(prompt.tokens)
        # vLLM looks up all but the last token, whose logits are needed.
        findable = (len(prompt.tokens) - 1) // self._block
        cached_blocks = 0
        while cached_blocks < findable and chain[cached_blocks] in self._blocks:
            cached_blocks += 1
        self._blocks.update(chain)
        cached = cached_blocks * self._block
        encodes = sum(self._encode(m) for m in prompt.media if m.end > cached)
        return len(prompt.tokens) - cached, encodes

    def _chain(self, tokens: Sequence[str]) -> list[bytes]:
        """Hashes of the whole blocks, each over its tokens and its parent's hash."""
        parent, chain = b"", []
        for begin in range(0, len(tokens) - self._block + 1, self._block):
            parent = sha256(parent + "\x00".join(tokens[begin : begin + self._block]).encode()).digest()
            chain.append(parent)
        return chain

    def _encode(self, media: Media) -> int:
        """1 where the vision tower has to run, else 0."""
        if self._encoded.get(media.key):
            return 0
        self._encoded.put(media.key, True, media.end - media.begin)
        return 1
