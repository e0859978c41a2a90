"""Decoding of video files to RGB frames that are chosen by presentation time.

PyAV reads the files. OpenCV, which vLLM's chat path uses, reports the time of each frame as well, but not why a file cannot be
read, how long the last frame is shown, when the sound begins or how many frames a live recording has; it has no decoder for
AV1, and opens playlists that name other files. The colours equal OpenCV's: both convert with FFmpeg's swscale and the same
settings. PyAV is imported where it is used.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ctxwin.errors import BadMedia
from ctxwin.extras import optional_imports
from ctxwin.media import FPS, MAX_PIXELS, check_file, check_pixels, check_rate, check_size
from ctxwin.validation import check_numbers
from ctxwin.video_container import codec_tag, is_cut

if TYPE_CHECKING:
    import numpy as np

CONTAINERS = (
    "mov", "matroska", "mpegts", "avi", "mpeg", "flv", "asf", "ogg", "mxf", "nut", "ivf", "gif", "apng", "wtv",
)  # fmt: skip
_STREAMS = ("h264", "hevc", "m4v", "mpegvideo", "obu", "mjpeg")  # of video without a container
_SOUND = ("mp3", "wav", "flac", "aac", "aiff")  # opened to report that they have no video
FORMATS = (*CONTAINERS, *_STREAMS, *_SOUND)
"""FFmpeg's names of the formats that are opened. Others (playlists, concatenations, sequences of pictures) name other files."""
_THREADS = 4  # of one decoder; each takes address space, which is bounded where strangers' files are decoded
_ROUNDING = 1e-6, 1e-3
"""Smallest and largest tolerance in seconds for a time that a container has rounded."""
_USUAL_RATE = 25.0  # frames per second of a stream that does not name its rate
_FEWER = "sample fewer by fps or frames, or pass a shorter range"
_WEBP = "pass its frames as a list: [f.copy() for f in PIL.ImageSequence.Iterator(PIL.Image.open(...))]"
_BACKWARDS = 1.0
"""Seconds by which decoding times may run backwards before a file is taken for several."""


def decode_video(
    video: str | Path | bytes | bytearray,
    start: float | None = None,
    end: float | None = None,
    fps: float | None = None,
    frames: int | None = None,
    *,
    name: str = "",
) -> tuple[np.ndarray, float]:
    """Return frames ``[F, H, W, 3]`` RGB of ``[start, end)`` seconds, upright, and the sampled frames per second.

    A frame is shown from its presentation time up to that of the next one, and time 0 is where a player begins: at the first
    stream of the file. ``fps`` takes the frames shown at ``start``, ``start + 1 / fps`` and so on; ``frames`` takes those shown
    at that many times spread evenly from ``start`` to the beginning of the last frame; neither: 2 fps.

    Args:
        video: path, or bytes of a file.
        start, end: seconds; None: from the beginning, to the end of the last frame.
        name: its name in messages; "": its path.

    Raises:
        BadMedia: empty, no video, truncated, without a video stream or a decoder for it, a range outside it, or over a limit of
            `ctxwin.media`, which is checked before pixels are decoded.
        MissingExtra: PyAV is not installed.

    Cost: packets are read up to ``end``, then decoded from the beginning; F frames are held.
    """
    import numpy as np

    begin = _validate_range(start, end, fps, frames)
    file = _File(video, name)
    with file.open() as (container, stream):
        timeline = _read_timeline(container, stream, end)
    stop = _validate_end(file, timeline, begin, end)
    if frames is None:
        step = 1.0 / (fps or 2.0)
        slack = timeline.rounding if end is None else _ROUNDING[0]
        count = max(1, math.ceil((stop - begin - slack) / step))
        check_rate(fps or 2.0, count)
        times = [begin + i * step for i in range(count)]
    else:
        starts = timeline.starts
        last = max(begin, starts[max(0, bisect.bisect_left(starts, stop - timeline.rounding) - 1)])
        times = np.linspace(max(begin, min(starts[0], last)), last, frames).tolist()
    with file.open() as (container, stream):
        pixels = _frames_at(file, container, stream, timeline, times)
    return np.stack(pixels), float(fps or 2.0) if frames is None else frames / (stop - begin)


def check_video(video: str | Path | bytes) -> None:
    """Raise BadMedia, with the reason, if ``video`` cannot be opened or has no stream that this machine decodes."""
    with _File(video, "").open():
        pass


@dataclass(frozen=True)
class _Timeline:
    """Presentation times of the frames of a file, in seconds from its beginning.

    Attributes:
        origin: the file's own time of its beginning.
        starts: of the frames, ascending.
        stop: end of the last frame; infinite if reading stopped after the range.
        gap: length of a frame, by which a range may be too long.
        rounding: tolerance for times that the container has rounded.
        counted: the n-th frame shown has the n-th start, whatever its own time: it has none, or in AVI one that FFmpeg guessed.
    """

    origin: float
    starts: Sequence[float]
    stop: float
    gap: float
    rounding: float
    counted: bool


class _File:
    """A video file, opened for each pass over it, and its errors."""

    def __init__(self, video: str | Path | bytes | bytearray, name: str) -> None:
        with optional_imports():
            import av  # noqa: F401
        if isinstance(video, str | Path):
            check_file(video, "a video")
            self.name = repr(name or str(video))
        else:
            self.name = repr(name) if name else "a video in memory"
        self._video = video

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Any, Any]]:
        """Open PyAV's container and its video stream, which has a decoder."""
        import av

        options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "", "max_pixels": str(MAX_PIXELS)}
        with self._bytes() as file:
            if file.seek(0, os.SEEK_END) == 0:
                raise BadMedia(f"a video must not be empty, got 0 bytes in {self.name}; fetch or record it again")
            file.seek(0)
            try:
                container = av.open(file, "r", options=options, metadata_errors="replace")
            except av.error.FFmpegError as error:
                if is_cut(file):
                    raise self.truncated() from None
                file.seek(0)
                start = file.read(12)
                remedy = _WEBP if start[8:] == b"WEBP" else "re-encode it as mp4, mkv or webm"
                raise BadMedia(
                    f"a video must be decodable, got {self.name}: {error.strerror} in a file that starts with {start!r}; "
                    f"{remedy}"
                ) from None
            with container:
                yield container, self._video_stream(container, file)

    def _bytes(self) -> BinaryIO:
        if not isinstance(self._video, str | Path):
            return io.BytesIO(self._video)
        try:
            return Path(self._video).open("rb")
        except OSError as error:
            raise BadMedia(f"a video path must be a readable file, got {self.name}: {error}") from error

    def is_cut(self) -> bool:
        with self._bytes() as file:
            return is_cut(file)

    def truncated(self, seconds: float | None = None) -> BadMedia:
        """Return the error for a file that ends early, after ``seconds``."""
        after = "" if seconds is None else f" after {seconds:.2f} s"
        until = "" if seconds is None else ", or pass an end before that"
        return BadMedia(
            f"a video must be whole, got {self.name}, which is truncated: the file ends early{after}; fetch or record it "
            f"again{until}"
        )

    def without_frames(self) -> BadMedia:
        return BadMedia(f"a video must hold frames that can be decoded, got none in {self.name}; re-encode it")

    def no_decoder(self, codec: str) -> BadMedia:
        return BadMedia(
            f"a video must have a codec that can be decoded, got no decoder for {codec or 'its codec'} on this machine in "
            f"{self.name}; re-encode it, e.g. ffmpeg -i IN -c:v libx264 OUT.mp4"
        )

    def _video_stream(self, container: Any, file: BinaryIO) -> Any:
        from av.stream import Disposition

        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams and is_cut(file):
            raise self.truncated()
        if not streams:
            others = {"a cover picture" if s.type == "video" else s.type for s in container.streams}
            only = f", only {' and '.join(sorted(others))}" if others else ""
            sound = "; sound is a Chunk.audio" if "audio" in others else "; pass a file that shows something"
            raise BadMedia(f"a video must have a video stream, got no video stream in {self.name}{only}{sound}")
        stream = next((s for s in streams if s.frames != 1), streams[0])  # in AVIF a still is in front of the animation
        if stream.codec_context is None:
            raise self.no_decoder(codec_tag(file))
        if stream.width and stream.height:  # unknown for a stream that was recorded from its middle
            check_size(stream.width, stream.height)
        stream.codec_context.thread_count = min(_THREADS, os.cpu_count() or 1)
        return stream


def _validate_range(start: float | None, end: float | None, fps: float | None, frames: int | None) -> float:
    """Return the beginning of a valid range; raises BadMedia."""
    if fps is not None and frames is not None:
        raise BadMedia("a video must be sampled by fps or by frames, got both; drop one")
    check_numbers(start=start, end=end)
    if frames is not None and (not isinstance(frames, Integral) or isinstance(frames, bool) or frames < 1):
        raise BadMedia(f"frames must be an int >= 1, got {frames!r}")
    check_rate(fps, frames or 0)
    begin = 0.0 if start is None else float(start)
    if not 0 <= begin < math.inf or (end is not None and not begin < end):
        raise BadMedia(f"a video range must be 0 <= start < end, got start={start} end={end}")
    return begin


def _validate_end(file: _File, timeline: _Timeline, begin: float, end: float | None) -> float:
    """Return the end of the range in the file; raises BadMedia if the file ends before it."""
    if not timeline.starts:
        raise file.truncated(0.0) if file.is_cut() else file.without_frames()
    stop, rounding = timeline.stop, timeline.rounding
    if end is not None and begin < stop - rounding and end <= stop + rounding:
        return min(end, stop)
    if file.is_cut():
        raise file.truncated(stop)
    if begin >= stop - rounding or (end is not None and end > stop + timeline.gap + rounding):
        raise BadMedia(
            f"a video range must lie inside the file, got start={begin:g} end={end} of {file.name}, which lasts {stop:.2f} s; "
            "pass an end inside the file"
        )
    return stop


def _read_timeline(container: Any, stream: Any, end: float | None) -> _Timeline:
    """Read the packets' times up to ``end``; nothing is decoded."""
    from av.error import FFmpegError

    base = stream.time_base
    rates = (float(rate) for rate in (stream.average_rate, stream.guessed_rate) if rate)
    rate = next((rate for rate in rates if FPS[0] <= rate <= FPS[1]), _USUAL_RATE)
    origin = _player_start(container, stream)
    starts: list[float] = []
    durations: dict[float, float] = {}
    count, latest, past_end, guessed = 0, -math.inf, False, False
    has_pts = container.format.name != "avi"
    with contextlib.suppress(FFmpegError):  # a file that ends in the middle of a packet ends there
        for packet in container.demux(stream):
            if not packet.size or packet.is_corrupt:
                continue
            count += 1
            decoded_at = None if packet.dts is None else float(packet.dts * base)
            if decoded_at is not None:
                if decoded_at < latest - _BACKWARDS:
                    raise BadMedia(
                        f"the times of a video must not run backwards, got {decoded_at:.2f} s after {latest:.2f} s; they are "
                        "several recordings in one file: remux them, e.g. ffmpeg -f concat -c copy"
                    )
                latest = decoded_at
                if end is not None and origin is not None and decoded_at - origin > end:
                    past_end = True
                    break
            guessed |= not has_pts and packet.pts != packet.dts
            shown_at = float(packet.pts * base) if has_pts and packet.pts is not None else decoded_at
            if shown_at is not None and not packet.is_discard:
                starts.append(shown_at)
                durations[shown_at] = float((packet.duration or 0) * base)
    if not starts:
        starts, durations = [i / rate for i in range(count)], {}
        origin, guessed = 0.0, True
    else:
        origin = min(starts) if origin is None else min(origin, *starts)
    starts.sort()
    gap = (durations.get(starts[-1], 0.0) or 1 / rate) if starts else 0.0
    ends = math.inf if past_end else (starts[-1] + gap - origin if starts else 0.0)
    smallest, largest = _ROUNDING
    rounding = max(smallest, min(float(base) / 2, largest)) + smallest
    return _Timeline(origin, [s - origin for s in starts], ends, max(gap, 1 / rate), rounding, guessed)


def _player_start(container: Any, stream: Any) -> float | None:
    """Return the file's time at which a player begins: that of its first stream. Decoders drop sound before 0."""
    starts = [] if stream.start_time is None else [float(stream.start_time * stream.time_base)]
    starts += [max(0.0, float(s.start_time * s.time_base)) for s in container.streams.audio if s.start_time is not None]
    return min(starts, default=None)


def _frames_at(
    file: _File, container: Any, stream: Any, timeline: _Timeline, times: Sequence[float]
) -> list[np.ndarray]:
    """Return the pixels shown at each of ``times``, which ascend; the first frame also before its time."""
    if stream.width and stream.height:
        check_pixels(len(times), stream.width, stream.height, _FEWER)
    frames_pixels: list[np.ndarray] = []
    size: tuple[int, int] | None = None
    matrix: bytes | None = None
    previous, now = None, -math.inf

    def show(frame: Any, until: float) -> None:
        """Take ``frame`` for all remaining times before ``until``."""
        nonlocal size, matrix
        if len(frames_pixels) == len(times) or times[len(frames_pixels)] + timeline.rounding >= until:
            return
        if size is None:
            size = frame.width, frame.height
            check_size(*size)
            check_pixels(len(times), *size, _FEWER)
            matrix = next((bytes(d) for d in frame.side_data if d.type.name == "DISPLAYMATRIX"), None)
        # Bicubic to BGR is OpenCV's setting of swscale. A stream whose size changes keeps that of its first frame.
        bgr = frame.reformat(*size, format="bgr24", interpolation="BICUBIC").to_ndarray()
        pixels = _apply_rotation(bgr[..., ::-1], matrix)
        while len(frames_pixels) < len(times) and times[len(frames_pixels)] + timeline.rounding < until:
            frames_pixels.append(pixels)

    for number, frame in enumerate(_decode(file, container, stream)):
        if timeline.counted:
            time = timeline.starts[number] if number < len(timeline.starts) else math.inf
        else:
            time = now if frame.pts is None else max(now, float(frame.pts * frame.time_base) - timeline.origin)
        if previous is not None:
            show(previous, time)
            if len(frames_pixels) == len(times):
                return frames_pixels
        previous, now = frame, time
    if previous is None:
        raise file.truncated(0.0) if file.is_cut() else file.without_frames()
    show(previous, math.inf)
    return frames_pixels


def _decode(file: _File, container: Any, stream: Any) -> Iterator[Any]:
    """Yield the frames in order of presentation, without damaged ones."""
    from av.error import FFmpegError, PatchWelcomeError

    with contextlib.suppress(FFmpegError):  # a file that ends in the middle of a packet ends there
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except FFmpegError as error:  # before the first key frame of a stream recorded from its middle, or damage
                if error.errno == errno.ENOSYS or isinstance(error, PatchWelcomeError):
                    raise file.no_decoder(stream.codec_context.name) from None
                if isinstance(error, MemoryError):
                    raise BadMedia(f"a video must fit the available memory, got {file.name}; shrink it") from None
                continue
            yield from frames


def _apply_rotation(pixels: np.ndarray, matrix: bytes | None) -> np.ndarray:
    """Rotate and mirror ``pixels`` as the display matrix says, by the nearest quarter turn."""
    import numpy as np

    if matrix is not None:
        # A point (x, y) is shown at (a x + c y, b x + d y).
        a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()
        if abs(b) > abs(a):
            pixels = pixels.transpose(1, 0, 2)
            a, d = c, b
        if a < 0:
            pixels = pixels[:, ::-1]
        if d < 0:
            pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
