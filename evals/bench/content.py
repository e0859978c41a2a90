"""Chunks of an exact number of tokens, of random pixels and random text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ctxwin.chunk import Chunk, TokensPart

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

TEXT_TOKENS = 8
"""Least text in front of a picture."""
_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "wi", "xo", "zu", " ", " ", "\n")


def make_chunk(engine: Engine, tokens: int, seed: int) -> Chunk:
    """A chunk of exactly ``tokens`` tokens: some text and the largest square picture that fits behind it.

    Text alone where the model has no eyes or the chunk is too small. The same seed gives the same chunk.
    Cost: one run of the vision tower for each size tried, rarely more than one. Raises ValueError for ``tokens`` < 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    rng = np.random.default_rng(seed)
    side = math.isqrt(max(0, tokens - TEXT_TOKENS - 2)) if engine.spec.vision else 0
    while side >= 2:
        picture = Chunk.image(rng.integers(0, 256, (28 * side, 28 * side, 3), dtype=np.uint8), keep_source=False)
        left = tokens - engine.encode(picture).tokens
        if left == 0:
            return picture
        if left > 0:
            lead = TokensPart(ids=words(engine, left, rng))
            return picture.model_copy(update={"parts": (lead, *picture.parts)})
        side -= max(1, -left // (2 * side))  # one side less takes about that many tokens
    return Chunk.tokens(list(words(engine, tokens, rng)))


def words(engine: Engine, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """``count`` ordinary token ids, none of them special: those of random words."""
    ids: tuple[int, ...] = ()
    while len(ids) < count:
        text = "".join(_SYLLABLES[i] for i in rng.integers(0, len(_SYLLABLES), 2 * count + 8))
        ids += engine.encode(Chunk.text(text)).token_ids
    return ids[:count]
