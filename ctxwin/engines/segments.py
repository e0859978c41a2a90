"""Prompts as engines take them: chunks in tokens and positions, and the segments of a layout."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.states import has_maps

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.patch import Patch


@dataclass(frozen=True)
class MediaSpan:
    """One image, video or sound inside an encoded chunk.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        key: store key of the vision embeddings (``embed/<digest>``).
        offset: index of its first placeholder token within the chunk; negative within a part that begins inside it.
        tokens: number of its tokens: placeholders, and words among them.
        grid_thw: patch grid before merging (t, h, w); t counts tiles where a picture is cut into them (InternVL).
            For sound (1, 1, frames of its spectrogram).
        seconds_per_grid: seconds per temporal grid step; None for images, and for videos whose times are text
            (Qwen3-VL: each temporal group is a span of its own).
        words: indices of its tokens, ascending from 0, that are words instead of placeholders: row breaks (Mistral 3), tile
            marks (SmolVLM), tokens of the sound of a video, or of a sound's video. The tower gives no embedding for them.
        whole: its placeholders also attend to later ones (Gemma 3), so all of them are computed in one forward.
        sound: whether it is a video with its sound, or the sound of one.
    """

    modality: str
    key: str
    offset: int
    tokens: int
    grid_thw: tuple[int, int, int]
    seconds_per_grid: float | None = None
    words: tuple[int, ...] = ()
    whole: bool = False
    sound: bool = False

    def placeholders(self, begin: int, end: int) -> tuple[list[int], slice]:
        """Return the placeholders among its tokens ``[begin, end)``, and the slice of their embedding rows."""
        if not self.words:
            return list(range(begin, end)), slice(begin, end)
        words = set(self.words)
        places = [i for i in range(begin, end) if i not in words]
        first = begin - bisect_left(self.words, begin)
        return places, slice(first, first + len(places))


@dataclass(frozen=True)
class Encoded:
    """A chunk as one engine counts it.

    Attributes:
        chunk_id: content identity of what was encoded.
        token_ids: one id per KV slot (media placeholders expanded).
        positions: int64 ``[3, T]`` relative to the chunk's own origin.
        advance: the next chunk starts at this chunk's start + ``advance``, by the engine's own rule: max position + 1
            for text and images; after a video transformers continues from its height and width, vLLM from its end.
        media: the images, videos and sounds in it, in order.
    """

    chunk_id: str
    token_ids: tuple[int, ...]
    positions: np.ndarray = field(compare=False)  # follows from the ids and the media
    advance: int
    media: tuple[MediaSpan, ...] = ()

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> Encoded:
        """Tokens of a text alone, each a position behind the one before it."""
        return cls("", tuple(map(int, ids)), np.tile(np.arange(len(ids), dtype=np.int64), (3, 1)), len(ids))

    @classmethod
    def joined(cls, parts: Sequence[Encoded]) -> Encoded:
        """Return neighbouring chunks as one."""
        ids: list[int] = []
        media, positions, at = [], [], 0
        for part in parts:
            media += [replace(m, offset=m.offset + len(ids)) for m in part.media]
            positions.append(part.positions + at)
            ids += part.token_ids
            at += part.advance
        return cls("", tuple(ids), np.concatenate(positions, axis=1), at, tuple(media))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def media_ranges(self) -> tuple[tuple[int, int], ...]:
        """First token and number of tokens of each medium that may be cut, in order; a video with its sound is one."""
        ranges: list[tuple[int, int]] = []
        for offset, tokens in sorted((m.offset, m.tokens) for m in self.media if not m.whole):
            begin, count = ranges[-1] if ranges else (0, 0)
            if offset < begin + count:
                ranges[-1] = (begin, max(count, offset + tokens - begin))
            else:
                ranges.append((offset, tokens))
        return tuple(ranges)

    def part(self, begin: int, end: int) -> Encoded:
        """Return the tokens ``[begin, end)`` at their positions, with every medium that overlaps them, uncut.

        Only the last part has an ``advance``.
        """
        inside = (m for m in self.media if m.offset < end and begin < m.offset + m.tokens)
        media = tuple(replace(m, offset=m.offset - begin) for m in inside)
        advance = self.advance if end == self.tokens else 0
        return Encoded(self.chunk_id, self.token_ids[begin:end], self.positions[:, begin:end], advance, media)


@dataclass(frozen=True)
class Segment:
    """One chunk at its place in a prompt, with the KV that serves it: the unit that a window passes to an engine.

    Attributes:
        encoded: its tokens.
        start: position of its origin.
        span: its KV in any frame, relocated by the engine to ``start``; None: the engine computes it in place.
        capture: whether the engine returns the KV it computed (only meaningful where ``span`` is None).
        span_key: stable name of ``span``, or of the KV that is computed in its place; "" where it has none.
        patch: reconditions ``span`` as it is moved to ``start``; None: the span is served as it is.
        patch_key: stable name of ``patch``.
        approximate: whether its KV differs from that of a forward after the preceding segments as they are served.
            Segments before the first approximate one may share an engine's prefix cache with plain requests, whatever the
            call's salt.
        recompute: token ranges, ascending and disjoint, that are computed in place although there is a ``span``; the span
            serves the other tokens (MPIC, section 4.1). ``capture`` then returns all of it as served. Excludes a patch.
            Runs of such tokens are computed at once, each behind the others' spans: see `gap_runs`.
        merged: whether ``span`` has fewer slots than there are tokens (`ctxwin.kv.merge`); the next segment keeps its
            position. Implies ``approximate``; excludes a patch and ``recompute``.
        cached: whether the engine's prefix cache is known to hold its exact KV and that of all segments in front, but for what
            takes less time to compute than to load: it needs no ``span``. What has left that cache meanwhile is computed.
        canonical: of a part that ``recompute`` names: what the span has in its place.
    """

    encoded: Encoded
    start: int
    span: SpanKV | None = None
    capture: bool = False
    span_key: str = ""
    patch: Patch | None = None
    patch_key: str = ""
    approximate: bool = False
    recompute: tuple[tuple[int, int], ...] = ()
    merged: bool = False
    cached: bool = False
    canonical: SpanKV | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.encoded.tokens

    @property
    def available(self) -> bool:
        """True if its KV need not be computed."""
        return self.cached or self.span is not None

    @property
    def slots(self) -> int:
        """Number of slots its KV takes."""
        return self.span.tokens if self.merged and self.span is not None else self.encoded.tokens

    @property
    def places(self) -> np.ndarray:
        """Positions of its slots relative to its origin: int64 ``[3, slots]``."""
        return self.encoded.positions[:, : self.slots]

    @property
    def key(self) -> str:
        """Stable name of the KV as served; "" where a part of it has none."""
        if self.patch is None:
            return self.span_key
        return f"{self.span_key}+{self.patch_key}" if self.span_key and self.patch_key else ""

    @property
    def gap(self) -> bool | None:
        """Return True for a part that is computed over its canonical, False for other missing KV, None for what is loaded."""
        return None if self.available else self.canonical is not None

    def parts(self) -> list[Segment]:
        """Split the segment where it changes between computing and loading; a list of itself where it does not.

        Positions continue through the parts.

        Raises:
            ValueError: ranges outside its tokens, or through a medium that is computed as a whole.
        """
        if not self.recompute or self.span is None:
            return [self]
        cuts = [0, *(at for pair in self.recompute for at in pair), self.tokens]
        if cuts != sorted(cuts) or self.patch is not None:
            raise ValueError(
                f"recompute must be ascending ranges within {self.tokens} tokens, over a span without a patch, got "
                f"{self.recompute}"
            )
        whole = [m for m in self.encoded.media if m.whole]
        if any(m.offset < at < m.offset + m.tokens for m in whole for at in cuts):
            raise ValueError(f"recompute must not cut a picture whose tokens see later ones, got {self.recompute}")
        parts = []
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if begin < end:
                key = f"{self.span_key}[{begin}:{end}]" if self.span_key else ""
                stored, gap = self.span.slice(begin, end), bool(i % 2)
                part = replace(self, encoded=self.encoded.part(begin, end), span_key=key, recompute=())
                span, canonical = (None, stored) if gap else (stored, None)
                parts.append(replace(part, span=span, canonical=canonical, capture=self.capture and gap))
        return parts


def without_spans(layout: Sequence[Segment]) -> list[Segment]:
    """Return the layout of which everything is computed in place, which is exact."""
    return [
        replace(s, span=None, patch=None, patch_key="", approximate=False, recompute=(), merged=False, cached=False)
        for s in layout
    ]


def gap_runs(parts: Sequence[bool | None], first: int) -> list[range]:
    """Return the runs of parts from ``first`` on that are computed at once, each between loaded parts.

    Every run sees what stands in front of it as it is stored, so that none depends on another; in MPIC's single step (section
    4.1) a token also sees what is computed in front of it in that step. A chunk without KV ends what is computed at once, and
    so does the end: a run that touches them is computed with them, behind all that is served.

    Args:
        parts: `Segment.gap` of each.

    Returns:
        Ranges of indices. Empty where none begins at ``first``, as within a run.
    """
    runs: list[range] = []
    if first and parts[first - 1] is not None:
        return runs
    for gap, group in itertools.groupby(range(first, len(parts)), lambda i: parts[i] is not None):
        run = list(group)
        if gap and (run[-1] + 1 == len(parts) or not all(parts[i] for i in run)):
            break
        if gap:
            runs.append(range(run[0], run[-1] + 1))
    return runs


def partial_ranges(media: Iterable[tuple[int, int]], count: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the token ranges of a chunk that MPIC-k computes: all text, and the first ``count`` tokens of each medium.

    A medium that may not be cut is left out of ``media`` and computed like text. Ranges are ascending and disjoint.

    MPIC, section 4.2; EPIC (arXiv 2410.15332) computes the first tokens of each chunk.

    Args:
        media: first token and number of tokens of each medium, ascending.
        tokens: length of the chunk.
    """
    ranges: list[tuple[int, int]] = []
    begin = 0
    for offset, length in (*media, (tokens, 0)):
        end = offset + min(count, length)
        if ranges and ranges[-1][1] == begin < end:
            ranges[-1] = (ranges[-1][0], end)
        elif begin < end:
            ranges.append((begin, end))
        begin = offset + length
    return tuple(ranges)


def check_states(model: str, segments: Sequence[Segment], patches: bool = False) -> None:
    """Check that the states of a hybrid's spans belong to the segments that precede them.

    Args:
        model: name for the error message.
        patches: whether the engine serves patches of states.

    Raises:
        UnsupportedModel: a span was computed after other segments, so its states are not those of this prompt.
        ValueError: a span without states.
    """
    for segment in segments:
        patched = segment.patch is not None and not (patches and segment.patch.states and segment.approximate)
        changed = patched or segment.merged or segment.recompute
        if segment.span is not None and (changed or (segment.approximate and not has_maps(segment.span.states))):
            raise UnsupportedModel(
                f"{model} has recurrent layers, whose states depend on every preceding token: its KV is served "
                "after exactly the same tokens; use Fidelity('exact')"
            )
        if segment.span is not None and segment.span.tokens and not segment.span.states:
            raise ValueError(f"the span of chunk {segment.encoded.chunk_id[:12]} must hold states after it, got none")


@dataclass(frozen=True)
class Call:
    """A planned call of `Engine.prefill` or `Engine.generate`.

    Attributes:
        layout: its segments, the target of a prefill last; tensors of stored spans may be empty.
        salt: the call's salt.
        placeholder: stands in for KV that an earlier request of the call will have computed.
        has_query: whether a query follows the layout.
        query: that query, where it is known.
    """

    layout: Sequence[Segment]
    salt: str = ""
    placeholder: SpanKV | None = None
    has_query: bool = False
    query: Encoded | None = None
