"""Frames survive a video file; broken files are named."""

from pathlib import Path

import numpy as np
import pytest

from ctxwin.tiny.clip import write_clip
from ctxwin.tiny.world import make_stream, render
from ctxwin.video import decode_video

pytest.importorskip("cv2")


@pytest.mark.parametrize(("suffix", "fourcc"), [(".mp4", "mp4v"), (".avi", "MJPG")])
def test_decoded_frames_are_close_to_the_rendered_ones(tmp_path: Path, suffix: str, fourcc: str) -> None:
    frames = make_stream(0, 8)
    path = tmp_path / f"clip{suffix}"
    write_clip(path, frames, fps=4, seconds_per_frame=0.5, fourcc=fourcc)
    decoded, _ = decode_video(path, fps=2.0)
    assert len(decoded) == 8
    for frame, picture in zip(frames, decoded, strict=True):
        assert picture.shape == (224, 224, 3) and picture.dtype == np.uint8
        assert np.abs(picture.astype(int) - render(frame)).mean() < 8


def test_the_interval_chooses_the_frames(tmp_path: Path) -> None:
    pictures = [np.full((64, 64, 3), level, np.uint8) for level in (20, 120, 220)]
    path = tmp_path / "clip.mp4"
    write_clip(path, pictures, fps=8, seconds_per_frame=1.0)
    assert len(decode_video(path, fps=4.0)[0]) == 12
    levels = [picture.mean() for picture in decode_video(path, fps=1.0)[0]]
    assert np.allclose(levels, (20, 120, 220), atol=4)


def test_channels_come_back_as_rgb(tmp_path: Path) -> None:
    red = np.zeros((64, 64, 3), np.uint8)
    red[..., 0] = 200
    write_clip(tmp_path / "red.mp4", [red])
    assert decode_video(tmp_path / "red.mp4")[0][0].mean((0, 1)).argmax() == 0


def test_broken_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="readable file"):
        decode_video(tmp_path / "absent.mp4")
    (tmp_path / "text.mp4").write_text("not a video")
    with pytest.raises(ValueError, match="decodable"):
        decode_video(tmp_path / "text.mp4")
    with pytest.raises(ValueError, match="at least one"):
        write_clip(tmp_path / "empty.mp4", [])
    with pytest.raises(ValueError, match="one size"):
        write_clip(tmp_path / "mixed.mp4", [np.zeros((64, 64, 3), np.uint8), np.zeros((32, 64, 3), np.uint8)])
    with pytest.raises(ValueError, match="cannot write"):
        write_clip(tmp_path / "absent" / "clip.mp4", [np.zeros((64, 64, 3), np.uint8)])


@pytest.mark.parametrize(("suffix", "fourcc"), [(".mp4", "mp4v"), (".avi", "MJPG")])
def test_truncated_files_are_refused(tmp_path: Path, suffix: str, fourcc: str) -> None:
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    write_clip(whole, make_stream(0, 6), fourcc=fourcc)
    data = whole.read_bytes()
    cut.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="which is truncated"):
        decode_video(cut)
