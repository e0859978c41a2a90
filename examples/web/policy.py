"""What a web agent does next: a script in the shop, the model itself on any other site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from web.pages import Pages

from ctxwin import Window

FAR = 16
"""Pages the shopper looks back at most: so far, and three pages for the charts, every number is unique (`Pages`)."""


class Task(TypedDict):
    """A page to ask about, and the pages to look back at for it. Plain JSON: it is part of the graph's state."""

    about: int
    back: list[int]


class Shopper:
    """Walks on through the shop. Asks about every page, and in turn about another one in view and one that has left."""

    max_tokens = 4
    reserve_tokens = 48  # tokens of a question and its answer

    def __init__(self, pages: Pages, seed: int) -> None:
        self._pages, self._seed = pages, seed

    def link(self, links: Sequence[str], window: Window) -> str | None:
        return "Next" if "Next" in links else None

    def tasks(self, page: int, shown: Sequence[int]) -> list[Task]:
        """What to ask on a new page, with the pages ``shown`` in view."""
        rng = np.random.default_rng([self._seed, page])
        left = [p for p in range(max(0, page - FAR), page) if p not in shown]
        tasks = [Task(about=page, back=[])]
        if left and page % 2 == 0:
            about = int(rng.choice(left))
            tasks.append(Task(about=about, back=self._pages.needs(about, rng)))
        elif len(shown) > 1:
            tasks.append(Task(about=int(rng.choice(shown[:-1])), back=[]))
        return tasks

    def question(self, page: int, shown: Sequence[int]) -> tuple[str, str | None]:
        """A question about a page in view, and the right answer."""
        rng = np.random.default_rng([self._seed, page, *shown])
        return next(self._pages.questions(page, shown, rng))


class Tourist:
    """Opens the links that the model chooses. Asks about every page, and again about each one that has left."""

    max_tokens = 48
    reserve_tokens = 256

    def link(self, links: Sequence[str], window: Window) -> str | None:
        """The first link that the answer names; the first one of the page where it names none."""
        if not links:
            return None
        said = window.ask(f"Which one of these links do you open next? {'; '.join(links[:9])}", max_tokens=16).text
        return next((link for link in links if link.lower() in said.lower()), links[0])

    def tasks(self, page: int, shown: Sequence[int]) -> list[Task]:
        left = [p for p in range(page) if p not in shown]
        return [Task(about=page, back=[]), *(Task(about=p, back=[p]) for p in left[-1:])]

    def question(self, page: int, shown: Sequence[int]) -> tuple[str, str | None]:
        return f"What does the page at t={page} s offer? Answer in one sentence.", None
