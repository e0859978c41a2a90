"""The opponents of the demo: users of a prefix cache, each with a policy of what stands in the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctxwin.baselines.prefix_cache import BLOCK, ENCODER_CACHE, Media, PrefixCache, Prompt

if TYPE_CHECKING:
    from ctxwin.engines.base import Encoded

__all__ = [
    "BLOCK", "ENCODER_CACHE", "Append", "Ask", "Media", "Opponent", "PrefixCache", "Prompt", "Trim", "opponents",
]  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One ask, as an opponent sees it.

    Attributes:
        placed: our placed frames, in prompt order.
        query: the encoded query.
        recalled: frames among them that were brought back for this ask only, in the order of the video.
        without: frames that this ask (a branch, a test of what matters) leaves out, though the stream still holds them.
        reordered: whether ``placed`` is not in the order of the video.
    """

    placed: tuple[int, ...]
    query: Encoded
    recalled: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    reordered: bool = False


class Opponent:
    """A user of a prefix cache that does as we do: the same prompt for every ask (policy ``naive``).

    Args:
        window: most frames in a prompt.
    """

    name = "naive"

    def __init__(self, window: int) -> None:
        self.window = window
        self.cache = PrefixCache()
        self.held: list[int] = []
        self._system_prompt: Encoded | None = None
        self._frames: list[Encoded] = []

    def start(self, system_prompt: Encoded) -> None:
        """A new stream behind ``system_prompt``; what is cached stays."""
        self._system_prompt, self._frames, self.held = system_prompt, [], []

    def arrive(self, frame: Encoded) -> None:
        """The next frame of the stream."""
        self._frames.append(frame)
        self.held.append(len(self._frames) - 1)

    def drop(self, frames: Iterable[int]) -> None:
        """Frames that left our window for another reason than its size."""
        gone = set(frames)
        self.held = [f for f in self.held if f not in gone]

    def ask(self, ask: Ask) -> tuple[int, int]:
        """Serves an ask: (tokens computed, vision encodes run)."""
        assert self._system_prompt is not None, "start() comes first"
        frames = [self._frames[f] for f in self.prompt(ask)]
        return self.cache.serve(Prompt.of([self._system_prompt, *frames, ask.query]))

    def prompt(self, ask: Ask) -> list[int]:
        """The frames of the prompt, in order."""
        return list(ask.placed)


class Trim(Opponent):
    """Drops the older half when the window is full, so that most frames extend a cached prompt.

    A looked-back frame goes to its place in the order of the video, for that ask only.
    """

    name = "trim"

    def arrive(self, frame: Encoded) -> None:
        self._make_room(1)
        super().arrive(frame)

    def prompt(self, ask: Ask) -> list[int]:
        back = [f for f in ask.recalled if f not in self.held]
        self._make_room(len(back))
        frames = self._with(back)
        if ask.reordered:
            rank = {f: i for i, f in enumerate(ask.placed)}
            # Frames that only this policy still holds go in front: they are the oldest.
            frames.sort(key=lambda f: rank.get(f, -1))
        return [f for f in frames if f not in ask.without]

    def _make_room(self, count: int) -> None:
        if len(self.held) + count > self.window:
            self.held = self.held[max(count, self.window // 2) :]

    def _with(self, back: Sequence[int]) -> list[int]:
        return sorted({*self.held, *back})


class Append(Trim):
    """Like `Trim`, but a looked-back frame goes to the end of the prompt: nothing in front of it is computed again."""

    name = "append"

    def _with(self, back: Sequence[int]) -> list[int]:
        return [*self.held, *back]


def opponents(window: int) -> tuple[Opponent, ...]:
    """All policies: ``naive``, ``trim`` and ``append``, each with a cache of its own."""
    return Opponent(window), Trim(window), Append(window)
