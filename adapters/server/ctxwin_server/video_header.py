"""The size of a video by its header, read in a helper process, since a malformed file may crash it.

``python -m ctxwin_server.video_header BYTES`` runs the helper.
"""

from __future__ import annotations

import contextlib
import io
import struct
import sys
from typing import Any, cast

from ctxwin.errors import BadMedia, MissingExtra
from ctxwin.video import check_video
from ctxwin_server.helper import DONE, Helper, OutOfBounds, serve

_SIZE = struct.Struct("<ii")
_BYTES = 512 << 20


class VideoHeaders:
    """Reader of video headers; each may take ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._helper = Helper("ctxwin_server.video_header", [str(_BYTES)], seconds)

    def size(self, raw: bytes) -> tuple[int, int]:
        """Return width and height; raises BadMedia, with the reason, where vLLM's reader finds no video stream."""
        try:
            status, answer = self._helper.ask(raw)
        except OutOfBounds as error:
            raise BadMedia(
                f"the header of a video of {len(raw)} bytes must be readable within bounds: {error}"
            ) from None
        width, height = _SIZE.unpack_from(answer) if status == DONE else (0, 0)
        if width <= 0 or height <= 0:
            why = answer[_SIZE.size :] if status == DONE else answer
            raise BadMedia(
                why.decode("utf-8", "replace")
                or f"a video must have a stream that this server can read, got {len(raw)} bytes without one"
            )
        return width, height

    def close(self) -> None:
        """End the process. Idempotent."""
        self._helper.close()


def main() -> None:
    """Answer requests from stdin, with bounded memory for each file."""
    import cv2

    with contextlib.suppress(ModuleNotFoundError):  # not a dependency of the server; without it errors give no reason
        import av  # noqa: F401  # before memory is bounded

    def answer(raw: bytes) -> bytes:
        video = cv2.VideoCapture(cast(Any, io.BytesIO(raw)), cv2.CAP_FFMPEG, [])
        size = int(video.get(cv2.CAP_PROP_FRAME_WIDTH)), int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
        return _SIZE.pack(*size) + (b"" if min(size) > 0 else _reason(raw))

    serve(answer, int(sys.argv[1]))


def _reason(raw: bytes) -> bytes:
    """Return why a file cannot be read; b"" if PyAV reads it or is not installed."""
    try:
        check_video(raw)
    except BadMedia as error:
        return str(error).encode()
    except MissingExtra:
        pass
    return b""


if __name__ == "__main__":
    main()
