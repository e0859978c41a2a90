"""Pictures and text that attacks and honest users send."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from ctxwin.tiny import world

FRAMES = world.make_stream(seed=4, n_frames=3)
MARKS = [int(frame.marks[0]) for frame in FRAMES]
STORY = "the rain went on and a red car stood by the gate of the house while nobody was there to see it {}. "


def png(pixels: np.ndarray) -> str:
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def picture(i: int, text: str = "") -> dict[str, str]:
    return {"type": "image", "image": png(world.render(FRAMES[i])), "text": text}


def text(of: str) -> dict[str, str]:
    return {"type": "text", "text": of}


def long_text(seed: int, backwards: bool = False) -> dict[str, str]:
    """About 500 tokens that nobody has sent before; as many with other KV behind them when ``backwards``."""
    told = [STORY.format(f"{seed} {i}") for i in range(9)]
    return text("".join(told[::-1] if backwards else told))
