"""Pages of the bundled model's world, and questions about them whose answers are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ctxwin.tiny import world
from ctxwin.tiny.sprites import COLORS


class Pages:
    """Colour charts and shelves of grey things; a shape has the colour of the newest chart before its shelf.

    Args:
        seed: of the pages.
        count: how many. Numbers are unique among any 24 of them in a row.
    """

    def __init__(self, seed: int, count: int) -> None:
        if count < 1:
            raise SystemExit(f"--steps must be at least 1, got {count}")
        self.frames = world.make_stream(seed, count, window=min(count, 24))
        self._colors = world.bound_colors(self.frames)

    def __len__(self) -> int:
        return len(self.frames)

    def title(self, page: int) -> str:
        return f"{'Colour chart' if self.frames[page].role == 'legend' else 'Shelf'} {page}"

    def questions(self, about: int, in_view: Sequence[int], rng: np.random.Generator) -> Iterator[tuple[str, str]]:
        """Yield questions about one of the pages ``in_view``, with their answers; first those whose answer a chart decides.

        The answers are the same by the pages in view and by all pages: the chart that decides is in view.
        """
        frames = [self.frames[page] for page in in_view]
        for kinds in (("multi_hop", "order"), ("single_hop",)):
            for q in world.questions_for(frames, 1000, rng, kinds):
                color = self._colors[about][self.frames[about].mark == q.mark]
                if in_view[q.frame] == about and (q.text[:5] == "shape" or q.answer == COLORS[int(color[0])]):
                    yield q.text, q.answer

    def needs(self, page: int, rng: np.random.Generator) -> list[int]:
        """Return the page, preceded by one of the charts that define the colours of its products."""
        past, marks = self.frames[max(0, page - 3) : page + 1], self.frames[page].marks
        first = page + 1 - len(past)
        charts = {first + chart for mark in marks for chart in world.antecedents(past, mark)[-1:]}
        return [*rng.permutation(sorted(charts))[:1].tolist(), page]
