"""Helper process that decodes pictures for `ctxwin_server.decode_pool`, and may be killed.

A request is the picture's width and height (``<II``, little-endian) and its file; the answer width and height of the upright
picture and its pixels, row by row as RGB.
"""

from __future__ import annotations

import struct
import sys

from ctxwin.media import open_picture, to_rgb
from ctxwin_server.helper import serve

SIZE = struct.Struct("<II")


def main() -> None:
    """Run ``python -m ctxwin_server.media_decoder BYTES FORMAT...``: at most BYTES a picture, Pillow's named formats only."""
    max_bytes, formats = int(sys.argv[1]), sys.argv[2:]
    from PIL import Image

    Image.init()  # loads Pillow's formats before memory is bounded

    def answer(raw: bytes) -> bytes:
        announced = SIZE.unpack_from(raw)
        with open_picture(raw[SIZE.size :], formats) as picture:
            if picture.size != announced:
                raise ValueError(f"{picture.size} pixels instead of {announced}")
            upright = to_rgb(picture)
            return SIZE.pack(*upright.size) + upright.tobytes()

    serve(answer, max_bytes)


if __name__ == "__main__":
    main()
