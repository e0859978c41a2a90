"""The video that the agent watches: a clip of the generated world with known answers, or a user's own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ctxwin.errors import BadMedia
from ctxwin.video import decode_video

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.tiny.world import Frame

    Frames = Sequence[int]
    Rng = np.random.Generator

DEFAULT_QUESTIONS = (
    "What is happening in these pictures?",
    "Which objects can be seen?",
    "What changed between the first and the last picture?",
    "Where was this recorded?",
)
SYSTEM_PROMPT = "You watch a camera."


@dataclass(frozen=True)
class Query:
    """A question to the window.

    Attributes:
        kind: of the generated world (``single_hop``, ``multi_hop``, ...), or ``open`` for a question without truth.
        frame: the frame it is about; None if it is about all of them.
        needs: earlier frames that this frame's tokens must have absorbed.
        truth: the answer for the frames in the window, in their order; None if it is not known.
    """

    text: str
    kind: str
    frame: int | None = None
    needs: tuple[int, ...] = ()
    truth: str | None = None


class Footage(Protocol):
    """Decoded frames with questions about any selection of them. Frames are named by their index."""

    pixels: Sequence[np.ndarray]
    times: Sequence[float]
    kinds: tuple[str, ...]

    def question(self, frames: Frames, kind: str, rng: Rng, about: Collection[int] | None = None) -> Query | None:
        """Return a question of a kind about ``frames`` in this order (about one of ``about``), or None."""

    def look_back(self, frames: Frames, evicted: Frames, kind: str, rng: Rng) -> tuple[tuple[int, ...], Query] | None:
        """Return evicted frames to recall to their places among ``frames``, with a question about one, or None."""

    def expendable(self, frames: Frames) -> int:
        """Return the frame of the window that a branch should drop first."""


class WorldFootage(Footage):
    """A clip of the bundled model's world: rendered to a video file, which is then decoded like any other.

    Args:
        path: where the clip is written; ``.mp4``.
        seed: of the stream.
        frames: length of the stream; shown for a second each.
        window: frames within which every number is unique.
    """

    kinds: tuple[str, ...] = ("multi_hop", "single_hop")

    def __init__(self, path: Path, seed: int, frames: int, window: int) -> None:
        from ctxwin.tiny.clip import write_clip
        from ctxwin.tiny.world import make_stream

        self._world: list[Frame] = make_stream(seed, frames, window=window)
        write_clip(path, self._world)
        decoded, _ = decode_video(path, fps=1.0)
        if len(decoded) != frames:
            raise BadMedia(f"the clip must hold {frames} frames, got {len(decoded)} from {path}")
        self.pixels: Sequence[np.ndarray] = list(decoded)
        self.times: Sequence[float] = [float(i) for i in range(frames)]

    def question(self, frames: Frames, kind: str, rng: Rng, about: Collection[int] | None = None) -> Query | None:
        from ctxwin.tiny.world import questions_for

        scenes = [self._world[f] for f in frames]
        # With ``about`` all questions are drawn, in random order.
        count = 1 if about is None else len(scenes) * 200
        for q in questions_for(scenes, count, rng, kinds=(kind,)):  # type: ignore[arg-type]  # its kinds are ours
            if about is None or frames[q.frame] in about:
                return Query(q.text, q.kind, frames[q.frame], tuple(frames[i] for i in q.antecedents), q.answer)
        return None

    def look_back(self, frames: Frames, evicted: Frames, kind: str, rng: Rng) -> tuple[tuple[int, ...], Query] | None:
        from ctxwin.tiny.world import antecedents

        for target in rng.permutation(sorted(evicted)).tolist():
            legends: list[int] = []
            if kind != "single_hop":
                past = self._world[: target + 1]
                needed = [antecedents(past, mark)[-1:] for mark in self._world[target].marks]
                # The legends that the scene was seen with; those in the window need no recall.
                legends = sorted({n[0] for n in needed if n})
            for legend in rng.permutation(legends).tolist() if legends else [target]:
                back = sorted({target, legend} - set(frames))
                if not set(back) <= set(evicted):
                    continue
                query = self.question(sorted({*frames, *back}), kind, rng, about=(target,))
                if query is not None:
                    return tuple(back), query
        return None

    def expendable(self, frames: Frames) -> int:
        """Return a scene near the middle: no other frame depends on it."""
        middle = sorted(frames, key=lambda f: abs(frames.index(f) - len(frames) // 2))
        return next((f for f in middle if self._world[f].role == "scene"), middle[0])


class VideoFootage(Footage):
    """A user's video. Its questions have no truth; answers are compared with a re-prefill only.

    Args:
        path: a video file.
        fps: frames sampled per second.
        questions: asked in turn.
        limit: maximum number of frames, from the beginning.
        least: minimum number of frames.

    Raises:
        BadMedia: a file that cannot be decoded, ends early, or is too short.
    """

    kinds: tuple[str, ...] = ("open",)

    def __init__(
        self, path: Path, fps: float, questions: Sequence[str] = (), limit: int | None = None, least: int = 1
    ) -> None:
        decoded, rate = decode_video(path, fps=fps)
        if len(decoded) < least:
            raise BadMedia(
                f"the video must give at least {least} frames, got {len(decoded)} at {fps:g} a second; raise --fps or "
                "lower --window"
            )
        self.pixels: Sequence[np.ndarray] = list(decoded[:limit])
        self.times: Sequence[float] = [i / rate for i in range(len(self.pixels))]
        self._questions = tuple(questions) or DEFAULT_QUESTIONS
        self._question_count = 0

    def question(self, frames: Frames, kind: str, rng: Rng, about: Collection[int] | None = None) -> Query | None:
        self._question_count += 1
        return Query(self._questions[(self._question_count - 1) % len(self._questions)], "open")

    def look_back(self, frames: Frames, evicted: Frames, kind: str, rng: Rng) -> tuple[tuple[int, ...], Query] | None:
        if not evicted:
            return None
        query = self.question(frames, kind, rng)
        return None if query is None else ((int(rng.choice(sorted(evicted))),), query)

    def expendable(self, frames: Frames) -> int:
        return frames[len(frames) // 2]
