"""Frames of video files by presentation time, held against a second reader and against what was written."""

from __future__ import annotations

import base64
import io
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.ImageSequence
import pytest
from PIL import Image

import ctxwin.video
from core.videos import CLOCK, SCREEN, VideoFile, corpus, drawing, mirrored, number_of, shifted, write, write_sound
from ctxwin import Chunk
from ctxwin.errors import BadMedia
from ctxwin.video import check_video, decode_video

av = pytest.importorskip("av")


@pytest.fixture(scope="module")
def files() -> list[VideoFile]:
    return corpus()


def second_reader(raw: bytes) -> tuple[list[np.ndarray], list[float]]:
    """All frames of a file as PyAV gives them, upright, and their times from the beginning of the container."""
    with av.open(io.BytesIO(raw)) as container:
        origin, steady = (container.start_time or 0) / av.time_base, container.format.name == "avi"
        frames, rate = list(container.decode(video=0)), container.streams.video[0].average_rate
    turns = frames[0].rotation // 90
    times = [float(i / rate if steady else f.pts * f.time_base - origin) for i, f in enumerate(frames)]
    return [np.rot90(f.to_ndarray(format="rgb24"), turns) for f in frames], times


def opencv(raw: bytes, folder: Path) -> list[np.ndarray]:
    """All frames of a file as OpenCV gives them; none where it cannot read it."""
    import cv2

    path = folder / "video"
    path.write_bytes(raw)
    capture, frames = cv2.VideoCapture(str(path)), []
    while capture.isOpened() and (read := capture.read())[0]:
        frames.append(read[1][..., ::-1])
    return frames


def queries(file: VideoFile) -> Iterator[tuple[dict[str, float], list[Fraction]]]:
    """Arguments of `decode_video`, and the times at which they look."""
    rng = random.Random(file.name)
    for fps in (1, 2, 3, 10, Fraction(15, 2), 30):
        count = -int(-file.length * fps // 1)
        yield {"fps": float(fps)}, [i / Fraction(fps) for i in range(count)]
    last = file.times[-1]
    for frames in (1, 2, 5, 17):
        first = min(file.times[0], last)
        yield {"frames": frames}, [first + (last - first) * i / max(1, frames - 1) for i in range(frames)]
    for _ in range(6):
        begin, end = sorted(Fraction(rng.randrange(997), 997) * file.length for _ in range(2))
        if float(begin) < float(end) - 0.002:
            fps = rng.choice((1, 4, 25))
            count = -int(-(end - begin) * fps // 1)
            times = [begin + Fraction(i, fps) for i in range(count)]
            yield {"start": float(begin), "end": float(end), "fps": float(fps)}, times


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.guard])])
def test_the_frame_of_a_time_is_the_one_that_is_shown_then(files: list[VideoFile], step: int) -> None:
    """Of every fourth file, and of all."""
    assert len(files) >= 20
    files = files[::step]
    asked, wrong, largest, drift = 0, [], Fraction(0), 0.0
    for file in files:
        frames, times = second_reader(file.raw)
        assert [number_of(f) for f in frames] == list(file.numbers), file.name
        drift = max(drift, *(abs(t - float(w)) for t, w in zip(times, file.times, strict=True)))
        for arguments, at in queries(file):
            pixels, rate = decode_video(file.raw, **arguments)  # type: ignore[arg-type]
            assert len(pixels) == len(at), (file.name, arguments)
            assert rate == arguments.get("fps", rate)
            for time, picture in zip(at, pixels, strict=True):
                number = number_of(picture)
                assert number in file.numbers, (file.name, arguments, time)
                place = file.numbers.index(number)
                assert np.array_equal(picture.shape, frames[place].shape)
                apart = np.abs(picture.astype(int) - frames[place])  # chroma is interpolated in another way
                assert apart.mean() < 2 and apart.max() < 16, (file.name, arguments, time)
                asked += 1
                largest = max(largest, file.error(time, place))
                if place != file.shown_at(time) and file.error(time, place) == 0:
                    wrong.append((file.name, arguments, float(time), number))
    print(
        f"\n{len(files)} videos, {asked} times: {len(wrong)} wrong frames, largest error {float(largest) * 1e3:.2f} ms; "
        f"the containers themselves round times by up to {drift * 1e3:.2f} ms"
    )
    assert not wrong
    assert largest <= Fraction(1, 1000)


def test_the_pixels_are_opencvs(files: list[VideoFile], tmp_path: Path) -> None:
    """Colours as vLLM's reader makes them, of the same frames."""
    pytest.importorskip("cv2")
    compared, unread = 0, []
    for file in files:
        theirs = opencv(file.raw, tmp_path)
        if len(theirs) != len(file.numbers):
            unread.append(file.name)
            continue
        ours = [decode_video(file.raw, float(t), float(t) + 0.001, frames=1)[0][0] for t in file.times[:8]]
        for mine, other in zip(ours, theirs, strict=False):
            assert np.array_equal(mine, other), file.name
            compared += 1
    print(f"\n{compared} frames of {len(files) - len(unread)} videos equal OpenCV's; it cannot read {unread}")
    assert compared > 300
    assert all("AV1" in name for name in unread)


@pytest.mark.parametrize("space", [None, 1, 5, 9])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("pixels", "codec"), [("yuv420p", "libx264"), ("yuv444p", "libx264"), ("gray", "ffv1")])
def test_colours_are_opencvs_in_every_space(
    space: int | None, full: bool, pixels: str, codec: str, tmp_path: Path
) -> None:
    pytest.importorskip("cv2")
    rng, buffer = np.random.default_rng(0), io.BytesIO()
    with av.open(buffer, "w", format="matroska") as out:
        stream = out.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        if space is not None:
            stream.codec_context.colorspace = space
        if full:
            stream.codec_context.color_range = 2
        for _ in range(4):
            blocks = np.kron(rng.integers(0, 256, (8, 12, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
            out.mux(stream.encode(av.VideoFrame.from_ndarray(blocks, format="rgb24").reformat(format=pixels)))
        out.mux(stream.encode())
    theirs = opencv(buffer.getvalue(), tmp_path)
    assert np.array_equal(decode_video(buffer.getvalue(), fps=5.0)[0], np.stack(theirs))


def test_a_turned_video_is_upright(files: list[VideoFile]) -> None:
    seen = 0
    for file in files:
        if file.name.startswith("turned"):
            picture = decode_video(file.raw, frames=1)[0][0]
            assert picture.shape == (48, 64, 3) and np.abs(picture.astype(int) - drawing(0)).mean() < 6, file.name
            seen += 1
    assert seen == 16


def test_a_mirrored_video_is_seen_as_in_a_player() -> None:
    raw = write("mp4", "libx264", CLOCK[:3])
    plain, other = (decode_video(r, fps=10.0)[0] for r in (raw, mirrored(raw)))
    assert np.array_equal(plain[:, :, ::-1], other)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "AVIF", "WEBP"])
def test_an_animation_is_a_video_of_its_frames(kind: str) -> None:
    pictures, buffer = [Image.fromarray(drawing(i)) for i in range(4)], io.BytesIO()
    options = {"save_all": True, "append_images": pictures[1:], "duration": [100, 200, 400, 100]}
    pictures[0].save(buffer, kind, **options)
    if kind == "WEBP":
        with pytest.raises(
            BadMedia, match=r"pass its frames as a list: \[f\.copy\(\) for f in PIL\.ImageSequence"
        ) as caught:
            Chunk.video(buffer.getvalue())
        code = str(caught.value).partition("a list: ")[2].replace("...", "buffer")
        shown = Chunk.video(eval(code, {"PIL": PIL, "buffer": buffer}), fps=10.0)
        pixels, numbers = shown.pixels(shown.media[0]), [0, 1, 2, 3]
    else:
        pixels, numbers = decode_video(buffer.getvalue(), fps=10.0)[0], [0, 1, 1, 2, 2, 2, 2, 3]
        pictures[0].save(still := io.BytesIO(), kind)
        assert kind == "PNG" or number_of(decode_video(still.getvalue())[0][0]) == 0
    assert pixels is not None and [number_of(p) for p in pixels] == numbers


def test_a_stream_that_is_joined_in_its_middle_shows_what_can_be_decoded() -> None:
    raw = write("mpegts", "libx264", [Fraction(i, 10) for i in range(80)], gop=20)
    joined = raw[len(raw) // 2 // 188 * 188 :]
    frames, times = second_reader(joined)
    pixels, _ = decode_video(joined, fps=10.0)
    assert 20 <= len(frames) < 60
    for i, picture in enumerate(pixels):
        shown = [number_of(f) for f, t in zip(frames, times, strict=True) if t <= i / 10 + 5e-4]
        assert number_of(picture) == (shown or [number_of(frames[0])])[-1]


def test_a_stream_that_grows_keeps_the_size_of_its_first_frame() -> None:
    first, second = (
        write("mpegts", "libx264", shifted(s), size, b_frames=0) for s, size in ((0, (64, 48)), (3, (96, 80)))
    )
    pixels, _ = decode_video(first + second, fps=10.0)
    assert pixels.shape[1:] == (48, 64, 3)
    assert [number_of(p) for p in pixels[:60]] == [*range(30), *range(30)]


def test_several_recordings_in_one_file_are_refused() -> None:
    with pytest.raises(BadMedia, match=r"times of a video must not run backwards, got .* several recordings"):
        decode_video(write("mpegts", "libx264") + write("mpegts", "libx264"))


def without_decoder(container: str) -> bytes:
    """A file of a codec that FFmpeg knows by name and cannot decode."""
    raw = write(container, "libx264")
    if container == "matroska":
        return raw.replace(b"V_MPEG4/ISO/AVC", b"V_UNKNOWN_CODEC")
    at = raw.rindex(b"avc1")
    return raw[:at] + b"evc1" + raw[at + 4 :]


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "must not be empty, got 0 bytes"),
    "text": (lambda: b"a cat on a mat" * 9, "must be decodable, got .* starts with b'a cat on a m'"),
    "a playlist": (lambda: b"#EXTM3U\n#EXTINF:2,\n/etc/passwd\n", "must be decodable"),
    "a concatenation": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "must be decodable"),
    "sound in wav": (
        lambda: write_sound("wav", "pcm_s16le"),
        "no video stream in .*, only audio; sound is a Chunk.audio",
    ),
    "sound in mp4": (lambda: write_sound("mp4", "aac"), "no video stream in .*, only audio"),
    "sound in mkv": (lambda: write_sound("matroska", "pcm_s16le"), "no video stream in .*, only audio"),
    "sound in ts": (lambda: write_sound("mpegts", "aac"), "no video stream in .*, only audio"),
    "a cover in mp4": (
        lambda: write_sound("mp4", "aac", cover=True),
        "no video stream in .*, only a cover picture and audio",
    ),
    "a cover in mp3": (lambda: write_sound("mp3", "libmp3lame", cover=True), "no video stream in .*, only a cover"),
    "EVC in mp4": (lambda: without_decoder("mp4"), "no decoder for evc1 on this machine"),
    "EVC in mov": (lambda: without_decoder("mov"), "no decoder for evc1 on this machine"),
    "an unknown codec in mkv": (lambda: without_decoder("matroska"), "no decoder for V_UNKNOWN_CODEC on this machine"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_has_its_reason(kind: str, tmp_path: Path) -> None:
    make, reason = BROKEN[kind]
    (tmp_path / "clip.mp4").write_bytes(make())
    for video in (make(), tmp_path / "clip.mp4"):
        with pytest.raises(BadMedia, match=reason) as caught:
            decode_video(video)
        assert not re.search(r" at 0x|<none>", str(caught.value))
        with pytest.raises(BadMedia, match=reason):
            check_video(video)
    assert "clip.mp4" in str(caught.value)


def test_a_decoder_that_needs_hardware_is_none(files: list[VideoFile], monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg's own AV1 decoder, which stands where no other was built in: it is there, and decodes nothing."""
    raw = next(f.raw for f in files if f.name == "AV1 mp4")
    native = av.CodecContext.create("av1", "r")

    def decode(file: Any, container: Any, stream: Any) -> Iterator[Any]:
        def demux(_: Any) -> Iterator[Any]:
            for packet in container.demux(stream):
                yield SimpleNamespace(decode=partial(native.decode, packet))

        return decoded(file, SimpleNamespace(demux=demux), SimpleNamespace(codec_context=native))

    decoded = ctxwin.video._decode
    monkeypatch.setattr("ctxwin.video._decode", decode)
    with pytest.raises(BadMedia, match="no decoder for av1 on this machine"):
        decode_video(raw)


PLAIN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "index behind": ("mp4", "libx264", {}),
    "index in front": ("mp4", "libx264", {"options": {"movflags": "faststart"}}),
    "fragments": ("mp4", "libx264", {"options": {"movflags": "frag_keyframe+empty_moov"}}),
    "mov": ("mov", "mpeg4", {"tick": Fraction(1, 10)}),
    "mkv": ("matroska", "libx264", {}),
    "webm": ("webm", "libvpx", {}),
    "avi": ("avi", "mjpeg", {"pixels": "yuvj420p", "tick": Fraction(1, 10)}),
}


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_truncated_file_is_called_that(kind: str, share: float) -> None:
    container, codec, options = PLAIN[kind]
    whole = write(container, codec, [Fraction(i, 10) for i in range(100)], gop=5, **options)
    assert len(decode_video(whole, fps=1.0)[0]) == 10
    cut = whole[: int(len(whole) * share)]
    with pytest.raises(
        BadMedia, match=r"must be whole, got a video in memory, which is truncated: the file ends early"
    ):
        decode_video(cut)
    if share <= 0.9:
        with pytest.raises(BadMedia, match="which is truncated"):
            decode_video(cut, end=10.0)
    if share >= 0.5 and kind not in ("index behind", "mov", "fragments"):  # what is there is read
        pixels, _ = decode_video(cut, end=0.5, fps=10.0)
        assert [number_of(p) for p in pixels] == [0, 1, 2, 3, 4]


def test_writing_a_file_of_av1_leaves_the_process_its_priority() -> None:
    before = os.sched_getscheduler(0)
    assert write("mp4", "libsvtav1", encoding={"preset": "12"})
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("kind", ["live webm", "piped mkv", "piped ts", "steady ts"])
def test_a_recording_that_promised_no_length_ends_where_it_ends(kind: str, files: list[VideoFile]) -> None:
    whole = next(f for f in files if f.name == kind)
    pixels, _ = decode_video(whole.raw[: int(len(whole.raw) * 0.8)], fps=10.0)
    assert 5 < len(pixels) < float(whole.length) * 10


def test_a_range_outside_a_whole_file_is_not_called_truncated(files: list[VideoFile]) -> None:
    for file in files:
        length = float(file.length)
        for start, end in ((length + 1, None), (0.0, length + 2), (length + 1, length + 2)):
            with pytest.raises(BadMedia, match="a video range must lie inside the file, got start="):
                decode_video(file.raw, start, end)


def test_damage_in_the_middle_leaves_the_rest(files: list[VideoFile]) -> None:
    """Bits that turned over: frames or reasons, never another error."""
    rng, shown = random.Random(0), 0
    for file in files:
        for _ in range(6):
            damaged = bytearray(file.raw)
            for _ in range(8):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            try:
                pixels, _ = decode_video(bytes(damaged), fps=2.0)
            except BadMedia:
                continue
            assert pixels.ndim == 4
            shown += 1
    assert shown > len(files)


def test_pixels_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = write("mp4", "libx264", SCREEN)
    decoded: list[object] = []
    monkeypatch.setattr("ctxwin.video._decode", lambda *given: decoded.append(given) or iter(()))
    monkeypatch.setattr("ctxwin.media.MAX_VIDEO_PIXELS", 64 * 48 * 10)
    with pytest.raises(BadMedia, match="at most 30,720 pixels in all frames, got 15 of 64x48; sample fewer"):
        decode_video(raw)
    with pytest.raises(BadMedia, match="at most 4,096 frames"):
        decode_video(raw, fps=1000.0)
    monkeypatch.setattr("ctxwin.media.MAX_PIXELS", 1000)
    with pytest.raises(BadMedia, match="at most 1,000 pixels, got 64x48"):
        decode_video(raw, frames=1)
    assert not decoded


def test_every_door_shows_the_same_frames(files: list[VideoFile], tmp_path: Path) -> None:
    """Path, bytes, a block of a message, a file of a library."""
    from ctxwin.library.files import passages_of
    from langchain_ctxwin.messages import parts

    for kind, ending in (
        ("variable mp4", "mp4"),
        ("turned 270 matroska", "mkv"),
        ("live webm", "webm"),
        ("variable ts", "ts"),
    ):
        file = next(f for f in files if f.name == kind)
        path = tmp_path / f"clip.{ending}"
        path.write_bytes(file.raw)
        chunk = Chunk.video(path, fps=1.0)
        data = base64.b64encode(file.raw).decode()
        block = {"type": "video", "base64": data, "mime_type": f"video/{ending}", "fps": 1.0}
        same: Sequence[object] = [Chunk.video(file.raw, fps=1.0), *parts([block])]
        assert [c.id for c in same if isinstance(c, Chunk)] == [chunk.id] * 2
        again = chunk.light().pixels(chunk.media[0])
        assert again is not None and np.array_equal(again, decode_video(path, fps=1.0)[0])
        clips = [p.chunk.pixels(p.chunk.media[0]) for p in passages_of(path.name, file.raw)]
        assert np.array_equal(np.concatenate([c for c in clips if c is not None]), again)
        with pytest.raises(BadMedia, match=rf"got 'clip\.{ending}', which is truncated|got .* in 'clip\.{ending}'"):
            list(passages_of(path.name, b"" if ending == "" else without_decoder("mp4")))


def test_nothing_is_written_where_a_video_cannot_be_read(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), pytest.raises(BadMedia):
        warnings.simplefilter("error")
        decode_video(without_decoder("mp4"))
    capfd.readouterr()
    with pytest.raises(BadMedia):
        decode_video(b"RIFF" + bytes(100))
    assert capfd.readouterr() == ("", "")
