"""Helper process that decodes pictures for `ctxwin_server.decode_pool`, and may be killed.

Reads requests from stdin and writes answers to stdout until stdin ends. All numbers are little-endian.

A request is the file's size, its width and its height (``<QII``), then the file. An answer is a status byte and a size
(``<BQ``), then that many bytes: with status 0 width and height of the upright picture (``<II``) and its pixels, row by row as
RGB; with status 1 the error message as UTF-8.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from typing import BinaryIO

from ctxwin.errors import BadMedia
from ctxwin.media import open_picture, to_rgb

REQUEST = struct.Struct("<QII")
ANSWER = struct.Struct("<BQ")
SIZE = struct.Struct("<II")
DECODED, FAILED = 0, 1


def main() -> None:
    """Run ``python -m ctxwin_server.media_decoder BYTES FORMAT...``: at most BYTES of memory, Pillow's named formats only."""
    max_bytes, formats = int(sys.argv[1]), sys.argv[2:]
    from PIL import Image

    Image.init()  # loads Pillow's formats before memory is bounded
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(15)  # a picture that takes seconds must not slow down answers
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(REQUEST.size):
        size, width, height = REQUEST.unpack(head)
        _answer(sink, source.read(size), (width, height), formats)


def _answer(sink: BinaryIO, raw: bytes, announced: tuple[int, int], formats: list[str]) -> None:
    try:
        with open_picture(raw, formats) as picture:
            if picture.size != announced:
                raise ValueError(f"{picture.size} pixels instead of {announced}")
            upright = to_rgb(picture)
            status, payload = DECODED, SIZE.pack(*upright.size) + upright.tobytes()
    except Exception as error:  # decoders raise anything on malformed files, MemoryError included
        name = "" if isinstance(error, BadMedia) else f"{type(error).__name__}: "
        status, payload = FAILED, f"{name}{error}"[:500].encode()
    sink.write(ANSWER.pack(status, len(payload)))
    sink.write(payload)
    sink.flush()


if __name__ == "__main__":
    main()
