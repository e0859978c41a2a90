"""Prompts of every benchmark and variant against committed text files.

After a wanted change, write them anew with ``UPDATE_PROMPTS=1`` in the environment, and raise the tasks' version.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmark_data.reading import as_text
from ctxwin.tiny.clip import write_clip
from ctxwin_evals.benchmarks import DataOptions, benchmark
from ctxwin_evals.benchmarks.prompt import cut_text

PROMPTS = Path(__file__).parent / "prompts"


def check(name: str, shown: str) -> None:
    path = PROMPTS / f"{name}.txt"
    if os.environ.get("UPDATE_PROMPTS"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((28, 28, 3), value, np.uint8)).save(path)


NIAH: dict[str, dict[str, Any]] = {
    "retrieval-text": {
        "context": "Once upon a time.\n<image>\nThe word is oak.", "question": "What is the word?", "answer": "oak",
        "images_list": ["a.png"], "meta": {"needles": ["The word is oak."]},
    },
    "retrieval-image": {
        "context": "Once.\n<image>", "question": "Which of these appears above?", "answer": 2, "images_list": ["a.png"],
        "meta": {"needles": ["a.png"], "choices_image_path": ["b.png", "c.png", "d.png"], "choices": None},
    },
    "counting-text": {
        "context": "Two pears.\n\nFour pears.", "question": "How many pears, as a list?", "answer": [2, 4],
        "images_list": [], "meta": {"needles": ["Two pears.", "Four pears."]},
    },
    "counting-image": {
        "context": "<image><image>", "question": "How often does <image> occur, as a list?", "answer": "[1, 3]",
        "images_list": ["a.png", "b.png", "c.png"], "meta": {"needles": ["a.png", "b.png"]},
    },
    "reasoning-text": {
        "context": "", "question": "Who is older?", "answer": "Ann", "images_list": [], "meta": {},
    },
    "reasoning-image": {
        "context": "<image> and <image>", "question": "Where to?", "answer": 0, "images_list": ["a.png", "b.png"],
        "meta": {"needles": ["a.png", "b.png"], "choices": ["left", "right"], "choices_image_path": None},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", NIAH)
def test_mm_niah(tmp_path: Path, kind: str) -> None:
    base = tmp_path / "mm_niah_val"
    for i, name in enumerate("abcd"):
        picture(base / "images" / f"{name}.png", i)
    row = {"id": 5, **NIAH[kind]}
    row["meta"] = {"placed_depth": 0.5, "context_length": 900, **row["meta"]}
    (base / "annotations").mkdir()
    (base / "annotations" / f"{kind}.jsonl").write_text(json.dumps(row) + "\n")
    (item,) = benchmark(f"mm-niah/{kind}", DataOptions(data=str(tmp_path))).items()
    chunks = item.load()
    assert len(chunks) == item.count == len(item.placed)
    pictures = [c for c in chunks if c.media]
    assert [int(c.pixels(c.media[0])[0, 0, 0, 0]) for c in pictures] == list(range(len(pictures)))
    official = f"{row['context']}\n{row['question']}"
    assert as_text(chunks, item.query).startswith(official)
    assert item.max_tokens == (32 if kind.startswith("counting") else 16)
    check(f"mm-niah-{kind}", as_text(chunks, item.query))


VIDEO = {
    "video_id": "001", "duration": "short", "domain": "Knowledge", "sub_category": "Law", "url": "https://example.invalid",
    "videoID": "abc", "question_id": "001-1", "task_type": "OCR Problems", "question": "What is shown?",
    "options": ["A. One.", "B. Two.", "C. Three.", "D. Four."], "answer": "B",
}  # fmt: skip
SRT = (
    '1\n00:00:00,000 --> 00:00:01,000\n<font color="white" size=".72c">The first\nline</font>\n\n'
    "2\n00:00:01,000 --> 00:00:02,000\nnever on a sampled frame\n\n"
    "3\n00:00:02,000 --> 00:00:04,000\nThe last one.\n\n"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "images": {},
    "images-times": {"times": True},
    "images-subtitles": {"subtitles": True},
    "video": {"as_video": True},
    "video-subtitles": {"as_video": True, "subtitles": True},
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("video-mme")
    for folder in ("videomme", "data", "subtitle"):
        (root / folder).mkdir()
    pq.write_table(pa.Table.from_pylist([VIDEO]), root / "videomme" / "test-00000-of-00001.parquet")
    frames = [np.full((56, 56, 3), 60 * i, np.uint8) for i in range(4)]
    write_clip(root / "data" / "abc.mp4", frames, fps=4, seconds_per_frame=1.0)
    (root / "subtitle" / "abc.srt").write_text(SRT)
    return root


@pytest.mark.parametrize("variant", VARIANTS)
def test_video_mme(videos: Path, variant: str) -> None:
    options = DataOptions(data=str(videos), frames=3, frame_rule="linspace", **VARIANTS[variant])
    (item,) = benchmark("video-mme", options).items()
    chunks = item.load()
    assert len(chunks) == item.count
    assert item.meta["frame_indices"] == [0, 8, 15]
    assert item.meta["video_frames"] == 16
    check(f"video-mme-{variant}", as_text(chunks, item.query))


def test_video_mme_without_a_subtitle_file(videos: Path, tmp_path: Path) -> None:
    for part in ("videomme", "data"):
        (tmp_path / part).symlink_to(videos / part)
    (tmp_path / "subtitle").mkdir()
    (item,) = benchmark("video-mme", DataOptions(data=str(tmp_path), frames=3, subtitles=True)).items()
    assert item.meta["subtitles"] == "missing"
    assert "subtitles" not in as_text(item.load(), item.query)


def test_milebench(tmp_path: Path) -> None:
    base = tmp_path / "StateChange"
    for i in range(3):
        picture(base / "images" / f"{i}.png", i)
    sample = {
        "sample_id": 9,
        "task_instruction_id": 1,
        "task_instance": {
            # Pictures come in the order of images_path, whatever the numbers say.
            "context": "Before: {image#2} Between: {table#1}\nAfter: {image#3}\nQuestion: What changed?",
            "images_path": ["0.png", "1.png", "2.png"],
            "choice_list": ["The lamp.", "The door."],
        },
        "response": "The door.",
    }
    whole = {"meta_data": {"task_instruction": ["No.", "Look."], "question_type": "multi-choice"}, "data": [sample]}
    (base / "StateChange.json").write_text(json.dumps(whole))
    (item,) = benchmark("milebench/StateChange", DataOptions(data=str(tmp_path))).items()
    chunks = item.load()
    assert [int(c.pixels(c.media[0])[0, 0, 0, 0]) for c in chunks if c.media] == [0, 1, 2]
    assert item.max_tokens == 512 and item.cluster == "StateChange/9"
    check("milebench", as_text(chunks, item.query))


def test_long_texts_are_cut_at_paragraph_ends_and_lose_nothing() -> None:
    paragraphs = [" ".join(f"w{i}{j}" for j in range(30)) + "." for i in range(20)]
    text = "\n\n".join(paragraphs) + "\n"
    parts = cut_text(text, 100)
    assert "".join(parts) == text
    assert [len(p.split()) for p in parts] == [90] * 6 + [60]
    assert all(p.endswith("\n\n") for p in parts[:-1])
    assert cut_text("", 100) == []
    assert cut_text("\n", 100) == ["\n"]


@pytest.mark.parametrize("joint", ["word ", "A sentence ends. ", "line\n", "\n\n\nword", "  word\t"])
def test_any_text_is_cut_without_loss(joint: str) -> None:
    text = joint * 400
    parts = cut_text(text, 64)
    assert "".join(parts) == text
    assert all(parts) and max(len(p.split()) for p in parts) <= 64
    assert len(parts) <= 2 * len(text.split()) / 64 + 1
