"""Frames of a video by the rules that other evaluations use, and pictures within a pixel budget.

Rules disagree on which frames of a video a model sees, and results cannot be compared across them; a sample therefore
records the rule and the indices. Files are read from front to back: the frame count in a container's header can be wrong,
and seeking lands on other frames than counting does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxwin.errors import BadMedia
from ctxwin.media import as_rgb

Pixels = NDArray[np.uint8]
_LEAST_SHARE = 0.9
"""A file that yields less than this share of the frames its header promises is taken for cut short."""


def _qwen_vl_utils(total: int, n: int) -> list[int]:
    import torch

    even = frames_taken("qwen-vl-utils", n)
    if even > total:
        raise BadMedia(
            f"rule qwen-vl-utils needs a video of at least {even} frames, got {total}; ask for fewer frames or choose "
            "another frame rule"
        )
    # float32, as there: halves can round the other way in float64.
    return [int(i) for i in torch.linspace(0, total - 1, even).round().long()]


def _hf_qwen2_vl(total: int, n: int) -> list[int]:
    import torch

    # The step is not exact in binary, so that the range can have one element too many.
    return [int(i) for i in torch.arange(0, total, total / n).int()[:n]]


FRAME_RULES: dict[str, Callable[[int, int], list[int]]] = {
    "vlmevalkit": lambda total, n: [int(i * (total / (n + 1))) for i in range(1, n + 1)],
    "qwen-vl-utils": _qwen_vl_utils,
    "linspace": lambda total, n: [int(i) for i in np.linspace(0, total - 1, n).round()],
    "hf-qwen2-vl": _hf_qwen2_vl,
    "lmms-eval": lambda total, n: [int(i) for i in np.linspace(0, total - 1, n, dtype=int)],
}
"""Indices of ``n`` of ``total`` frames. A video with fewer frames than asked for repeats some, except under qwen-vl-utils.

``vlmevalkit`` takes neither the first nor the last. ``qwen-vl-utils`` makes ``n`` even. ``linspace`` does not, and is that of
transformers' Qwen3-VL; ``hf-qwen2-vl`` is that of its Qwen2-VL and Qwen2.5-VL. ``lmms-eval`` cuts instead of rounding.
"""


def frames_taken(rule: str, n: int) -> int:
    """How many frames a rule takes where ``n`` are asked for; known without the video."""
    return max(2, round(n / 2) * 2) if rule == "qwen-vl-utils" else n


def frame_indices(rule: str, total: int, n: int) -> list[int]:
    """Ascending indices in ``[0, total)``; raises BadMedia where the video is too short."""
    if total < 1 or n < 1:
        raise ValueError(f"total and n must be >= 1, got {total} and {n}")
    return FRAME_RULES[rule](total, n)


@dataclass(frozen=True)
class Sampled:
    """Frames taken from a video.

    Attributes:
        pixels: uint8 RGB ``[F, H, W, 3]``.
        indices: which frames, repeats included.
        times: seconds of each.
        rate: frames per second of the file.
        total: frames that could be decoded.
    """

    pixels: Pixels
    indices: tuple[int, ...]
    times: tuple[float, ...]
    rate: float
    total: int

    @property
    def fps(self) -> float:
        """Sampled frames per second."""
        return len(self.indices) * self.rate / self.total


def sample_frames(path: Path, rule: str, n: int, max_pixels: int | None = None) -> Sampled:
    """Decode the frames a rule takes.

    Raises BadMedia where the file cannot be decoded, is cut short, or has too few frames for the rule. Cost: the file is
    decoded twice the first time (to count, then to read up to the last index), once from then on; F frames are held.
    """
    if not path.is_file():
        raise BadMedia(f"a video must be a readable file, got {str(path)!r}")
    stat = path.stat()
    total, rate = _count_frames(str(path), stat.st_size, stat.st_mtime_ns)
    indices = frame_indices(rule, total, n)
    selected = set(indices)
    decoded: dict[int, Pixels] = {}
    with _open_video(path) as capture:
        for at in range(max(selected) + 1):
            if not capture.grab():
                raise BadMedia(f"{str(path)!r} must decode the same way twice, got {at} of {total} frames this time")
            if at in selected:
                ok, bgr = capture.retrieve()
                if not ok:
                    raise BadMedia(f"{str(path)!r} must be decodable, got a frame that is not")
                decoded[at] = fit(np.ascontiguousarray(bgr[..., ::-1], dtype=np.uint8), max_pixels)
    pixels = np.stack([decoded[i] for i in indices])
    return Sampled(pixels, tuple(indices), tuple(i / rate for i in indices), rate, total)


def fit(pixels: Pixels, max_pixels: int | None) -> Pixels:
    """``[H, W, 3]`` scaled down (bicubic, antialiased) to at most ``max_pixels``; as it is where it fits."""
    height, width = pixels.shape[:2]
    if max_pixels is None or height * width <= max_pixels:
        return pixels
    from PIL import Image

    scale = (max_pixels / (height * width)) ** 0.5
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def load_picture(picture: Path | bytes, max_pixels: int | None) -> Path | bytes | Pixels:
    """Return the argument of `Chunk.image`: the picture itself, or pixels if it is scaled. Raises BadMedia."""
    if max_pixels is None:
        return picture
    pixels: Pixels = as_rgb(picture)
    smaller = fit(pixels, max_pixels)
    return picture if smaller is pixels else smaller


@contextmanager
def _open_video(path: Path) -> Iterator[Any]:
    import cv2

    capture = cv2.VideoCapture(str(path))
    try:
        if not capture.isOpened() or not capture.get(cv2.CAP_PROP_FPS) > 0:
            raise BadMedia(f"a video must be decodable by OpenCV, got {str(path)!r}; re-encode it, e.g. as mp4v")
        yield capture
    finally:
        capture.release()


@lru_cache(maxsize=4096)
def _count_frames(path: str, size: int, mtime_ns: int) -> tuple[int, float]:
    """(frames that come back, frames per second); size and time stand for the content."""
    import cv2

    with _open_video(Path(path)) as capture:
        declared, total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), 0
        while capture.grab():
            total += 1
        if total == 0 or total < _LEAST_SHARE * declared:
            raise BadMedia(
                f"{path!r} must hold the frames its header promises, got {total} of {declared}: the file is cut short; fetch "
                "or encode it again"
            )
        return total, float(capture.get(cv2.CAP_PROP_FPS))
