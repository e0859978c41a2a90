"""Cuts of a rendered chat's prompt into the segments of a window.

A picture with its two marks is one segment. Text between pictures is cut after the header of every turn, so that a turn's end and
the next header belong to the preceding text. A cut depends on nearby tokens alone, so the unchanged part of a conversation is cut
the same way every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.engines.segments import MediaSpan

HEADER = 16
"""Most tokens between the mark of a turn and the end of its header."""
SEEN = HEADER + 2
"""Tokens behind a cut that it may depend on."""
LONG = 256
"""Tokens of a text from which on it is also cut after a line."""
Ids = frozenset[int]


def split(
    ids: Sequence[int],
    media: Sequence[MediaSpan],
    special: Ids,
    wraps: Ids,
    line: Callable[[int], bool],
    known: Sequence[int] = (0,),
) -> list[int]:
    """Return where the segments of a prompt begin, with its length as the last entry.

    Args:
        ids: its tokens.
        media: its pictures, in order.
        special: ids that no text is made of.
        wraps: the ids among them that open or close a picture.
        line: whether an id's text ends a line.
        known: the first entries, from an earlier prompt that began with the same tokens up to `SEEN` behind them.
    """
    end, begin = len(ids), 0
    cuts = {known[-1], end}
    texts: list[tuple[int, int]] = []  # between the pictures: most of a prompt is pictures
    for medium in media:
        first, stop = medium.offset, medium.offset + medium.tokens
        first -= first > 0 and ids[first - 1] in wraps
        stop += stop < end and ids[stop] in wraps
        if stop > known[-1]:
            cuts |= {first, stop}
            texts.append((begin, first))
        begin = stop
    texts.append((begin, end))
    for begin, stop in texts:
        marks = (i for i in range(max(begin, known[-1] - SEEN), stop) if ids[i] in special)
        cuts.update(cut for i in marks if (cut := _text_begin(ids, i, special, line)) > known[-1])
    starts = [*known[:-1]]
    pictures = {stop for _, stop in texts[:-1]}
    for begin, stop in pairwise(sorted(cuts)):
        starts.append(begin)
        if begin not in pictures and stop - begin > LONG:
            for i in range(begin + LONG - 1, stop - 1):
                if i + 1 - starts[-1] >= LONG and line(ids[i]):
                    starts.append(i + 1)
    return [*starts, end]


def _text_begin(ids: Sequence[int], at: int, special: Ids, line: Callable[[int], bool]) -> int:
    """Return where the text after the mark at ``at`` begins; 0 where another mark comes first."""
    for i in range(at + 1, min(len(ids), at + 1 + HEADER)):
        if ids[i] in special:
            return 0
        if line(ids[i]):
            return i + 1 if i + 1 < len(ids) and ids[i + 1] not in special else 0
    return min(at + 1, len(ids) - 1)
