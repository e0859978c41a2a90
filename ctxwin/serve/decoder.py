"""The program that decodes pictures for `ctxwin.serve.decoding`: in a process of its own, which may be killed.

Reads requests from stdin and writes answers to stdout until stdin ends. All numbers are little-endian.

A request is the file's size, its width and its height (``<QII``), then the file. An answer is a status byte and a size
(``<BQ``), then that many bytes: with status 0 the pixels, row by row as RGB; with status 1 what is wrong, as UTF-8.
"""

from __future__ import annotations

import io
import os
import resource
import struct
import sys
from typing import BinaryIO

REQUEST = struct.Struct("<QII")
ANSWER = struct.Struct("<BQ")
DECODED, FAILED = 0, 1


def main() -> None:
    """``python -m ctxwin.serve.decoder BYTES FORMAT...``: at most BYTES of memory, and these formats of Pillow's."""
    most, formats = int(sys.argv[1]), sys.argv[2:]
    from PIL import Image

    for name in formats:
        Image.preinit()
        assert name in Image.ID or Image.init(), name
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(15)  # a picture that takes seconds must not slow down everybody's answers
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(REQUEST.size):
        size, width, height = REQUEST.unpack(head)
        _answer(sink, source.read(size), (width, height), formats)


def _answer(sink: BinaryIO, raw: bytes, announced: tuple[int, int], formats: list[str]) -> None:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw), formats=formats) as picture:
            if picture.size != announced:
                raise ValueError(f"{picture.size} pixels instead of {announced}")
            status, made = DECODED, picture.convert("RGB").tobytes()
    except Exception as error:  # whatever a decoder raises on a file that somebody made up, MemoryError included
        status, made = FAILED, f"{type(error).__name__}: {error}"[:500].encode()
    sink.write(ANSWER.pack(status, len(made)))
    sink.write(made)
    sink.flush()


if __name__ == "__main__":
    main()
