"""Questions for studies along a stream of the bundled world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxwin.tiny.world import Frame, Kind, Question, questions_for

_ASKED: tuple[Kind, ...] = ("multi_hop", "order", "unbound", "single_hop")


def scene_questions(frames: Sequence[Frame], count: int, rng: np.random.Generator) -> list[Question]:
    """Colours of scene things first, where what a chunk absorbed from others decides."""
    scenes = [q for q in questions_for(frames, 1000, rng, _ASKED) if q.text.startswith("color")]
    bound = [q for q in scenes if q.kind != "single_hop"]
    return (bound + [q for q in scenes if q.kind == "single_hop"])[:count]
