"""Writes a small EgoSchema: questions, the answers of a subset and videos, in the repository's layout or the hub's."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benchmark_data import drawing
from benchmark_data.video_mme import MOVES, Scene, frames_of
from ctxwin.tiny.clip import write_clip
from ctxwin.tiny.sprites import COLORS, SHAPES
from ctxwin_evals.benchmarks.egoschema import COLUMNS, LETTERS, OPTIONS

_SPACE = 0x65676F73
_FPS = 8


def write_egoschema(out: Path, n: int, seed: int = 0, hub: bool = False, image_size: int = 224) -> list[dict[str, Any]]:
    """Writes ``n`` questions, a video each; those of even index are in the subset whose answers are public.

    Returns the rows of ``questions.json`` with their ``answer`` besides. Raises ValueError for numbers out of range.
    """
    if n < 1 or image_size < 56:
        raise ValueError(f"n must be >= 1 and image_size >= 56; got {n}, {image_size}")
    rows = [_row(out, index, seed, image_size) for index in range(n)]
    public = {row["q_uid"]: row["answer"] for row in rows[::2]}
    if hub:
        _write_parquet(out / "Subset", rows[::2], public)
        _write_parquet(out / "MC", rows, public)
    else:
        questions = [{k: v for k, v in row.items() if k != "answer"} for row in rows]
        (out / "questions.json").write_text(json.dumps(questions))
        (out / "subset_answers.json").write_text(json.dumps(public))
    return rows


def _row(out: Path, index: int, seed: int, size: int) -> dict[str, Any]:
    rng = np.random.default_rng((_SPACE, seed, index))
    uid = str(uuid.UUID(bytes=rng.bytes(16)))
    scenes = [Scene(thing, list(MOVES)[int(rng.integers(len(MOVES)))]) for thing in drawing.draw_things(rng, 3)]
    path = out / "videos" / f"{uid}.mp4"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_clip(path, frames_of(scenes, 2 * _FPS, size), fps=_FPS, seconds_per_frame=1 / _FPS)
    shape, color = scenes[int(rng.integers(len(scenes)))].thing
    wrong = [name for name in COLORS[:8] if name != COLORS[color]]
    texts = [COLORS[color], *(wrong[i] for i in rng.permutation(len(wrong))[: len(LETTERS) - 1])]
    order = [int(i) for i in rng.permutation(len(LETTERS))]
    options = [f"C watches as a {texts[i]} {SHAPES[shape]} passes by." for i in order]
    return {
        "q_uid": uid,
        "google_drive_id": "".join(map(str, rng.integers(10, size=33))),
        "question": f"Taking the whole video into account, which {SHAPES[shape]} does c watch?",
        **dict(zip(OPTIONS, options, strict=True)),
        "answer": order.index(0),
    }


def _write_parquet(folder: Path, rows: list[dict[str, Any]], public: dict[str, int]) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    folder.mkdir(parents=True, exist_ok=True)
    table = [
        {
            "question_idx": row["q_uid"],
            "question": row["question"],
            "video_idx": row["q_uid"],
            "option": [f"{letter}. {row[name]}" for letter, name in zip(LETTERS, OPTIONS, strict=True)],
            "answer": str(public[row["q_uid"]]) if row["q_uid"] in public else None,
        }
        for row in rows
    ]
    schema = pa.schema(
        [(c, pa.list_(pa.string()) if c == "option" else pa.string()) for c in ("question_idx", *COLUMNS)]
    )
    pq.write_table(pa.Table.from_pylist(table, schema), folder / "test-00000-of-00001.parquet")
