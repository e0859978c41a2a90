"""Videos of strangers are decoded in the processes that may be killed, within their bounds of memory."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from core.videos import SCREEN, number_of, shifted, write, write_sound
from ctxwin.errors import BadMedia
from ctxwin.video import decode_video
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.sandbox.decode_pool import FileSplitters

pytest.importorskip("av")


@pytest.fixture(scope="module")
def cutters() -> Iterator[FileSplitters]:
    limits = Limits()
    made = FileSplitters(limits.decode_seconds, limits.decode_bytes, count=1)
    yield made
    made.close()


@pytest.mark.parametrize(("ending", "container"), [("mp4", "mp4"), ("mkv", "matroska"), ("ts", "mpegts")])
def test_a_file_of_a_library_is_cut_by_presentation_time(cutters: FileSplitters, ending: str, container: str) -> None:
    raw = write(container, "libx264", shifted(3, SCREEN), turned=0 if ending == "ts" else 1)
    passages = cutters.split(f"screen.{ending}", raw)
    assert [p.chunk.label for p in passages] == [f"screen.{ending}, 0 s", f"screen.{ending}, 4 s"]
    frames = np.concatenate([p.chunk.pixels(m) for p in passages for m in p.chunk.media])
    assert [number_of(f) for f in frames] == [0, 2, 4, 4, 5, 7, 7, 8]
    assert np.array_equal(frames, decode_video(raw, fps=1.0)[0])


def test_a_large_picture_fits_the_memory_of_the_process(cutters: FileSplitters) -> None:
    raw = write("mp4", "libx264", [Fraction(i, 2) for i in range(8)], (1920, 1080), encoding={"preset": "ultrafast"})
    (passage,) = cutters.split("film.mp4", raw)
    assert passage.chunk.media[0].shape == (4, 1080, 1920)


def test_what_is_wrong_comes_back_in_words(cutters: FileSplitters) -> None:
    whole = write("mp4", "libx264")
    for raw, reason in (
        (whole[: len(whole) // 2], r"got 'a\.mp4', which is truncated"),
        (whole.replace(b"avc1", b"evc1"), r"no decoder for evc1 on this machine in 'a\.mp4'"),
        (write_sound("mp4", "aac"), r"no video stream in 'a\.mp4', only audio"),
        (b"#EXTM3U\n#EXTINF:2,\n/etc/passwd\n", r"must be decodable, got 'a\.mp4'"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", r"must be decodable, got 'a\.mp4'"),
    ):
        with pytest.raises(BadMedia, match=reason):
            cutters.split("a.mp4", raw)
    assert len(cutters.split("a.mp4", whole)) == 1
