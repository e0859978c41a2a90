"""What both engines' tests of hybrids share: random models, and random edits of windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ctxwin import Chunk, Window
from engines.models import write_hybrid, write_vision_model

WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_5": lambda folder: write_vision_model(folder, "qwen3_5"),
    "qwen3_5_text": write_hybrid,
    "qwen3_5_moe": lambda folder: write_vision_model(folder, "qwen3_5_moe"),
    "qwen3_5_moe_text": lambda folder: write_hybrid(folder, "Qwen3_5MoeText"),
    "qwen3_next": lambda folder: write_hybrid(folder, "Qwen3Next"),
}


def gap(a: dict[int, float], b: dict[int, float]) -> float:
    return max(abs(a[i] - b[i]) for i in a)


def edited(rng: np.random.Generator, windows: list[Window], chunk: Callable[[int], Chunk]) -> Window:
    """One of the windows, picked and edited at random; a fork joins them. Some edits lose spans from the store."""
    window = windows[int(rng.integers(len(windows)))]
    ids, edit, store = window.ids, int(rng.integers(8)), window.engine.store
    if edit == 0 or len(ids) < 2:
        window.append(chunk(int(rng.integers(50))))
    elif edit == 1:
        window.evict(ids[int(rng.integers(len(ids)))], forget=bool(rng.integers(4) == 0))
    elif edit == 2 and window.evicted:
        back = window.evicted[int(rng.integers(len(window.evicted)))]
        window.recall(back, int(rng.integers(len(ids) + 1)) if rng.integers(2) else None)
    elif edit == 3:
        window.reorder([ids[i] for i in rng.permutation(len(ids))])
    elif edit == 4:
        window.slide(1)
    elif edit == 5:
        windows.append(window.fork())
    elif edit == 6:
        for key in [k for k in store.list() if rng.integers(3) == 0 and k.startswith("span/")]:
            store.delete(key)
    else:
        window.insert(int(rng.integers(len(ids) + 1)), chunk(int(rng.integers(50))))
    return window
