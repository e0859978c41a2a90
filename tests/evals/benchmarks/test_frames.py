"""Which frames a rule takes, and what is done with files whose headers lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctxwin.errors import BadMedia
from ctxwin.tiny.clip import write_clip
from ctxwin_evals.benchmarks.frames import FRAME_RULES, fit, frame_indices, frames_taken, sample_frames
from ctxwin_evals.benchmarks.video_mme import cues_at


@pytest.mark.parametrize(
    ("rule", "total", "n", "indices"),
    [
        ("vlmevalkit", 100, 4, [20, 40, 60, 80]),
        ("vlmevalkit", 10, 3, [2, 5, 7]),
        ("vlmevalkit", 2, 4, [0, 0, 1, 1]),  # a short video repeats frames
        ("qwen-vl-utils", 100, 4, [0, 33, 66, 99]),
        ("qwen-vl-utils", 101, 5, [0, 33, 67, 100]),  # 5 is made 4: halves go to the even number
        ("qwen-vl-utils", 101, 7, [0, 14, 29, 43, 57, 71, 86, 100]),
        ("linspace", 101, 5, [0, 25, 50, 75, 100]),
        ("linspace", 10, 3, [0, 4, 9]),  # 4.5 goes to the even number
        ("hf-qwen2-vl", 100, 4, [0, 25, 50, 75]),
        ("hf-qwen2-vl", 17, 7, [0, 2, 4, 7, 9, 12, 14]),  # the range itself has one more
        ("lmms-eval", 10, 4, [0, 3, 6, 9]),
        ("lmms-eval", 9, 4, [0, 2, 5, 8]),  # cut, not rounded
    ],
)
def test_rules(rule: str, total: int, n: int, indices: list[int]) -> None:
    assert frame_indices(rule, total, n) == indices
    assert frames_taken(rule, n) == len(indices)


@pytest.mark.parametrize("rule", FRAME_RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 32])
def test_rules_give_ascending_frames_that_exist(rule: str, n: int) -> None:
    for total in (32, 33, 100, 1001, 54321):
        indices = frame_indices(rule, total, n)
        assert indices == sorted(indices) and len(indices) == frames_taken(rule, n)
        assert indices[0] >= 0 and indices[-1] < total


def test_rules_refuse() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        frame_indices("linspace", 0, 2)
    with pytest.raises(BadMedia, match="needs a video of at least 8 frames, got 5"):
        frame_indices("qwen-vl-utils", 5, 8)


def grey(count: int, side: int = 64) -> list[np.ndarray]:
    return [np.full((side, side, 3), 10 * i, np.uint8) for i in range(count)]


def test_frames_are_those_of_their_indices_in_rgb(tmp_path: Path) -> None:
    frames = [np.full((64, 64, 3), (200, 10 * i, 20), np.uint8) for i in range(20)]
    write_clip(tmp_path / "a.mp4", frames, fps=10, seconds_per_frame=0.1)
    sampled = sample_frames(tmp_path / "a.mp4", "vlmevalkit", 4)
    assert sampled.indices == (4, 8, 12, 16)
    assert sampled.times == (0.4, 0.8, 1.2, 1.6)
    assert (sampled.total, sampled.rate, sampled.fps) == (20, 10, 2)
    seen = sampled.pixels[:, 32, 32].astype(int)
    assert np.abs(seen - [(200, 10 * i, 20) for i in sampled.indices]).max() <= 6


def test_repeated_frames(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", grey(2), fps=2, seconds_per_frame=0.5)
    sampled = sample_frames(tmp_path / "a.mp4", "vlmevalkit", 4)
    assert sampled.indices == (0, 0, 1, 1)
    assert np.array_equal(sampled.pixels[0], sampled.pixels[1])


def test_a_header_that_promises_a_little_too_much_is_not_believed(tmp_path: Path) -> None:
    write_clip(tmp_path / "whole.avi", grey(20), fps=10, seconds_per_frame=0.1, fourcc="MJPG")
    raw = (tmp_path / "whole.avi").read_bytes()
    frames = [i for i in range(len(raw) - 4) if raw[i : i + 4] == b"00dc"]
    # The end is lost; the count in the system prompt stays. (The container goes by its content, not by its name.)
    (tmp_path / "lies.mp4").write_bytes(raw[: frames[19]])
    sampled = sample_frames(tmp_path / "lies.mp4", "linspace", 2)
    assert 18 <= sampled.total < 20
    assert sampled.indices == (0, sampled.total - 1)
    (tmp_path / "torn.mp4").write_bytes(raw[: frames[8]])
    with pytest.raises(BadMedia, match=r"got [78] of 20: the file is cut short"):
        sample_frames(tmp_path / "torn.mp4", "linspace", 2)
    with pytest.raises(BadMedia, match="must be a readable file"):
        sample_frames(tmp_path / "none.mp4", "linspace", 2)


def test_a_replaced_file_is_counted_again(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    for count in (4, 9):
        write_clip(path, grey(count), fps=2, seconds_per_frame=0.5)
        assert sample_frames(path, "linspace", 2).total == count


@pytest.mark.parametrize(("height", "width"), [(100, 300), (300, 100), (7, 4000), (40, 40)])
def test_fit_keeps_proportions_within_the_budget(height: int, width: int) -> None:
    made = fit(np.zeros((height, width, 3), np.uint8), 10_000)
    assert made.shape[0] * made.shape[1] <= 10_000
    if height * width <= 10_000:
        assert made.shape == (height, width, 3)
    else:
        assert made.shape[1] / made.shape[0] == pytest.approx(width / height, rel=0.3)
    whole = np.zeros((8, 8, 3), np.uint8)
    assert fit(whole, None) is whole


def test_cues(tmp_path: Path) -> None:
    path = tmp_path / "a.srt"
    path.write_text(
        "\ufeff2\n00:00:02,000 --> 00:00:03,500\n{\\an8}<i>second</i>\n\n"
        "1\n00:00:00,500 --> 00:00:02,000\nfirst\nline\n\n"
        "3\n00:00:02,000 --> 00:00:04,000\nbeside it\n\n"
        "4\n00:00:05,000 --> 00:00:06,000\n<b></b>\n\n",
        encoding="utf-8",
    )
    assert cues_at(path, [0.0, 0.4]) == []
    assert cues_at(path, [0.5, 1.0, 1.5]) == ["first line"]  # once, however many frames it covers
    assert cues_at(path, [2.0]) == ["second", "beside it"]  # the end is not in it, the start is
    assert cues_at(path, [3.5, 5.5]) == ["beside it"]
    path.write_text("", encoding="utf-8")
    assert cues_at(path, [1.0]) == []
    path.write_bytes(b"1\n00:00:00,500 --> 00:00:02,000\n\xff\xfe\n")
    with pytest.raises(ValueError, match="subtitle file"):
        cues_at(path, [1.0])
