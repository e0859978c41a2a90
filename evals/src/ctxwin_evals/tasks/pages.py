"""Two-page documents: a question that takes a step on each page (Kamera, appendix C.1, table 4, for which no data was published).

Pages are generated and drawn, so that the task needs no data set, and truths are known. Page one says who works in which
department, page two which department uses which room. ``two-page`` asks for the room of somebody's department, which binds the
second page to the first; ``two-page/one`` for a department's, which the second page answers alone: its control.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.items import GeneratedTask, Item, Scored

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = {
    "two-page": "a question whose answer takes a step on each of two drawn pages",
    "two-page/one": "as two-page, with a question that the second page answers alone",
}
SPACE = 0x70616765
"""Of the generator's seeds: no other task draws from them."""
WIDTH, HEIGHT, ROWS, SIZE = 448, 448, 8, 22
"""A page in pixels (multiples of 28: 256 tokens on Qwen2.5-VL), its rows, and the letters' height."""
FIRST = ("Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kira", "Leon", "Mona", "Nils")
LAST = (
    "Abel", "Brandt", "Costa", "Duval", "Eriks", "Fuchs", "Grant", "Hoff", "Iyer", "Jansen", "Kovac", "Lund", "Moss", "Nagy",
)  # fmt: skip
DEPARTMENTS = (
    "Acoustics", "Botany", "Ceramics", "Design", "Energy", "Forestry", "Geology", "History", "Imaging", "Journals",
    "Kinetics", "Logistics", "Metals", "Nutrition",
)  # fmt: skip


class TwoPages(GeneratedTask):
    """``two-page`` and its control; see the module. The answer is the first number in the model's words."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name, self.about, self.seed = name, NAMES[name], seed
        self.control = name != "two-page"

    def item(self, index: int) -> Item:
        rng = np.random.default_rng((SPACE, self.seed, index))
        people = [f"{FIRST[i]} {LAST[j]}" for i, j in zip(*(rng.permutation(14)[:ROWS] for _ in "ab"), strict=True)]
        where = [DEPARTMENTS[i] for i in rng.permutation(14)[:ROWS]]
        rooms = [str(room) for room in rng.permutation(np.arange(100, 1000))[:ROWS]]
        second = rng.permutation(ROWS)  # in another order, so that places on the page tell nothing
        target_row = int(rng.integers(ROWS))
        pages = (
            ("Staff", tuple(f"{who}: {what}" for who, what in zip(people, where, strict=True))),
            ("Rooms", tuple(f"{where[i]}: room {rooms[i]}" for i in second)),
        )
        about = f"the {where[target_row]} department" if self.control else f"the department of {people[target_row]}"
        query = f"Which room does {about} use? Answer with the room number only."
        return Item(
            task=self.name,
            index=index,
            load=partial(_drawn, pages),
            count=2,
            placed=(0, 1),
            query=query,
            target=rooms[target_row],
            doc_id=str(index),
            cluster=str(index),
            digest=digest("pages", [list(map(list, pages)), query]),
            asked=1,
            max_tokens=8,
            meta={"row": target_row, "decoys": rooms},
        )

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """The first number must be the room's; an answer without one is wrong. ``decoy``: it is another room of the page."""
        match = re.search(r"\d+", answer)
        number = match.group() if match else ""
        decoy = number != target and number in meta.get("decoys", ())
        return Scored(float(number == target), number, {"decoy": float(decoy)})

    def config(self) -> dict[str, Any]:
        return super().config() | {"seed": self.seed, "page": [WIDTH, HEIGHT], "rows": ROWS}


def _drawn(pages: Sequence[tuple[str, Sequence[str]]]) -> list[Chunk]:
    return [Chunk.image(draw_page(title, rows), keep_source=False) for title, rows in pages]


def draw_page(title: str, rows: Sequence[str]) -> Image:
    """A page: its title and a line for each row, black on white."""
    from PIL import Image, ImageDraw, ImageFont

    page = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(page)
    pen.text((24, 20), title, "black", ImageFont.load_default(SIZE * 3 // 2))
    font, step = ImageFont.load_default(SIZE), (HEIGHT - 90) // len(rows)
    for i, row in enumerate(rows):
        pen.text((24, 76 + i * step), row, "black", font)
    return page
