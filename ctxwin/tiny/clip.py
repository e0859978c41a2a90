"""Writes frames to a video file through OpenCV, which is imported only when used."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctxwin.extras import optional_imports
from ctxwin.tiny.world import Frame, render


def write_clip(
    path: str | Path,
    frames: Sequence[Frame | NDArray[np.uint8]],
    fps: float = 8,
    seconds_per_frame: float = 1.0,
    fourcc: str = "mp4v",
) -> None:
    """Write a clip that shows each frame for a while.

    Args:
        path: Where to write; the suffix chooses the container (".mp4" for "mp4v", ".avi" for "MJPG").
        frames: World frames, or RGB uint8 arrays [H, W, 3] of one size.
        fps: Video frames a second.
        seconds_per_frame: How long each frame is shown; at least one video frame.
        fourcc: Four-letter codec name.

    Raises:
        ValueError: If there is no frame, the sizes differ, or OpenCV cannot write this codec to this path.
    """
    with optional_imports():
        import cv2

    pictures = [render(frame) if isinstance(frame, Frame) else frame for frame in frames]
    if not pictures:
        raise ValueError("a clip needs at least one frame")
    if any(picture.shape != pictures[0].shape for picture in pictures):
        raise ValueError(f"frames must have one size, got {sorted({p.shape for p in pictures})}")
    height, width = pictures[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*fourcc), fps, (width, height))
    if not writer.isOpened():
        raise ValueError(f"cannot write {fourcc!r} video to {path}")
    try:
        for picture in pictures:
            bgr = np.ascontiguousarray(picture[..., ::-1])
            for _ in range(max(1, round(fps * seconds_per_frame))):
                writer.write(bgr)
    finally:
        writer.release()
