"""Helper process that splits files of libraries into passages, for `ctxwin_server.decode_pool`.

A request is the size of a header (``<I``, little-endian), the header as JSON, and the file; the answer is what `unpack` reads.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence

from ctxwin.errors import BadMedia, MissingExtra
from ctxwin.library.files import passages_of
from ctxwin.library.records import Passage
from ctxwin.media import pack_frames, unpack_frames
from ctxwin_server.helper import serve

HEADER = struct.Struct("<I")
_SIZE = struct.Struct("<Q")


def main() -> None:
    """Run ``python -m ctxwin_server.file_splitter BYTES``, with at most BYTES of memory for a file."""

    def answer(raw: bytes) -> bytes:
        start = HEADER.size + HEADER.unpack_from(raw)[0]
        header = json.loads(raw[HEADER.size : start])
        return _split(header["name"], raw[start:], header["caption"], header["most_pixels"])

    serve(answer, int(sys.argv[1]))


def _split(name: str, raw: bytes, caption: str, most_pixels: int) -> bytes:
    try:
        passages = passages_of(name, raw, caption)
        pixels = sum(m.shape[0] * m.shape[1] * m.shape[2] for p in passages for m in p.chunk.media)
        if pixels > most_pixels:
            raise BadMedia(
                f"the pages and frames of a file must have at most {most_pixels} pixels together (--max-pixels), got {pixels} "
                f"in {name!r}; split it, scale it down, or raise it"
            )
        return pack(passages)
    except (BadMedia, MissingExtra):
        raise
    except Exception as error:  # decoders raise anything on malformed files, MemoryError included
        raise BadMedia(f"a file must be readable, got {name[:255]!r}: {type(error).__name__}: {error}"[:500]) from None


def pack(passages: Sequence[Passage]) -> bytes:
    """Serialise ``passages`` with the pixels of their media."""
    parts = [json.dumps([p.model_dump(mode="json") for p in passages]).encode()]
    for passage in passages:
        for part in passage.chunk.media:
            pixels = passage.chunk.pixels(part)
            assert pixels is not None
            parts.append(pack_frames(pixels))
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def unpack(packed: bytes) -> list[Passage]:
    """Restore the passages that `pack` serialised."""
    parts, at = [], 0
    while at < len(packed):
        (size,) = _SIZE.unpack_from(packed, at)
        at += _SIZE.size
        parts.append(packed[at : at + size])
        at += size
    passages, blobs = [Passage.model_validate(p) for p in json.loads(parts[0])], iter(parts[1:])
    return [
        p.model_copy(update={"chunk": p.chunk.holding({m.content: unpack_frames(next(blobs)) for m in p.chunk.media})})
        for p in passages
    ]


if __name__ == "__main__":
    main()
