"""Subtitles of sampled frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_TAG = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")


def cues_at(path: Path, times: Sequence[float]) -> list[str]:
    """The cues of an .srt file that are on screen at some of these seconds, in order, each once.

    Text only: tags are dropped and line ends become spaces. A cue is on screen from its start up to, not including, its
    end. (VLMEvalKit repeats a cue for each frame that it covers; lmms-eval takes each once, as here.)

    Raises ValueError where the file is no .srt file in UTF-8.
    """
    import srt  # type: ignore[import-untyped]

    try:
        cues = list(srt.parse(path.read_text(encoding="utf-8-sig")))
    except (srt.SRTParseError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} must be a subtitle file (.srt, UTF-8), got {error}") from error
    shown = []
    for cue in sorted(cues, key=lambda c: c.start):
        if any(cue.start.total_seconds() <= t < cue.end.total_seconds() for t in times):
            text = " ".join(_TAG.sub("", cue.content).split())
            if text:
                shown.append(text)
    return shown
