"""Namespaces of a layout's blocks in vLLM's prefix cache: shared with plain requests, or separate.

vLLM names a block by its parent's name, its tokens, the identifiers of the media that reach into it and, for the first block,
the request's salt. A salt separates a whole prompt. Where KV that no forward would compute begins later, it is enough to mark
the identifier of a medium there (``<name>@<digest of that KV>``): the block in which that medium begins gets another name, and
through the chain of parents so does every later block, while all earlier blocks are those of plain requests. The mark must be in
the block in which such KV begins or in an earlier one; a layout without a medium there is salted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ctxwin.engines.segments import Segment
from ctxwin.hashing import digest


@dataclass(frozen=True)
class CacheNamespace:
    """Namespace in which the blocks of one prompt are looked up and kept.

    Attributes:
        salt: salt of the whole prompt; "" for the namespace of exact KV.
        marks: suffixes after the ``@`` in the identifiers of media, by the offset of their first token in the prompt.
        private_from: prompt token from which on only requests of the same layout find these blocks.
        exact: True if the loaded KV is what a forward would compute.
    """

    salt: str
    marks: dict[int, str] = field(default_factory=dict)
    private_from: int = 0
    exact: bool = False


def namespace_of(segments: Sequence[Segment], salt: str, block: int) -> CacheNamespace:
    """Return the namespace of a layout, in which segments that are `Segment.approximate` are separated.

    ``salt`` separates all of it, "" where it is exact; ``block``: tokens of a block of vLLM's cache.
    """
    total = sum(segment.encoded.tokens for segment in segments)
    if not salt:
        return CacheNamespace("", private_from=total + 1, exact=True)
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
                # With its place: the same text may be in the prompt twice, approximate at one place and exact at the other.
                marks.setdefault(latest, []).append(f"{begin}:{segment.key}")
        begin = end
    if not marks or not markable:  # without marks the caller gives no keys for its segments
        return CacheNamespace(salt)
    return CacheNamespace("", {at: digest("mark", ids) for at, ids in marks.items()}, min(marks) // block * block)
