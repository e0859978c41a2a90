"""Pictures, questions and a program of edits, whose answers servers with vLLM are compared by."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

from PIL import Image

from ctxwin import Chunk
from ctxwin.tiny import world

HEADER = "You watch a camera."
FRAMES = world.make_stream(seed=5, n_frames=8)
CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(FRAMES)]


def question(i: int) -> str:
    return f"color of {FRAMES[i].marks[0]:02d}?"


def plain_messages(indices: list[int], query: str) -> list[Any]:
    """The same prompt with the pictures in it."""
    parts: list[Any] = []
    for i in indices:
        buffer = io.BytesIO()
        Image.fromarray(world.render(FRAMES[i])).save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        parts += [{"type": "text", "text": f"t={i} s\n"}, {"type": "image_url", "image_url": {"url": url}}]
    parts.append({"type": "text", "text": query})
    return [{"role": "system", "content": HEADER}, {"role": "user", "content": parts}]


def cached(completion: Any) -> int:
    details = completion.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def program(window: Any) -> Iterator[str]:
    """What a window answers after each kind of edit."""
    ids = window.extend(CHUNKS[:4])
    yield window.ask(question(3), 4).text
    window.slide(1)
    ids.append(window.append(CHUNKS[4]))
    yield window.ask(question(4), 4).text
    window.recall(ids[0])
    yield window.ask(question(0), 4).text
    window.reorder([ids[2], *[i for i in window.ids if i != ids[2]]])
    yield window.ask(question(2), 4).text
    window.toggle(ids[3], conditioned=False)
    yield window.ask(question(3), 4).text
    window.toggle(ids[3], conditioned=True)
    window.insert(1, CHUNKS[5])
    yield window.ask(question(5), 4, remember=True).text
    branch = window.fork()
    branch.evict(ids[1])
    yield branch.ask(question(4), 4).text
    window.adopt(branch)
    window.evict(ids[4], forget=True)
    yield window.ask(question(0), 4).text
    window.check()
    branch.close()
