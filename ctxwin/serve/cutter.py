"""The program that cuts files of libraries into passages for `ctxwin.serve.decoding`: in a process of its own.

Reads requests from stdin and writes answers to stdout until stdin ends. All numbers are little-endian.

A request is the sizes of what is said of the file and of the file (``<IQ``), JSON, the file. An answer is as the decoder's
(`ctxwin.serve.decoder`), with what `unpack` reads as its bytes.
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
from ctxwin.serve.decoder import ANSWER, DECODED, FAILED

REQUEST = struct.Struct("<IQ")
_SIZE = struct.Struct("<Q")


def main() -> None:
    """``python -m ctxwin.serve.cutter BYTES``: at most BYTES of memory."""
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(15)  # a file that takes seconds must not slow down everybody's answers
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(REQUEST.size):
        told, size = REQUEST.unpack(head)
        said = json.loads(source.read(told))
        status, made = _answer(said["name"], source.read(size), said["caption"], said["most_pixels"])
        sink.write(ANSWER.pack(status, len(made)))
        sink.write(made)
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
    except Exception as error:  # whatever a decoder raises on a file that somebody made up, MemoryError included
        return FAILED, f"a file must be readable, got {name[:255]!r}: {type(error).__name__}: {error}"[:500].encode()


def pack(passages: Sequence[Passage]) -> bytes:
    """``passages`` with the pixels of their media."""
    parts = [json.dumps([p.model_dump(mode="json") for p in passages]).encode()]
    for passage in passages:
        for part in passage.chunk.media:
            pixels = passage.chunk.pixels(part)
            assert pixels is not None
            parts.append(pack_frames(pixels))
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def unpack(made: bytes) -> list[Passage]:
    """What `pack` made."""
    parts, at = [], 0
    while at < len(made):
        (size,) = _SIZE.unpack_from(made, at)
        at += _SIZE.size
        parts.append(made[at : at + size])
        at += size
    passages, blobs = [Passage.model_validate(p) for p in json.loads(parts[0])], iter(parts[1:])
    return [
        p.model_copy(update={"chunk": p.chunk.holding({m.content: unpack_frames(next(blobs)) for m in p.chunk.media})})
        for p in passages
    ]


if __name__ == "__main__":
    main()
