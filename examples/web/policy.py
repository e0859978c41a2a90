"""Policies of a web agent: a script in the shop, the model itself on any other site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from web.pages import Pages

from ctxwin import Window

FAR = 16
"""Maximum distance of look-backs: within it, and three pages for the charts, every number is unique (`Pages`)."""


class Task(TypedDict):
    """A page to ask about, and the pages to look back at for it. Plain JSON: it is part of the graph's state."""

    about: int
    back: list[int]


class Shopper:
    """Walks on through the shop. Asks about every page, and in turn about another one in view and an evicted one."""

    max_tokens = 4
    reserve_tokens = 48  # tokens of a question and its answer

    def __init__(self, pages: Pages, seed: int) -> None:
        self._pages, self._seed = pages, seed

    def link(self, links: Sequence[str], window: Window) -> str | None:
        return "Next" if "Next" in links else None

    def tasks(self, page: int, in_view: Sequence[int]) -> list[Task]:
        """Return the questions on a new page, with the pages ``in_view``."""
        rng = np.random.default_rng([self._seed, page])
        evicted = [p for p in range(max(0, page - FAR), page) if p not in in_view]
        tasks = [Task(about=page, back=[])]
        if evicted and page % 2 == 0:
            about = int(rng.choice(evicted))
            tasks.append(Task(about=about, back=self._pages.needs(about, rng)))
        elif len(in_view) > 1:
            tasks.append(Task(about=int(rng.choice(in_view[:-1])), back=[]))
        return tasks

    def question(self, page: int, in_view: Sequence[int]) -> tuple[str, str | None]:
        """Return a question about a page in view, and the right answer."""
        rng = np.random.default_rng([self._seed, page, *in_view])
        return next(self._pages.questions(page, in_view, rng))


class Tourist:
    """Opens the links that the model chooses. Asks about every page, and again about each evicted one."""

    max_tokens = 48
    reserve_tokens = 256

    def link(self, links: Sequence[str], window: Window) -> str | None:
        """Return the first link that the answer names, by default the first one of the page."""
        if not links:
            return None
        reply = window.ask(f"Which one of these links do you open next? {'; '.join(links[:9])}", max_tokens=16).text
        return next((link for link in links if link.lower() in reply.lower()), links[0])

    def tasks(self, page: int, in_view: Sequence[int]) -> list[Task]:
        evicted = [p for p in range(page) if p not in in_view]
        return [Task(about=page, back=[]), *(Task(about=p, back=[p]) for p in evicted[-1:])]

    def question(self, page: int, in_view: Sequence[int]) -> tuple[str, str | None]:
        return f"What does the page at t={page} s offer? Answer in one sentence.", None
