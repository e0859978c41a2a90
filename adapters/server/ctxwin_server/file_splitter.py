"""Helper process that splits files of libraries into passages, for `ctxwin_server.decode_pool`.

Reads requests from stdin and writes answers to stdout until stdin ends. All numbers are little-endian.

A request is the sizes of header and file (``<IQ``), the header as JSON, the file. An answer has the decoder's form
(`ctxwin_server.media_decoder`); its bytes are those that `unpack` reads.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
from collections.abc import Sequence

from ctxwin.errors import BadMedia, MissingExtra
from ctxwin.library.files import passages_of
from ctxwin.library.records import Passage
from ctxwin.media import pack_frames, unpack_frames
from ctxwin_server.media_decoder import ANSWER, DECODED, FAILED

REQUEST = struct.Struct("<IQ")
_SIZE = struct.Struct("<Q")


def main() -> None:
    """Run ``python -m ctxwin_server.file_splitter BYTES``, with at most BYTES of memory."""
    max_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(15)  # a file that takes seconds must not slow down answers
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(REQUEST.size):
        header_size, size = REQUEST.unpack(head)
        header = json.loads(source.read(header_size))
        status, payload = _answer(header["name"], source.read(size), header["caption"], header["most_pixels"])
        sink.write(ANSWER.pack(status, len(payload)))
        sink.write(payload)
        sink.flush()


def _answer(name: str, raw: bytes, caption: str, most_pixels: int) -> tuple[int, bytes]:
    try:
        passages = passages_of(name, raw, caption)
        pixels = sum(m.shape[0] * m.shape[1] * m.shape[2] for p in passages for m in p.chunk.media)
        if pixels > most_pixels:
            raise BadMedia(
                f"the pages and frames of a file must have at most {most_pixels} pixels together (--max-pixels), got {pixels} "
                f"in {name!r}; split it, scale it down, or raise it"
            )
        return DECODED, pack(passages)
    except (BadMedia, MissingExtra) as error:
        return FAILED, str(error).encode()[:2000]
    except Exception as error:  # decoders raise anything on malformed files, MemoryError included
        return FAILED, f"a file must be readable, got {name[:255]!r}: {type(error).__name__}: {error}"[:500].encode()


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
