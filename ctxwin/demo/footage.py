"""What the agent watches: a clip of the generated world with known answers, a user's video, or a log for a text model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ctxwin.chunk import Chunk
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
LOG_QUESTIONS = ("Where is the light on?", "Which doors are open?", "What was seen last?", "Which rooms are empty?")
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
    """Frames with questions about any selection of them. Frames are named by their index."""

    times: Sequence[float]
    kinds: tuple[str, ...]

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The frames as chunks."""

    def question(self, frames: Frames, kind: str, rng: Rng, about: Collection[int] | None = None) -> Query | None:
        """Return a question of a kind about ``frames`` in this order (about one of ``about``), or None."""

    def look_back(self, frames: Frames, evicted: Frames, kind: str, rng: Rng) -> tuple[tuple[int, ...], Query] | None:
        """Return evicted frames to recall to their places among ``frames``, with a question about one, or None."""

    def expendable(self, frames: Frames) -> int:
        """Return the frame of the window that a branch should drop first."""


class WorldFootage:
    """A clip of the bundled model's world: rendered to a video file, which is then decoded like any other, once needed.

    Args:
        path: where the clip is written; ``.mp4``.
        seed: of the stream.
        frames: length of the stream; shown for a second each.
        window: frames within which every number is unique.
    """

    kinds: tuple[str, ...] = ("multi_hop", "single_hop")

    def __init__(self, path: Path, seed: int, frames: int, window: int) -> None:
        from ctxwin.tiny.world import make_stream

        self._path = path
        self._world: list[Frame] = make_stream(seed, frames, window=window)
        self.times: Sequence[float] = [float(i) for i in range(frames)]

    @cached_property
    def chunks(self) -> Sequence[Chunk]:
        from ctxwin.tiny.clip import write_clip

        write_clip(self._path, self._world)
        decoded, _ = decode_video(self._path, fps=1.0)
        if len(decoded) != len(self._world):
            raise BadMedia(f"the clip must hold {len(self._world)} frames, got {len(decoded)} from {self._path}")
        return _pictures(decoded, self.times)

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


class _OpenFootage:
    """Frames whose questions have no truth; answers are compared with a re-prefill only."""

    kinds: tuple[str, ...] = ("open",)

    def __init__(self, chunks: Sequence[Chunk], times: Sequence[float], questions: Sequence[str]) -> None:
        self.chunks, self.times, self._questions = chunks, times, tuple(questions)
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


class VideoFootage(_OpenFootage):
    """A user's video.

    Args:
        path: a video file.
        fps: frames sampled per second.
        questions: asked in turn.
        limit: maximum number of frames, from the beginning.
        least: minimum number of frames.

    Raises:
        BadMedia: a file that cannot be decoded, ends early, or is too short.
    """

    def __init__(
        self, path: Path, fps: float, questions: Sequence[str] = (), limit: int | None = None, least: int = 1
    ) -> None:
        end = None if limit is None else max(limit, least) / fps
        try:
            decoded, rate = decode_video(path, end=end, fps=fps)
        except BadMedia:  # it is shorter, or the reason stands
            decoded, rate = decode_video(path, fps=fps)
        if len(decoded) < least:
            raise BadMedia(
                f"the video must give at least {least} frames, got {len(decoded)} at {fps:g} a second; raise --fps or "
                "lower --window"
            )
        times = [i / rate for i in range(len(decoded[:limit]))]
        super().__init__(_pictures(decoded[:limit], times), times, questions or DEFAULT_QUESTIONS)


class LogFootage(_OpenFootage):
    """The log of a house, for a model that sees no pictures: a frame is what is noted of each room at one time."""

    def __init__(self, seed: int, frames: int) -> None:
        import numpy as np

        rng = np.random.default_rng([seed, 11])
        times = [60.0 * i for i in range(frames)]
        super().__init__([Chunk.text(self._entry(minute, rng)) for minute in range(frames)], times, LOG_QUESTIONS)

    @staticmethod
    def _entry(minute: int, rng: Rng) -> str:
        rooms = ("hall", "kitchen", "cellar", "attic", "garage")
        noted = (("The light is on", "It is dark"), ("the door is open", "the door is shut"), ("nobody is", "a cat is"))
        lines = [f"Minute {minute}."]
        for room in rooms:
            light, door, animal = (choices[int(rng.integers(2))] for choices in noted)
            lines.append(f"{light} in the {room}, {door}, and {animal} there.")
        return " ".join(lines) + "\n"


def _pictures(decoded: Iterable[np.ndarray], times: Sequence[float]) -> list[Chunk]:
    return [Chunk.image(pixels, text=f"t={time:g} s") for pixels, time in zip(decoded, times, strict=True)]
