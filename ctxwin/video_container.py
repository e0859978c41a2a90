"""Metadata in the containers of video files: if a file is complete, and the name of its codec.

FFmpeg reports neither for a file it cannot open, so they are read here: from the boxes of MP4 and MOV, the segment of
Matroska and WebM, the chunks of AVI. Transport streams and live recordings do not state their length.
"""

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO

_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18\x53\x80\x67"
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"moof", b"styp", b"sidx", b"uuid", b"pnot", b"meta")
_MAX_HEADER = 64 << 20
"""Bytes searched for the name of a codec."""


def is_cut(file: BinaryIO) -> bool:
    """Return True if ``file`` ends before the end stated by its container, or before the index required to read it."""
    size, head = file.seek(0, 2), _read(file, 0, 12)
    if head[4:8] in _BOXES:
        names = set()
        for name, _, end in _boxes(file, size):
            if end > size:
                return True
            names.add(name)
        return not names & {b"moov", b"moof", b"meta"}  # the last of a still in AVIF
    if head[:4] == _EBML:
        return _segment_end(file) > size
    if head[:4] == b"RIFF":
        return _riff_end(file, size) > size
    return False


def codec_tag(file: BinaryIO) -> str:
    """Return the name of the video codec in the file, e.g. ``av01`` or ``V_AV1``; "" if it is not found."""
    size, head = file.seek(0, 2), _read(file, 0, 4)
    if head == _EBML:
        match = re.search(rb"\x86[\x81-\xbf](V_[A-Z0-9_/]+)", _read(file, 0, _MAX_HEADER))
        return match[1].decode() if match else ""
    for name, begin, end in _boxes(file, size):
        if name == b"moov":
            for track in _read(file, begin, min(end - begin, _MAX_HEADER)).split(b"trak"):
                match = re.search(rb"stsd.{12}([ -~]{4})", track, re.DOTALL) if b"vide" in track else None
                if match:
                    return match[1].decode().strip()
    return ""


def _boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and stated end of the top-level boxes of an MP4 file."""
    at = 0
    while at < size:
        head = _read(file, at, 16)
        length, name = struct.unpack_from(">I4s", head) if len(head) >= 8 else (size, b"")
        if length == 1:
            (length,) = struct.unpack_from(">Q", head, 8) if len(head) == 16 else (size,)
        end = size if length == 0 else at + max(length, 8)  # 0: up to the end of the file
        yield name, at, end
        at = end


def _segment_end(file: BinaryIO) -> int:
    """Return the stated end of the segment of a Matroska file; 0 if its size was unknown when it was written."""
    header, at = _variable(file, 4)
    at += max(header, 0)
    if _read(file, at, 4) != _SEGMENT:
        return 0
    length, begin = _variable(file, at + 4)
    return 0 if length < 0 else begin + length


def _variable(file: BinaryIO, at: int) -> tuple[int, int]:
    """Return the EBML size at ``at`` (-1: unknown) and the offset after it."""
    head = _read(file, at, 8)
    if not head or not head[0]:
        return -1, at + 8
    width = 9 - head[0].bit_length()
    value = int.from_bytes(head[:width], "big") & ((1 << 7 * width) - 1)
    return (-1 if value == (1 << 7 * width) - 1 else value), at + width


def _riff_end(file: BinaryIO, size: int) -> int:
    """Return the stated end of the last chunk of an AVI file (a large file has several)."""
    at = 0
    while at < size:
        head = _read(file, at, 8)
        if head[:4] != b"RIFF" or len(head) < 8:
            break
        (length,) = struct.unpack_from("<I", head, 4)
        if length in (0, 0xFFFFFFFF):  # never filled in: a live recording
            break
        at += 8 + length
    return at


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    file.seek(at)
    return file.read(count)
