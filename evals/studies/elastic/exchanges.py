"""What is read and answered: a picture and turns of question and answer, from a file or generated."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.evals.items import Item
from ctxwin.evals.tasks.tiny import SPACE
from ctxwin.hashing import digest
from ctxwin.tiny.world import Frame, questions_for, render, sample_frames

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.tiny.world import Role

FRAMES, QUESTIONS = 4, 8


@dataclass(frozen=True)
class Turn:
    """A question, and the answer that perplexity is measured on."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Exchange:
    """What is placed, and the turns behind it.

    Attributes:
        name: of the exchange; intervals are over exchanges.
        load: makes the chunks.
        count: how many.
        turns: in order; at least one.
    """

    name: str
    load: Callable[[], Sequence[Chunk]] = field(repr=False, compare=False)
    count: int
    turns: tuple[Turn, ...]

    def item(self, index: int) -> Item:
        """The first question as an item."""
        first = self.turns[0]
        return Item(
            task="elastic",
            index=index,
            load=self.load,
            count=self.count,
            placed=tuple(range(self.count)),
            query=first.prompt,
            target=first.answer,
            doc_id=self.name,
            cluster=self.name,
            digest=digest("exchange", self.name, [[t.prompt, t.answer] for t in self.turns]),
        )


@dataclass(frozen=True)
class Script:
    """An exchange as tokens.

    Attributes:
        answers: token ids of each turn's answer.
        between: token ids from the end of each answer but the last to where the next one begins: the turn's end, the
            next question, the answer's opening.
    """

    answers: tuple[tuple[int, ...], ...]
    between: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Exchanges of one shape are fed alike."""
        return tuple(map(len, self.answers)), tuple(map(len, self.between))


def script(engine: HFEngine, exchange: Exchange) -> Script:
    """Tokens of the answers and of what stands between them; ValueError for an answer without tokens."""
    answers, between = [], []
    for i, turn in enumerate(exchange.turns):
        ids = tuple(engine.encode(Chunk.text(turn.answer)).token_ids) if turn.answer else ()
        if not ids:
            raise ValueError(f"answers must hold at least one token, got {turn.answer!r} in {exchange.name}")
        answers.append(ids)
        if i + 1 < len(exchange.turns):
            query = engine.encode_query(turn.prompt)
            tail = engine.encode_exchange(turn.prompt, ids).token_ids[query.tokens + len(ids) :]
            between.append((*tail, *engine.encode_query(exchange.turns[i + 1].prompt).token_ids))
    return Script(tuple(answers), tuple(between))


def generated(n: int, seed: int = 0) -> list[Exchange]:
    """``n`` contexts of frames of the bundled model's world, each asked eight different questions in a row.

    The bundled model answers in one word and writes no sentences, so a longer text of its own is a row of such turns.
    Seeds are held out, as in `ctxwin.evals.tasks.tiny`.
    """
    if n < 1 or seed < 0:
        raise ValueError(f"n must be >= 1 and seed >= 0, got {n} and {seed}")
    return [_exchange(seed, index) for index in range(n)]


def _exchange(seed: int, index: int) -> Exchange:
    rng = np.random.default_rng((SPACE, seed, 0x656C6173, index))
    while True:
        roles: list[Role] = ["legend", *("legend" if rng.random() < 0.5 else "scene" for _ in range(FRAMES - 1))]
        frames = sample_frames(rng, roles)
        asked = questions_for(frames, QUESTIONS, rng, ("single_hop", "multi_hop"))
        if len(asked) == QUESTIONS:
            turns = tuple(Turn(q.text, q.answer) for q in asked)
            return Exchange(f"generated-{seed}-{index}", partial(_rendered, frames), FRAMES, turns)


def _rendered(frames: Sequence[Frame]) -> list[Chunk]:
    return [Chunk.image(render(frame), keep_source=False) for frame in frames]


def read_exchanges(path: Path, n: int | None = None) -> list[Exchange]:
    """Exchanges of a file of JSON lines: ``{"prompt", "answer", "image"?}``, images relative to the file.

    LLaVA-Description and MM-Vet, which the paper measures on, become such files by renaming fields. ``prompt`` stands
    behind the picture; without a picture it is itself what is placed. Empty lines are skipped.

    Raises ValueError, naming the line, for what is no such object, and where there are none.
    """
    if not path.is_file():
        raise ValueError(f"data must be a file of JSON lines, got {str(path)!r}, which is none")
    found: list[Exchange] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip() and (n is None or len(found) < n):
            found.append(_read(path, number, line))
    if not found:
        raise ValueError(f"data must hold at least one line, got none in {str(path)!r}")
    return found


def _read(path: Path, number: int, line: str) -> Exchange:
    try:
        row: Any = json.loads(line)
        prompt, answer, image = row["prompt"], row["answer"], row.get("image")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"line {number} of {path} must be {{'prompt', 'answer', 'image'?}}, got {error!r}") from error
    if not all(isinstance(x, str) and x for x in (prompt, answer)) or not isinstance(image, str | None):
        raise ValueError(f"prompt and answer must be texts that are not empty, got line {number} of {path}")
    name = f"{path.name}:{number}"
    if image is None:
        return Exchange(name, partial(_text, prompt), 1, (Turn("", answer),))
    return Exchange(name, partial(_picture, path.parent / image), 1, (Turn(prompt, answer),))


def _text(prompt: str) -> list[Chunk]:
    return [Chunk.text(prompt)]


def _picture(path: Path) -> list[Chunk]:
    return [Chunk.image(path)]
