"""Programs that decode files of clients for `ctxwin_server.sandbox.decode_pool`, in processes that may be killed.

``python -m ctxwin_server.sandbox.decoders PROGRAM BYTES`` runs one, with at most BYTES of memory for a file. A request and its
answer are what `ctxwin_server.sandbox.helper.pack` makes of a head and bytes:

- ``picture``: (width, height) and a file to the size of the upright picture and its pixels, row by row as RGB;
- ``file``: (name, caption, most pixels) and a file of a library to its passages and the frames of their media;
- ``video``: a file to (width, height, reason), by its header; a malformed one may crash the process.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from ctxwin.errors import BadMedia, MissingExtra
from ctxwin_server.sandbox.helper import pack, serve, unpack

Answer = Callable[[Any, bytes], Sequence[bytes]]


def picture() -> Answer:
    """Return the program for pictures."""
    from PIL import Image

    from ctxwin.media import open_picture, to_rgb
    from ctxwin_chats.bodies import FORMATS

    Image.init()  # loads Pillow's formats before memory is bounded

    def answer(size: Any, raw: bytes) -> Sequence[bytes]:
        with open_picture(raw, FORMATS) as opened:
            if [*opened.size] != size:
                raise ValueError(f"{opened.size} pixels instead of {tuple(size)}")
            upright = to_rgb(opened)
            return pack(upright.size, upright.tobytes())

    return answer


def file() -> Answer:
    """Return the program for files of libraries."""
    from ctxwin.library.files import passages_of
    from ctxwin.media import pack_frames

    def answer(head: Any, raw: bytes) -> Sequence[bytes]:
        name, caption, most_pixels = head
        try:
            passages = passages_of(name, raw, caption)
            media = [(p.chunk, part) for p in passages for part in p.chunk.media]
            pixels = sum(part.shape[0] * part.shape[1] * part.shape[2] for _, part in media)
            if pixels > most_pixels:
                raise BadMedia(
                    f"the pages and frames of a file must have at most {most_pixels} pixels together (--max-pixels), got "
                    f"{pixels} in {name!r}; split it, scale it down, or raise it"
                )
            frames = [pack_frames(cast(Any, chunk.pixels(part))) for chunk, part in media]
            return pack([p.model_dump(mode="json") for p in passages], *frames)
        except (BadMedia, MissingExtra):
            raise
        except Exception as error:  # decoders raise anything on malformed files, MemoryError included
            fault = f"a file must be readable, got {name[:255]!r}: {type(error).__name__}: {error}"
            raise BadMedia(fault[:500]) from None

    return answer


def video() -> Answer:
    """Return the program for headers of videos."""
    import cv2

    from ctxwin.video import check_video

    with contextlib.suppress(ModuleNotFoundError):  # not a dependency of the server; without it errors give no reason
        import av  # noqa: F401  # before memory is bounded

    def answer(_: Any, raw: bytes) -> Sequence[bytes]:
        stream, reason = cv2.VideoCapture(cast(Any, io.BytesIO(raw)), cv2.CAP_FFMPEG, []), ""
        size = int(stream.get(cv2.CAP_PROP_FRAME_WIDTH)), int(stream.get(cv2.CAP_PROP_FRAME_HEIGHT))
        if min(size) <= 0:
            try:
                check_video(raw)
            except BadMedia as error:
                reason = str(error)
            except MissingExtra:
                pass
        return pack((*size, reason))

    return answer


def main() -> None:
    """Run a program; see the module."""
    name, most_bytes = sys.argv[1:]
    answer = {"picture": picture, "file": file, "video": video}[name]()

    def answer_packed(raw: bytes) -> bytes:
        head, blobs = unpack(raw)
        return b"".join(answer(head, *blobs))

    serve(answer_packed, int(most_bytes))


if __name__ == "__main__":
    main()
