"""Video files as phones, cameras, screen recorders and editors leave them, written with PyAV; every frame shows its number."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

BITS = 8
SIZE = 64, 48
TICK = Fraction(1, 90_000)
CLOCK = [Fraction(i, 10) for i in range(30)]
NTSC = [Fraction(1001 * i, 30_000) for i in range(60)]
SCREEN = [
    Fraction(i, 100) for i in (0, 10, 20, 150, 160, 400, 410, 420, 700, 705, 710)
]  # a screen that mostly stands still


@dataclass(frozen=True)
class VideoFile:
    """A file and what a player shows of it.

    Attributes:
        raw: its bytes.
        numbers, times: the frames that are shown, and since when, in seconds from the beginning of the file.
        length: seconds, the last frame's included.
    """

    name: str
    raw: bytes
    numbers: tuple[int, ...]
    times: tuple[Fraction, ...]
    length: Fraction

    def shown_at(self, time: Fraction) -> int:
        """Place of the frame that is shown at ``time``; the first one before anything is."""
        return max(0, bisect_right(self.times, time) - 1)

    def error(self, time: Fraction, place: int) -> Fraction:
        """Seconds by which a frame is not the one at ``time``: the distance to the stretch for which it is shown."""
        begins = Fraction(0) if place == 0 else self.times[place]
        ends = self.times[place + 1] if place + 1 < len(self.times) else time
        return max(Fraction(0), begins - time, time - ends)


def drawing(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """An upright picture: ``number`` as black and white columns in its upper part, colours that change below."""
    width, height = size
    picture = np.empty((height, width, 3), np.uint8)
    picture[:] = (40 + number * 5 % 160, 60, 200 - number * 3 % 150)
    for bit in range(BITS):
        picture[: height // 2, width * bit // BITS : width * (bit + 1) // BITS] = 235 if number >> bit & 1 else 20
    return picture


def number_of(picture: np.ndarray) -> int:
    """The inverse of `drawing`, for pictures that went through a codec."""
    height, width = picture.shape[:2]
    middle = picture[height // 4]
    return sum((int(middle[width * (2 * bit + 1) // (2 * BITS)].mean()) > 128) << bit for bit in range(BITS))


@contextlib.contextmanager
def usual_priority() -> Iterator[None]:
    """Undo what SVT-AV1 does to the thread that encodes where it runs as root: it and all that it starts later would go first,
    in real time (SCHED_FIFO), and a browser that waits for another process in a loop would keep that one from running."""
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameter)


def write(
    container: str,
    codec: str,
    times: Sequence[Fraction] = CLOCK,
    size: tuple[int, int] = SIZE,
    *,
    pixels: str = "yuv420p",
    tick: Fraction = TICK,
    gop: int = 12,
    b_frames: int | None = None,
    turned: int = 0,
    sound: tuple[str, Fraction] | None = None,
    seekable: bool = True,
    options: dict[str, str] | None = None,
    encoding: dict[str, str] | None = None,
) -> bytes:
    """Bytes of a file with the frames 0, 1, ... at ``times``.

    Args:
        turned: quarter turns, counterclockwise, that a player makes.
        sound: codec of a sound track of three seconds, and when it begins.
        seekable: False: as into a pipe, in which nothing can be filled in later.
    """
    import av

    with (
        usual_priority(),
        tempfile.TemporaryDirectory() as folder,
    ):  # an index in front is written by reading the file once more
        path, pipe = Path(folder, "clip"), _Pipe()
        with av.open(str(path) if seekable else pipe, "w", format=container, options=options or {}) as out:
            stream: Any = out.add_stream(
                codec, rate=1 / (times[1] - times[0]) if times[1:] else 10, options=encoding or {}
            )
            stream.width, stream.height = size if turned % 2 == 0 else size[::-1]
            stream.pix_fmt, stream.time_base, stream.codec_context.time_base = pixels, tick, tick
            stream.gop_size = gop
            if b_frames is not None:
                stream.codec_context.max_b_frames = b_frames
            if turned:
                stream.set_display_rotation(90 * turned)
            heard: Any = out.add_stream(sound[0], rate=48_000) if sound else None
            for number, time in enumerate(times):
                picture = np.ascontiguousarray(np.rot90(drawing(number, size), -turned))
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pixels)
                frame.pts, frame.time_base = round(time / tick), tick
                out.mux(stream.encode(frame))
            if heard is not None and sound is not None:
                for packet in _silence(heard, sound[1]):
                    out.mux(packet)
            out.mux(stream.encode())
        return path.read_bytes() if seekable else pipe.getvalue()


def write_sound(container: str, codec: str, cover: bool = False) -> bytes:
    """A file without a video stream; ``cover``: with a picture that is attached to it."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        heard = out.add_stream(codec, rate=48_000)
        if cover:
            picture: Any = out.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = 32, 32, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
            still = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            out.mux(picture.encode(still.reformat(format="yuvj420p")))
            out.mux(picture.encode())
        for packet in _silence(heard, Fraction(0)):
            out.mux(packet)
    return buffer.getvalue()


class _Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False


def _silence(stream: Any, begin: Fraction) -> Iterator[Any]:
    import av

    form = stream.codec_context.format.name
    for i in range(150):
        samples = np.zeros((1, 960), {"flt": np.float32, "s16": np.int16, "s32": np.int32}[form[:3]])
        frame = av.AudioFrame.from_ndarray(samples, format=form, layout="mono")
        frame.sample_rate, frame.time_base = 48_000, Fraction(1, 48_000)
        frame.pts = 960 * i + round(begin * 48_000)
        yield from stream.encode(frame)
    yield from stream.encode()


def _made(
    name: str,
    container: str,
    codec: str,
    times: Sequence[Fraction] = CLOCK,
    begins: Fraction | None = None,
    **options: Any,
) -> VideoFile:
    """A file; ``begins``: when a player begins, where that is not at the first frame."""
    raw = write(container, codec, times, **options)
    origin = times[0] if begins is None else begins
    seen = [(i, t - origin) for i, t in enumerate(times) if t >= origin]
    unsaid = Fraction(1, 25 if container == "mpegts" else 10)  # of one frame a transport stream names no duration
    gap = times[1] - times[0] if len(times) > 1 else unsaid
    return VideoFile(name, raw, tuple(i for i, _ in seen), tuple(t for _, t in seen), seen[-1][1] + gap)


def shifted(seconds: Fraction | int, times: Sequence[Fraction] = CLOCK) -> list[Fraction]:
    return [t + seconds for t in times]


def corpus() -> list[VideoFile]:
    """Files of every kind that are read."""
    h264, vp8, vp9 = "libx264", "libvpx", "libvpx-vp9"
    fast = {"preset": "ultrafast"}
    files = [
        _made("steady mp4", "mp4", h264),
        _made("steady mkv", "matroska", h264),
        _made("steady webm", "webm", vp9),
        _made("steady ts", "mpegts", h264),
        _made("steady mov", "mov", h264),
        _made("steady avi", "avi", "mjpeg", pixels="yuvj420p", tick=Fraction(1, 10)),
        _made("H.264 avi", "avi", h264, b_frames=0, tick=Fraction(1, 10)),
        _made("B-frames avi", "avi", h264, b_frames=3, tick=Fraction(1, 10)),
        _made("many B-frames avi", "avi", h264, NTSC, b_frames=7, tick=Fraction(1001, 30_000)),
        _made("MPEG-4 with B-frames avi", "avi", "mpeg4", b_frames=2, tick=Fraction(1, 10)),
        _made("steady flv", "flv", h264, tick=Fraction(1, 1000)),
        _made("no B-frames mp4", "mp4", h264, b_frames=0, encoding=fast),
        _made("many B-frames mp4", "mp4", h264, b_frames=7),
        _made("many B-frames mkv", "matroska", h264, b_frames=7),
        _made("many B-frames ts", "mpegts", h264, b_frames=7),
        _made("NTSC mp4", "mp4", h264, NTSC),
        _made("NTSC mkv", "matroska", h264, NTSC),
        _made("NTSC ts", "mpegts", h264, NTSC),
        _made("NTSC webm", "webm", vp8, NTSC),
        _made("variable mp4", "mp4", h264, SCREEN),
        _made("variable mkv", "matroska", h264, SCREEN),
        _made("variable webm", "webm", vp9, SCREEN),
        _made("variable ts", "mpegts", h264, SCREEN),
        _made("variable mov", "mov", "mpeg4", SCREEN, tick=Fraction(1, 1000)),
        _made("empty edit mp4", "mp4", h264, shifted(5)),
        _made("starts at 5 s mkv", "matroska", h264, shifted(5)),
        _made("starts at 5 s webm", "webm", vp8, shifted(5)),
        _made("starts at 20 h ts", "mpegts", h264, shifted(72_000)),
        _made("trimmed by an edit list mp4", "mp4", h264, shifted(Fraction(-7, 10)), Fraction(0)),
        _made("trimmed by an edit list, variable mov", "mov", h264, shifted(Fraction(-3, 2), SCREEN), Fraction(0)),
        _made("negative times mkv", "matroska", h264, shifted(Fraction(-3, 10))),
        _made("negative times ts", "mpegts", h264, shifted(Fraction(-3, 10))),
        _made("without edit list mp4", "mp4", h264, shifted(1), options={"use_editlist": "0"}),
        _made("live mkv", "matroska", h264, SCREEN, options={"live": "1"}),
        _made("live webm", "webm", vp8, shifted(100), options={"live": "1"}),
        _made("piped mkv", "matroska", h264, seekable=False),
        _made("piped ts", "mpegts", h264, SCREEN, seekable=False),
        _made("fragmented mp4", "mp4", h264, options={"movflags": "frag_keyframe+empty_moov"}),
        _made("piped fragmented mp4", "mp4", h264, seekable=False, options={"movflags": "frag_keyframe+empty_moov"}),
        _made("index in front mp4", "mp4", h264, options={"movflags": "faststart"}),
        _made("sound first mp4", "mp4", h264, shifted(1), Fraction(0), sound=("aac", Fraction(0))),
        _made("sound first mkv", "matroska", h264, shifted(1), Fraction(0), sound=("pcm_s16le", Fraction(0))),
        _made("sound later mkv", "matroska", h264, sound=("pcm_s16le", Fraction(1, 2))),
        _made("odd size mkv", "matroska", "ffv1", size=(63, 47)),
        _made("odd size mp4", "mp4", h264, size=(63, 47), pixels="yuv444p"),
        _made(
            "ten bits mkv",
            "matroska",
            "libx265",
            pixels="yuv420p10le",
            encoding={**fast, "x265-params": "log-level=none"},
        ),
        _made("AV1 mp4", "mp4", "libsvtav1", encoding={"preset": "12"}),
        _made("MPEG-2 ts", "mpegts", "mpeg2video", NTSC, tick=Fraction(1001, 30_000), b_frames=2),
        _made("MPEG-4 mp4", "mp4", "mpeg4", tick=Fraction(1, 10)),
        _made("one frame mp4", "mp4", h264, CLOCK[:1]),
        _made("one frame mkv", "matroska", h264, CLOCK[:1]),
        _made("one frame ts", "mpegts", h264, CLOCK[:1]),
        _made("one key frame of 250 mp4", "mp4", h264, [Fraction(i, 25) for i in range(250)], gop=1000),
        _made("one key frame of 250 ts", "mpegts", h264, [Fraction(i, 25) for i in range(250)], gop=1000),
    ]
    for turned in range(4):
        for container, codec in (("mp4", h264), ("mov", h264), ("matroska", h264), ("webm", vp8)):
            files.append(_made(f"turned {90 * turned} {container}", container, codec, turned=turned))
    return files


def mirrored(raw: bytes) -> bytes:
    """An mp4 file whose display matrix mirrors it."""
    at = raw.index(struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30), raw.index(b"tkhd"))
    return raw[:at] + struct.pack(">i", -65536) + raw[at + 4 :]
