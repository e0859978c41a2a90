"""Prompts as people read them, for snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from ctxwin.chunk import Chunk, MediaPart, TextPart, TokensPart


def as_text(chunks: Sequence[Chunk], query: str) -> str:
    """A prompt as it reads: pictures as ``<image>``, videos as ``<video>`` with their frames."""
    return "".join(_shown(part) for chunk in chunks for part in chunk.parts) + query


def _shown(part: TextPart | TokensPart | MediaPart) -> str:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, TokensPart):
        return f"<{len(part.ids)} tokens>"
    return "<image>" if part.media == "image" else f"<video of {part.shape[0]} frames, {part.fps:g} a second>"
