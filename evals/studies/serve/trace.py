"""The look-back trace: sessions of an agent that watches a video, turn by turn, drawn from a seed. No engine, no clock.

A session holds the newest frames of a stream. Its turns:

| turn    | what happens                                                          |
|---------|-----------------------------------------------------------------------|
| now     | a frame arrives, the oldest leaves, a question about what is in view    |
| back    | a frame that left comes back for one question and leaves again          |
| fork    | another question in a branch, which is then dropped                     |
| reorder | the newest two frames swapped, in a branch, and a question              |

Frames are numbered from 0 in each session; what policies make of the turns is in `policies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["now", "back", "fork", "reorder"]
KINDS: tuple[Kind, ...] = ("now", "back", "fork", "reorder")
QUESTIONS = (
    "What is there now?",
    "What has changed?",
    "Who is at the door?",
    "Where is the car?",
    "Is it dark yet?",
    "What came first?",
)
FORKS, REORDERS = 0.1, 0.05
"""Shares of turns in a branch."""
REACH = 8
"""How many of the latest frames that left may be looked back at."""


@dataclass(frozen=True)
class Turn:
    """One request of one session.

    Attributes:
        session: index.
        number: of this turn within its session.
        frame: that arrives (``now``) or comes back (``back``); -1 for none.
        placed: frames in view when the question is asked, in the order of a window's prompt.
        question: index into `QUESTIONS`.
    """

    session: int
    number: int
    kind: Kind
    frame: int
    placed: tuple[int, ...]
    question: int

    @property
    def query(self) -> str:
        return QUESTIONS[self.question]


@dataclass(frozen=True)
class Mix:
    """What the sessions do.

    Attributes:
        sessions: how many there are.
        frames: in view, looked-back ones not counted.
        look_backs: share of the turns that look back; `FORKS` and `REORDERS` are branches, the rest watches on.
    """

    sessions: int = 32
    frames: int = 6
    look_backs: float = 0.4

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ValueError(f"sessions must be at least 1, got {self.sessions}")
        if self.frames < 2:
            raise ValueError(f"frames must be at least 2, got {self.frames}")
        if not 0 <= self.look_backs <= 1 - FORKS - REORDERS:
            raise ValueError(f"look_backs must be in 0..{1 - FORKS - REORDERS:.2f}, got {self.look_backs}")

    def past(self, session: int, seed: int) -> int:
        """Frames that a session has seen before its first turn: differently many, so that nobody trims in step."""
        draw = np.random.default_rng([seed, session, 1]).integers(0, self.frames)
        return self.frames + 2 + int(draw)


def trace(mix: Mix, turns: int, seed: int) -> list[Turn]:
    """The first ``turns`` turns of all sessions in the order they are asked: each session once in every round, shuffled."""
    rng = np.random.default_rng([seed, 2])
    views = [_View(mix, mix.past(s, seed)) for s in range(mix.sessions)]
    made: list[Turn] = []
    while len(made) < turns:
        made += [views[s].turn(s, rng) for s in rng.permutation(mix.sessions).tolist()]
    return made[:turns]


class _View:
    """What one session has in view."""

    def __init__(self, mix: Mix, past: int) -> None:
        self._mix, self._seen, self._number = mix, past, 0

    def turn(self, session: int, rng: np.random.Generator) -> Turn:
        mix = self._mix
        shares = (1 - mix.look_backs - FORKS - REORDERS, mix.look_backs, FORKS, REORDERS)
        kind = KINDS[int(rng.choice(len(KINDS), p=shares))]
        frame, question = -1, int(rng.integers(len(QUESTIONS)))
        if kind == "now":
            frame = self._seen
            self._seen += 1
        placed = list(range(self._seen - mix.frames, self._seen))
        if kind == "back":
            gone = placed[0]
            frame = int(rng.integers(max(0, gone - REACH), gone))
            placed.insert(0, frame)
        elif kind == "reorder":
            placed[-2:] = placed[:-3:-1]
        made = Turn(session, self._number, kind, frame, tuple(placed), question)
        self._number += 1
        return made


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process in ``[0, seconds)``, ``rate`` a second. The same seed gives the same times, scaled."""
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate and seconds must be positive, got {rate} and {seconds}")
    rng = np.random.default_rng([seed, 3])
    times: list[float] = []
    at = float(rng.exponential())
    while at / rate < seconds:
        times.append(at / rate)
        at += float(rng.exponential())
    return times


def frames_of(turns: Sequence[Turn], mix: Mix, seed: int) -> dict[int, int]:
    """How many frames each session has seen behind ``turns``, those before the first one included."""
    seen = {s: mix.past(s, seed) for s in range(mix.sessions)}
    for turn in turns:
        seen[turn.session] += turn.kind == "now"
    return seen
