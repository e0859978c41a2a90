"""Studies along streams of the bundled world: their questions, and windows that find nothing of each other's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from ctxwin.tiny.world import Frame, Kind, Question, questions_for

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

_CONDITIONED = ("span/", "patch/", "orbit/")
_ASKED: tuple[Kind, ...] = ("multi_hop", "order", "unbound", "single_hop")


def scene_questions(frames: Sequence[Frame], count: int, rng: np.random.Generator) -> list[Question]:
    """Colours of scene things first, where what a chunk absorbed from others decides."""
    scenes = [q for q in questions_for(frames, 1000, rng, _ASKED) if q.text.startswith("color")]
    bound = [q for q in scenes if q.kind != "single_hop"]
    return (bound + [q for q in scenes if q.kind == "single_hop"])[:count]


@contextmanager
def isolated(engine: Engine) -> Iterator[None]:
    """Drop conditioned KV and patches that were stored inside; vision embeddings stay.

    Otherwise a chunk could be served from exact KV of an earlier window, which a window alone would not have. This also
    bounds the store. Windows opened inside must be closed inside, or the KV that they lease stays.
    """
    existing = _conditioned_keys(engine)
    try:
        yield
    finally:
        for key in _conditioned_keys(engine) - existing:
            engine.repo.delete(key)


def _conditioned_keys(engine: Engine) -> set[str]:
    return {key for prefix in _CONDITIONED for key in engine.store.list(prefix)}
