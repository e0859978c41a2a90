"""Video-MME (arXiv 2405.21075): multiple-choice questions about videos, with or without subtitles.

Columns, prompt and result file follow the official repository (commit 06c2315: README "Evaluation Pipeline",
``evaluation/output_test_template.json``); media lie where VLMEvalKit or lmms-eval keep them. The prompt has the frames
first, then the subtitles, then instruction, question and options.

Scores: the official ``eval_your_results.py`` (thanku-all/parse_answer, named by the Video-MME repository at 06c2315;
arXiv 2405.21075) and lmms-eval at 75571cf (``tasks/_task_utils/mcq_extract.py``).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, model_validator

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia
from ctxwin_evals.benchmarks.base import PlainName, checked, read_parquet
from ctxwin_evals.benchmarks.frames import Sampled
from ctxwin_evals.benchmarks.videos import VideoTask
from ctxwin_evals.items import Item, Scored

PARQUET = "videomme/test-00000-of-00001.parquet"
INSTRUCTION = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter "
    "(A, B, C, or D) of the correct option.\n"
)
SUBTITLES = "This video's subtitles are listed below:\n"
_TAG = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")


class Row(BaseModel, strict=True):
    """One question, as in the official file."""

    video_id: str
    duration: Literal["short", "medium", "long"]
    domain: str
    sub_category: str
    url: str
    videoID: PlainName  # noqa: N815  # the column's name
    question_id: str
    task_type: str
    question: str
    options: list[str]
    answer: Literal["A", "B", "C", "D"]

    @model_validator(mode="after")
    def _plain(self) -> Self:
        if [option[:2] for option in self.options] != [f"{letter}." for letter in LETTERS]:
            raise ValueError(f"options must be 'A. ...' to 'D. ...', got {self.options!r}")
        return self


COLUMNS = tuple(Row.model_fields)


class VideoMME(VideoTask):
    """All questions of Video-MME."""

    names: ClassVar[Mapping[str, str]] = {"video-mme": "multiple-choice questions about videos"}
    splits = ("test",)
    places = ("video/{}.mp4", "data/{}.mp4", "data/{}.MP4", "data/{}.mkv")  # VLMEvalKit's place, then lmms-eval's

    def patterns(self) -> list[str]:
        return ["videomme/*.parquet", "videos_chunked_*.zip", "subtitle.zip"]

    def config(self) -> dict[str, Any]:
        return {**super().config(), "subtitles": self.options.subtitles}

    def rows(self, root: Path) -> Iterator[tuple[str, Any]]:
        if self.options.subtitles and not (root / "subtitle").is_dir():
            raise ValueError(f"{self.name} with subtitles must find them, got no folder {str(root / 'subtitle')!r}")
        rows = read_parquet(self.annotations(root / PARQUET), "Video-MME", COLUMNS)
        return ((where, values) for where, _, _, values in rows)

    def parse(self, row: Any, where: str) -> Item:
        row = checked(Row, row, where)
        video = self.find_video(row.videoID, where, row.question_id)
        path = _subtitles_of(video)
        # 156 of the 900 videos have no subtitle file; they are asked without.
        used = self.options.subtitles and path.is_file()
        subtitles = "used" if used else "missing" if self.options.subtitles else "off"
        return self.item_of(
            video,
            [*row.model_dump().values(), path.stat().st_size if used else None],
            {**row.model_dump(exclude={"url", "answer"}), "subtitles": subtitles},
            more=int(used),
            query="\n".join([INSTRUCTION + row.question, *row.options, "The best answer is:"]),
            target=row.answer,
            doc_id=row.question_id,
            cluster=row.videoID,
        )

    def chunks_after(self, video: Path, sampled: Sampled, meta: Mapping[str, Any]) -> list[Chunk]:
        if meta["subtitles"] != "used":
            return []
        return [Chunk.text("\n".join([SUBTITLES[:-1], *cues_at(_subtitles_of(video), sampled.times), ""]))]

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """Official rule; None for an answer without a letter. ``metrics``: lmms-eval's score of the same answer."""
        letter = extract_official(answer)
        other = {"lmms_eval": float(extract_lmms_eval(answer) == target)}
        return Scored(float(letter == target) if letter else None, letter, other)

    def official(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Accuracies overall and by duration, domain, sub-category and task type.

        ``accuracy...`` is the official one: answers without a letter leave the denominator, and a group of which none has a
        letter counts 0. ``accuracy_all`` keeps them as wrong. ``lmms_eval...`` is lmms-eval's, which keeps them as well and reads
        answers by another rule; it needs the rows' ``answer`` and is left out where one has none. ``unscored`` of ``n``
        answers had no letter. ``complete`` is 1 where every duration has the 300 videos that the official script insists on;
        ``videos/<duration>`` says how many there are, ``without_subtitles`` how many questions should have had some.
        """
        answered = all(isinstance(row.get("answer"), str) for row in rows)
        groups: dict[str, list[Mapping[str, Any]]] = {"": list(rows)}
        for row in rows:
            for by in ("duration", "domain", "sub_category", "task_type"):
                groups.setdefault(f"/{by}/{row['meta'][by]}", []).append(row)
        figures: dict[str, float] = {}
        for name, some in groups.items():
            scores = [row["score"] for row in some if row["score"] is not None]
            figures[f"accuracy{name}"] = sum(scores) / len(scores) if scores else 0.0
            if answered:
                right = sum(extract_lmms_eval(row["answer"]) == row["target"] for row in some)
                figures[f"lmms_eval{name}"] = right / len(some)
        videos = {d: {row["meta"]["videoID"] for row in rows if row["meta"]["duration"] == d} for d in DURATIONS}
        return {
            **figures,
            "accuracy_all": sum(row["score"] or 0.0 for row in rows) / len(rows),
            "n": float(len(rows)),
            "unscored": float(sum(row["score"] is None for row in rows)),
            "complete": float(all(len(ids) == VIDEOS for ids in videos.values())),
            **{f"videos/{d}": float(len(ids)) for d, ids in videos.items()},
            "without_subtitles": float(sum(row["meta"].get("subtitles") == "missing" for row in rows)),
        }

    def export(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """The official result file: videos with their questions and ``response``, in order of the rows."""
        videos: dict[str, dict[str, Any]] = {}
        for row in rows:
            meta = row["meta"]
            about = {k: meta[k] for k in ("video_id", "duration", "domain", "sub_category")}
            video = videos.setdefault(meta["video_id"], {**about, "missing": False, "questions": []})
            question = {k: meta[k] for k in ("question_id", "task_type", "question", "options")}
            video["questions"].append({**question, "answer": row["target"], "response": row["answer"]})
        return json.dumps(list(videos.values()), ensure_ascii=False, indent=1) + "\n"


def _subtitles_of(video: Path) -> Path:
    return video.parents[1] / "subtitle" / f"{video.stem}.srt"


def cues_at(path: Path, times: Sequence[float]) -> list[str]:
    """The cues of an .srt file that are on screen at some of these seconds, in order, each once.

    Text only: tags are dropped and line ends become spaces. A cue is on screen from its start up to, not including, its
    end. (VLMEvalKit repeats a cue for each frame that it covers; lmms-eval takes each once, as here.)

    Raises BadMedia where the file is no .srt file in UTF-8.
    """
    import srt  # type: ignore[import-untyped]

    try:
        cues = list(srt.parse(path.read_text(encoding="utf-8-sig")))
    except (srt.SRTParseError, UnicodeDecodeError, ValueError) as error:
        raise BadMedia(f"{path} must be a subtitle file (.srt, UTF-8), got {error}") from error
    lines = []
    for cue in sorted(cues, key=lambda c: c.start):
        if any(cue.start.total_seconds() <= t < cue.end.total_seconds() for t in times):
            text = " ".join(_TAG.sub("", cue.content).split())
            if text:
                lines.append(text)
    return lines


LETTERS = "ABCD"
DURATIONS = ("short", "medium", "long")
VIDEOS = 300
"""Videos of each duration in the whole data set."""

# Two commas are missing in the source, so that two prefixes are glued together and never match; "Best answer: C" is read
# as B, therefore.
_PREFIXES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
    "Answer:",
    "Option:",
    "The correct answer",
    "The correct option",
)


def extract_official(answer: str) -> str:
    """The first letter A-D anywhere once known prefixes are gone; "" where there is none."""
    text = answer.strip()
    for prefix in _PREFIXES:
        text = text.replace(prefix, "")
    match = re.search("[ABCD]", text)
    return match[0] if match else ""


_NOUNS = ("answer", "correct answer", "best answer", "correct option", "best option", "choice", "correct choice")
_PHRASES = (
    *(f"{the}{what} is" for what in _NOUNS for the in ("the ", "")),
    *("i choose", "i select", "i pick", "my answer is", "my choice is"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_FORMS = (("({})", 6), ("{}.", 5), ("{}:", 4), ("{})", 3), ("{} ", 2))


def extract_lmms_eval(answer: str) -> str:
    """The letter in the most telling form: alone at the start or end, after a phrase, in brackets, before a mark.

    Among equals the later one wins. A phrase counts for every letter that occurs after it.
    """
    text = answer.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    bare = text.strip()
    if not bare:
        return ""
    text, lower = f" {text} ", f" {text} ".lower()
    candidates: list[tuple[int, int, str]] = []
    for form, weight in _FORMS:
        candidates += [(weight, text.rfind(form.format(c)), c) for c in LETTERS if form.format(c) in text]
    for phrase in _PHRASES:
        at = lower.find(phrase)
        if at >= 0:
            places = ((text.find(c, at + len(phrase)), c) for c in LETTERS)
            candidates += [(7, place, c) for place, c in places if place >= 0]
    for c in LETTERS:
        if bare.startswith(c) and not bare[1:2].isalpha():
            candidates.append((10, 0, c))
        if bare.endswith(c) and not bare[-2:-1].isalpha():
            candidates.append((9, len(text) - 1, c))
    if not candidates:
        candidates = [(0, text.rfind(c), c) for c in LETTERS if c in text]
    return max(candidates, key=lambda one: one[:2])[2] if candidates else ""
