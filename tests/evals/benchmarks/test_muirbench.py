"""MuirBench: parquet files that hold the pictures, the official prompt, and answers read by the official rule."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from PIL import Image

from ctxwin_evals.benchmarks import DataOptions, benchmark
from ctxwin_evals.benchmarks.muirbench import read_answer

OPTIONS = ["a red door", "a blue door", "None of the choices provided"]


def picture(seed: int, side: int = 56) -> dict[str, Any]:
    data = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), 30 * seed, np.uint8)).save(data, "PNG")
    return {"bytes": data.getvalue(), "path": f"{seed}.png"}


def row(index: int, **fields: Any) -> dict[str, Any]:
    plain = {
        "idx": str(index), "task": "Difference Spotting", "image_relation": "Partial Similarity", "image_type": "Slides",
        "question": "What changed from <image> to <image>?", "options": OPTIONS, "answer": "B", "counterpart_idx": None,
        "image_list": [picture(1), picture(2)],
    }  # fmt: skip
    return plain | fields


def write(root: Path, *rows: dict[str, Any], name: str = "test-00000-of-00001.parquet") -> DataOptions:
    (root / "data").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), root / "data" / name, row_group_size=2)
    return DataOptions(data=str(root))


def test_the_prompt_is_the_official_one(tmp_path: Path) -> None:
    write(tmp_path, row(0), row(1), name="test-00000-of-00002.parquet")
    shown = row(2, question="Which is it?", options=["<image>", "<image>"], answer="A", counterpart_idx="1")
    task = benchmark("muirbench", write(tmp_path, shown, name="test-00001-of-00002.parquet"))
    first, _, last = task.items()
    said = "".join(c.label or "".join(getattr(p, "text", PICTURE) for p in c.parts) for c in first.load())
    assert said == f"Question: What changed from {PICTURE} to {PICTURE}"
    assert first.query == (
        "?\nChoices:\n(A) a red door\n(B) a blue door\n(C) None of the choices provided\n"
        "Hint: Please provide the correct option letter, such as A, B, C, D, directly.\nAnswer:"
    )
    assert (last.doc_id, last.count, len(last.load())) == ("2", 4, 4) and last.query.startswith("\nHint")
    assert last.meta == {
        "task": "Difference Spotting", "image_relation": "Partial Similarity", "image_type": "Slides", "counterpart_idx": "1",
        "num_images": 2,
    }  # fmt: skip


PICTURE = "[]"


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("The answer is B", "B"), ("A or rather B", "B"), ("(A), no: (C).", "C"),
        ("it has become a blue door now", "B"), ("a blue door", ""), ("I cannot say", ""), ("", ""), ("ABC", ""),
    ],
)  # fmt: skip
def test_answers_are_read_by_the_official_rule(answer: str, letter: str) -> None:
    assert read_answer(answer, OPTIONS) == letter


def test_scores_and_export(tmp_path: Path) -> None:
    task = benchmark("muirbench", write(tmp_path, row(0)))
    (item,) = task.items()
    assert task.score("(B)", item.target, item.meta).score == 1
    assert task.score("no idea", item.target, item.meta).score == 0
    line = task.export([{"doc_id": "0", "meta": item.meta, "target": item.target, "answer": "B."}])
    want = {"idx": "0", "task": "Difference Spotting", "answer": "B", "response": "B.", "pred": "B"}
    assert json.loads(line) == want


def test_pictures_are_read_when_asked_for_and_scaled(tmp_path: Path) -> None:
    rows = [row(i, image_list=[picture(i, 112), picture(i + 1)]) for i in range(3)]
    options = DataOptions(data=write(tmp_path, *rows).data, max_pixels=56 * 56)
    items = benchmark("muirbench", options).items()
    sizes = [c.media[0].content for item in items for c in item.load() if c.media]
    assert len(items) == 3 and len(sizes) == 6


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"answer": "D"}, "answer must be a letter of 3 options, got 'D'"),
        ({"options": ["one"]}, "row 0: options"),
        ({"question": None}, "question must be given"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="row 0") as raised:
        benchmark("muirbench", write(tmp_path, row(0, **fields))).items()
    assert said in str(raised.value)
    task = benchmark("muirbench", write(tmp_path, row(0, **fields), row(1)))
    assert [item.index for item in task.items()] == [1] and said in task.odd[0]


def test_malformed_files_are_named(tmp_path: Path) -> None:
    (item,) = benchmark("muirbench", write(tmp_path, row(0, image_list=[picture(1)]))).items()
    with pytest.raises(ValueError, match="every <image> must have a picture, got 1 for 2"):
        item.load()
    with pytest.raises(ValueError, match="columns of MuirBench, got none named image_list"):
        benchmark("muirbench", write(tmp_path, {k: v for k, v in row(0).items() if k != "image_list"})).items()
    (tmp_path / "data" / "test-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="must be a whole parquet file"):
        benchmark("muirbench", DataOptions(data=str(tmp_path))).items()
    with pytest.raises(ValueError, match="must be"):
        benchmark("muirbench", DataOptions(data=str(tmp_path / "data" / "nothing"))).items()
