"""Video-MME (arXiv 2405.21075): multiple-choice questions about videos, with or without subtitles.

Columns, prompt and result file follow the official repository (commit 06c2315: README "Evaluation Pipeline",
``evaluation/output_test_template.json``); media lie where VLMEvalKit or lmms-eval keep them. The prompt has the frames
first, then the subtitles, then instruction, question and options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ctxwin.chunk import Chunk
from ctxwin.evals.benchmarks.base import DataTask, Missing, want
from ctxwin.evals.benchmarks.frames import frames_taken, sample_frames
from ctxwin.evals.benchmarks.options import DataOptions
from ctxwin.evals.benchmarks.subtitles import cues_at
from ctxwin.evals.benchmarks.video_mme_score import DURATIONS, LETTERS, aggregate, extract_lmms_eval, extract_official
from ctxwin.evals.items import Item, Scored
from ctxwin.hashing import digest

NAME = "video-mme"
PARQUET = "videomme/test-00000-of-00001.parquet"
COLUMNS = (
    "video_id", "duration", "domain", "sub_category", "url", "videoID", "question_id", "task_type", "question",
    "options", "answer",
)  # fmt: skip
MEDIA = ("video/{}.mp4", "data/{}.mp4", "data/{}.MP4", "data/{}.mkv")
"""Where a video may lie: VLMEvalKit's place, then lmms-eval's."""
INSTRUCTION = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter "
    "(A, B, C, or D) of the correct option.\n"
)
SUBTITLES = "This video's subtitles are listed below:\n"
_BATCH = 256


class VideoMME(DataTask):
    """All questions of Video-MME.

    Frames are decoded when an item is loaded, and only then known: ``load`` adds ``frame_indices``, ``frame_times``,
    ``video_frames`` and ``fps`` to the item's ``meta``.
    """

    splits = ("test",)
    answer_tokens = 16

    def __init__(self, options: DataOptions) -> None:
        super().__init__(NAME, "multiple-choice questions about videos", options)

    def patterns(self) -> list[str]:
        return ["videomme/*.parquet", "videos_chunked_*.zip", "subtitle.zip"]

    def config(self) -> dict[str, Any]:
        o = self.options
        return {
            **super().config(),
            "form": "video" if o.as_video else "images",
            "frames": frames_taken(o.frame_rule, o.frames),
            "frame_rule": o.frame_rule,
            "subtitles": o.subtitles,
            "times": o.times and not o.as_video,
        }

    def read(self, root: Path) -> Iterator[Item | tuple[str, Missing]]:
        if self.options.subtitles and not (root / "subtitle").is_dir():
            raise ValueError(f"{self.name} with subtitles must find them, got no folder {str(root / 'subtitle')!r}")
        seen: set[str] = set()
        for index, (where, row) in enumerate(_rows(root / PARQUET)):
            check_row(row, where)
            if row["question_id"] in seen:
                raise ValueError(f"{where}: question_id must be unique, got {row['question_id']!r} twice")
            seen.add(row["question_id"])
            found = next((p for p in (root / m.format(row["videoID"]) for m in MEDIA) if p.is_file()), None)
            if found is None:
                places = ", ".join(m.format(row["videoID"]) for m in MEDIA)
                error = Missing(
                    f"{where} must find its video, got none of {places} in {str(root)!r}; pass skip_missing to leave such "
                    "questions out"
                )
                yield row["question_id"], error
                continue
            yield self._item(index, row, found, root / "subtitle" / f"{row['videoID']}.srt")

    def _item(self, index: int, row: Mapping[str, Any], video: Path, subtitles: Path) -> Item:
        o = self.options
        # 156 of the 900 videos have no subtitle file; they are asked without.
        used = o.subtitles and subtitles.is_file()
        frames = frames_taken(o.frame_rule, o.frames)
        count = (1 if o.as_video else frames) + used
        meta = {
            **{k: row[k] for k in COLUMNS if k not in ("url", "answer")},
            "subtitles": "used" if used else "missing" if o.subtitles else "off",
            "form": "video" if o.as_video else "images",
            "frames": frames,
            "frame_rule": o.frame_rule,
            "max_pixels": o.max_pixels,
        }
        media = [video.stat().st_size, subtitles.stat().st_size if used else None]

        return Item(
            task=self.name,
            index=index,
            load=partial(self._chunks, video, subtitles if used else None, meta),
            count=count,
            placed=tuple(range(count)),
            query=query_of(row),
            target=row["answer"],
            doc_id=row["question_id"],
            cluster=row["videoID"],
            digest=digest(
                NAME, [row[k] for k in COLUMNS], media, frames, o.frame_rule, o.max_pixels, o.as_video, o.times
            ),
            max_tokens=self.max_tokens,
            meta=meta,
        )

    def _chunks(self, video: Path, subtitles: Path | None, meta: dict[str, Any]) -> list[Chunk]:
        o = self.options
        sampled = sample_frames(video, o.frame_rule, o.frames, o.max_pixels)
        if o.as_video:
            made = [Chunk.video(list(sampled.pixels), fps=sampled.fps)]
        else:
            lines = [f"t={t:.1f} s" if o.times else "" for t in sampled.times]
            made = [Chunk.image(f, text=line) for f, line in zip(sampled.pixels, lines, strict=True)]
        if subtitles is not None:
            cues = "\n".join(cues_at(subtitles, sampled.times))
            made.append(Chunk.text(f"{SUBTITLES}{cues}\n"))
        meta["frame_indices"] = list(sampled.indices)
        meta["frame_times"] = [round(t, 3) for t in sampled.times]
        meta["video_frames"] = sampled.total
        meta["fps"] = sampled.fps
        meta["frame_size"] = list(sampled.pixels.shape[1:3])
        return made

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """Official rule; None for an answer without a letter. ``metrics``: lmms-eval's score of the same answer."""
        letter = extract_official(answer)
        other = {"lmms_eval": float(extract_lmms_eval(answer) == target)}
        return Scored(float(letter == target) if letter else None, letter, other)

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """See `ctxwin.evals.benchmarks.video_mme_score.aggregate`."""
        return aggregate(rows)

    def exported(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official result file: videos with their questions and ``response``, in order of the rows."""
        videos: dict[str, dict[str, Any]] = {}
        for row in rows:
            meta = row["meta"]
            about = {k: meta[k] for k in ("video_id", "duration", "domain", "sub_category")}
            video = videos.setdefault(meta["video_id"], {**about, "missing": False, "questions": []})
            asked = {k: meta[k] for k in ("question_id", "task_type", "question", "options")}
            video["questions"].append({**asked, "answer": row["target"], "response": row["answer"]})
        return json.dumps(list(videos.values()), ensure_ascii=False, indent=1) + "\n"


def query_of(row: Mapping[str, Any]) -> str:
    """The official prompt behind video and subtitles."""
    options = "\n".join(row["options"])
    return f"{INSTRUCTION}{row['question']}\n{options}\nThe best answer is:"


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Raises ValueError naming the row and the column that is not as in the official file."""
    for column in COLUMNS:
        want(row, column, list if column == "options" else str, where)
    if not row["videoID"] or Path(row["videoID"]).name != row["videoID"]:
        raise ValueError(f"{where}: videoID must be a plain name, got {row['videoID']!r}")
    if row["duration"] not in DURATIONS:
        raise ValueError(f"{where}: duration must be one of {', '.join(DURATIONS)}, got {row['duration']!r}")
    if row["answer"] not in LETTERS or len(row["answer"]) != 1:
        raise ValueError(f"{where}: answer must be one of A, B, C, D, got {row['answer']!r}")
    if len(row["options"]) != len(LETTERS) or not all(
        isinstance(o, str) and o.startswith(f"{c}.") for o, c in zip(row["options"], LETTERS, strict=True)
    ):
        raise ValueError(f"{where}: options must be 'A. ...' to 'D. ...', got {row['options']!r}")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    if not path.is_file():
        raise ValueError(f"{NAME} must find its questions, got no file {str(path)!r}")
    try:
        with pq.ParquetFile(path) as file:
            lacking = [c for c in COLUMNS if c not in file.schema_arrow.names]
            if lacking:
                raise ValueError(f"{path} must have the columns of Video-MME, got none named {', '.join(lacking)}")
            number = 0
            for batch in file.iter_batches(_BATCH, columns=list(COLUMNS)):
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a whole parquet file, got {error}") from error
