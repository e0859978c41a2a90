"""What a user of a prefix cache would have computed, counted as vLLM does it.

A prompt is split into whole blocks; a block is found only behind the same blocks, so hits are the longest common prefix
with anything served before. The last token is always computed. The count favours the opponent where there is a choice:
its cache never forgets a block, and looks cost it nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.engines.base import Encoded

BLOCK = 16
ENCODER_CACHE = 4096
"""Vision embeddings that vLLM keeps by default on a CPU; 64 frames of the bundled model."""


@dataclass(frozen=True)
class Media:
    """A medium in a prompt: what it is, and the half-open range of prompt tokens that stand for it."""

    key: str
    begin: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """A prompt as a prefix cache sees it.

    Attributes:
        tokens: one symbol a token. Placeholders of different media differ, equal symbols are equal tokens.
        media: in order.
    """

    tokens: tuple[str, ...]
    media: tuple[Media, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Encoded]) -> Prompt:
        """The prompt that encoded chunks make, one behind the other."""
        tokens: list[str] = []
        media: list[Media] = []
        for part in parts:
            symbols = [str(token) for token in part.token_ids]
            for span in part.media:
                for i in range(span.offset, span.offset + span.tokens):
                    symbols[i] = f"{span.key}+{i - span.offset}"
                begin = len(tokens) + span.offset
                media.append(Media(span.key, begin, begin + span.tokens))
            tokens += symbols
        return cls(tuple(tokens), tuple(media))


class PrefixCache:
    """Automatic prefix caching over everything served so far, and the encoder cache beside it.

    Args:
        block: tokens a block.
        encoder_size: embeddings the encoder cache holds; the least recently used medium leaves first.
    """

    def __init__(self, block: int = BLOCK, encoder_size: int = ENCODER_CACHE) -> None:
        if block < 1 or encoder_size < 0:
            raise ValueError(f"block must be >= 1 and encoder_size >= 0, got {block} and {encoder_size}")
        self._block = block
        self._size = encoder_size
        self._blocks: set[bytes] = set()
        self._encoded: OrderedDict[str, int] = OrderedDict()

    def serve(self, prompt: Prompt) -> tuple[int, int]:
        """Serves a prompt: (tokens computed, vision encodes run). O(prompt)."""
        if not prompt.tokens:
            raise ValueError("a prompt must have at least one token, got none")
        chain = self._chain(prompt.tokens)
        # vLLM looks up all but the last token, whose logits are needed.
        findable = (len(prompt.tokens) - 1) // self._block
        found = 0
        while found < findable and chain[found] in self._blocks:
            found += 1
        self._blocks.update(chain)
        cached = found * self._block
        encodes = sum(self._encode(m) for m in prompt.media if m.end > cached)
        return len(prompt.tokens) - cached, encodes

    def _chain(self, tokens: Sequence[str]) -> list[bytes]:
        """Hashes of the whole blocks, each over its tokens and its parent's hash."""
        parent, chain = b"", []
        for begin in range(0, len(tokens) - self._block + 1, self._block):
            parent = sha256(parent + "\x00".join(tokens[begin : begin + self._block]).encode()).digest()
            chain.append(parent)
        return chain

    def _encode(self, media: Media) -> int:
        """1 where the vision tower has to run, else 0."""
        if media.key in self._encoded:
            self._encoded.move_to_end(media.key)
            return 0
        size = media.end - media.begin
        if size <= self._size:
            while sum(self._encoded.values()) + size > self._size:
                self._encoded.popitem(last=False)
            self._encoded[media.key] = size
        return 1


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
        self._header: Encoded | None = None
        self._frames: list[Encoded] = []

    def start(self, header: Encoded) -> None:
        """A new stream behind ``header``; what is cached stays."""
        self._header, self._frames, self.held = header, [], []

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
        assert self._header is not None, "start() comes first"
        frames = [self._frames[f] for f in self.prompt(ask)]
        return self.cache.serve(Prompt.of([self._header, *frames, ask.query]))

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
