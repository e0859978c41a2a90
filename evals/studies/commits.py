"""What a window's commit costs: one edit of windows of several sizes, written to each kind of store.

    python -m evals.studies.commits [redis://127.0.0.1:6379/0]

Prints one row a store and size: bytes of the record, and the milliseconds of a commit and of a take-over (median and p95).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import typer

from ctxwin import Chunk, Window, open_store
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.serve.limits import Limits
from ctxwin.serve.windows import OpenWindows, WindowRegistry
from ctxwin.tiny import checkpoint_dir

SIZES = (5, 50, 200)
TIMES = 100


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def measure(url: str, chunks: int) -> list[float]:
    """Bytes of a record, then ms: commit (median, p95), take-over (median, p95)."""
    engine = HFEngine(checkpoint_dir(), store=open_store("memory:"))
    limits, records = Limits(), open_store(url)
    here, there = (WindowRegistry(engine, 8, limits, OpenWindows(8), records=records) for _ in range(2))
    window = here.add(Window(engine, "h", engine.spec.max_tokens))
    window.extend([Chunk.text(f"{i} ") for i in range(chunks)])
    with here.using(window.id):
        pass
    commits, moves = [], []
    for i in range(TIMES):
        with here.using(window.id) as held:
            held.append(Chunk.text(f"{i} "))
            held.evict(held.ids[0])
            entry = here._held[window.id]
            commits.append(timed(partial(here._save, entry)))
    size = len(records.get(f"window/{window.id}") or b"")
    for _ in range(TIMES // 5):
        here.close()
        here._closed = False
        moves.append(timed(partial(there._take, window.id)))
        there._held[window.id].users = 0
        here, there = there, here
    records.close()
    engine.close()
    return [size, *(float(np.percentile(of, p)) for of in (commits, moves) for p in (50, 95))]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for url in ["memory:", f"disk:{folder}", *sys.argv[1:]]:
            for chunks in SIZES:
                size, *ms = measure(url, chunks)
                row = f"{url.partition(':')[0]:8}{chunks:5} chunks {size / 1024:8.1f} KB  commit {ms[0]:6.2f} / {ms[1]:6.2f} ms"
                typer.echo(row + f"  take-over {ms[2]:6.2f} / {ms[3]:6.2f} ms")


if __name__ == "__main__":
    main()
