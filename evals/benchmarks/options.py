"""What a benchmark's items depend on beside the benchmark itself."""

from __future__ import annotations

from dataclasses import dataclass

from ctxwin.evals.benchmarks.frames import FRAME_RULES


@dataclass(frozen=True)
class DataOptions:
    """Where the data is and how it is shown to a model; each benchmark takes what concerns it.

    Attributes:
        data: a folder in the data set's official layout, or ``hub:OWNER/NAME`` to download that from the Hugging Face
            hub; None where answers are only scored.
        split: ``val`` or ``test`` (MM-NIAH), ``test`` (Video-MME), ``test`` or ``adv`` (MileBench); empty takes the first.
        frames: frames sampled from a video.
        frame_rule: which ones; see `ctxwin.evals.benchmarks.frames.FRAME_RULES`.
        max_pixels: larger pictures and frames are scaled down to this area, keeping their proportions; None leaves them.
        as_video: frames go in as one native video instead of as pictures.
        subtitles: Video-MME with the subtitles of the sampled frames.
        times: each frame that goes in as a picture has its time in front. The official prompt has none.
        skip_missing: items whose media are not there are left out instead of being an error.
        max_tokens: longest answer; None takes the benchmark's.
        text_words: longer texts between two pictures are cut into chunks of about that many words, at paragraph ends.
    """

    data: str | None = None
    split: str = ""
    frames: int = 8
    frame_rule: str = "vlmevalkit"
    max_pixels: int | None = None
    as_video: bool = False
    subtitles: bool = False
    times: bool = False
    skip_missing: bool = False
    max_tokens: int | None = None
    text_words: int = 512

    def __post_init__(self) -> None:
        for name, value, least in (
            ("frames", self.frames, 1),
            ("max_pixels", self.max_pixels, 28 * 28),
            ("max_tokens", self.max_tokens, 1),
            ("text_words", self.text_words, 8),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.frame_rule not in FRAME_RULES:
            raise ValueError(f"frame_rule must be one of {', '.join(FRAME_RULES)}; got {self.frame_rule!r}")
        if self.data is not None and not self.data:
            raise ValueError("data must be a folder or hub:OWNER/NAME, got an empty string")
