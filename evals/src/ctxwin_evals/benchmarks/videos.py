"""Questions about videos, which a model is shown as sampled frames or as one native video."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.benchmarks.base import DataTask, Missing
from ctxwin_evals.benchmarks.frames import Sampled, frames_taken, sample_frames
from ctxwin_evals.items import Item


class VideoTask(DataTask):
    """A benchmark of videos, each asked about after its frames.

    Frames are decoded when an item is loaded, and only then known: ``load`` adds ``frame_indices``, ``frame_times``,
    ``video_frames`` and ``fps`` to the item's ``meta``.
    """

    answer_tokens = 16
    places: ClassVar[tuple[str, ...]]
    """Where a video may lie, with ``{}`` for its name."""

    def config(self) -> dict[str, Any]:
        o = self.options
        form = {"form": "video" if o.as_video else "images", "times": o.times and not o.as_video}
        return {**super().config(), **form, "frames": frames_taken(o.frame_rule, o.frames), "frame_rule": o.frame_rule}

    def find_video(self, name: str, where: str, doc_id: str) -> Path:
        """The file of a video; raises `Missing`, which says where it was looked for."""
        places = [place.format(name) for place in self.places]
        for place in places:
            if (self.root / place).is_file():
                return self.root / place
        looked = f"got none of {', '.join(places)} in {str(self.root)!r}"
        raise Missing(f"{where} must find its video, {looked}; or pass skip_missing (--skip-missing)", doc_id)

    def item_of(self, video: Path, content: Sequence[Any], meta: Mapping[str, Any], more: int = 0, **rest: Any) -> Item:
        """Return the item of a video; ``rest`` are further fields.

        ``content`` is what it shows and asks besides the frames, for its digest; ``more`` chunks are added by `chunks_after`.
        """
        o, frames = self.options, frames_taken(self.options.frame_rule, self.options.frames)
        form = {"form": "video" if o.as_video else "images", "frames": frames, "frame_rule": o.frame_rule}
        about: dict[str, Any] = {**meta, **form, "max_pixels": o.max_pixels}
        settings = frames, o.frame_rule, o.max_pixels, o.as_video, o.times
        name = digest(self.name, list(content), video.stat().st_size, *settings)
        count, load = (1 if o.as_video else frames) + more, partial(self._chunks, video, about)
        return self.item(count, load=load, digest=name, meta=about, **rest)

    def chunks_after(self, video: Path, sampled: Sampled, meta: Mapping[str, Any]) -> list[Chunk]:
        """Chunks between the frames and the question; none by default."""
        return []

    def _chunks(self, video: Path, meta: dict[str, Any]) -> list[Chunk]:
        o = self.options
        sampled = sample_frames(video, o.frame_rule, o.frames, o.max_pixels)
        if o.as_video:
            chunks = [Chunk.video(list(sampled.pixels), fps=sampled.fps)]
        else:
            lines = [f"t={t:.1f} s" if o.times else "" for t in sampled.times]
            chunks = [Chunk.image(f, text=line) for f, line in zip(sampled.pixels, lines, strict=True)]
        meta |= {"frame_indices": list(sampled.indices), "frame_times": [round(t, 3) for t in sampled.times]}
        meta |= {"video_frames": sampled.total, "fps": sampled.fps, "frame_size": list(sampled.pixels.shape[1:3])}
        return chunks + self.chunks_after(video, sampled, meta)
