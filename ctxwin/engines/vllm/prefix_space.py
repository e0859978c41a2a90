"""Where a layout's blocks stand in vLLM's prefix cache: shared with plain requests, or apart from them.

vLLM names a block by its parent's name, its tokens, the identifiers of the media that reach into it and, for the first block,
the request's salt. A salt keeps a whole prompt apart. Where KV that no forward would give begins later, it is enough to
mark the identifier of a medium there (``<name>@<digest of that KV>``): the block in which that medium begins gets another
name, and through the chain of parents so does every block behind it, while all blocks in front are those of plain requests.
The mark must be in the block in which such KV begins or in front of it; a layout without a medium there is salted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ctxwin.engines.base import Segment
from ctxwin.hashing import digest


@dataclass(frozen=True)
class Space:
    """Where the blocks of one prompt are looked up and kept.

    Attributes:
        salt: of the whole prompt; "" for the space of exact KV.
        marks: what follows the ``@`` in the identifiers of media, by the offset of their first token in the prompt.
        own: prompt token from which on no request finds these blocks but one of the same layout.
        exact: whether a forward gives what is loaded.
    """

    salt: str
    marks: dict[int, str] = field(default_factory=dict)
    own: int = 0
    exact: bool = False


def space_of(segments: Sequence[Segment], salt: str, block: int) -> Space:
    """The space of a layout.

    Args:
        segments: in prompt order; those `Segment.approximate` are told apart.
        salt: what keeps all of it apart; "" where it is exact.
        block: tokens of a block of vLLM's cache.
    """
    total = sum(segment.encoded.tokens for segment in segments)
    if not salt:
        return Space("", own=total + 1, exact=True)
    begin = 0
    media: list[int] = []  # where each medium up to here begins
    marks: dict[int, list[str]] = {}
    markable = True
    for segment in segments:
        end = begin + segment.encoded.tokens
        media += sorted(begin + span.offset for span in segment.encoded.media)
        if segment.approximate and segment.encoded.tokens:
            # Up to the end of the block in which the segment begins.
            latest = max((at for at in media if at < (begin // block + 1) * block), default=None)
            if latest is None or not segment.key:
                markable = False
            else:
                # And where: the same text may stand in the prompt twice, apart at one place and exact at the other.
                marks.setdefault(latest, []).append(f"{begin}:{segment.key}")
        begin = end
    if not marks or not markable:  # without marks the caller tells nothing of its segments
        return Space(salt)
    return Space("", {at: digest("mark", ids) for at, ids in marks.items()}, min(marks) // block * block)
