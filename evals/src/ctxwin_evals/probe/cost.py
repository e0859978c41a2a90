"""Cost of a forward on this machine against a load (Kamera, section 6, appendix C.6, figure 11)."""

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.deficit import deficit
from ctxwin.kv.layout import SpanKV
from ctxwin.kv.patch import Layers, Layout, apply_patch, compress
from ctxwin.kv.relocate import relocate
from ctxwin.store import open_store
from ctxwin.store.spans import SpanRepository
from ctxwin_evals.bench.moves import words
from ctxwin_evals.serving import unshared_salt

SIZES = (64, 128, 256, 512, 1024)
REPEATS = 3


def costs(
    engine: Engine, system_prompt: str, rank: int, layers: Layers, layout: Layout, sizes: Iterable[int] = SIZES
) -> list[dict[str, Any]]:
    """Milliseconds by chunk size, the best of `REPEATS`: computing a chunk after another of its size, and loading it.

    ``prefill``: a request for the chunk, no vision. ``relocate``, ``apply``: rotation, rotation and patch. ``compress``:
    the decomposition when the patch is formed. ``memory``, ``disk``: fetching canonical and patch from a store. ``uses``:
    the number of uses (loading from memory) after which forming canonical and patch has paid off; None where it never does.
    """
    encoded = engine.encode_system_prompt(system_prompt)
    lead = Segment(encoded, 0, span=engine.prefill([], encoded, 0, salt=unshared_salt()))
    limit = engine.spec.max_tokens - encoded.tokens
    options = {"rank": rank, "layers": layers, "layout": layout}
    return [_one(engine, lead, size, options) for size in sizes if 2 * size < limit]


def _one(engine: Engine, lead: Segment, size: int, options: dict[str, Any]) -> dict[str, Any]:
    spec, start = engine.spec.kv, lead.encoded.advance
    rng = np.random.default_rng((0x636F7374, size))
    front, chunk = (Encoded.of_ids(words(engine, size, rng)) for _ in range(2))
    preceding = [lead, Segment(front, start, span=engine.prefill([lead], front, start, salt=unshared_salt()))]
    at = start + size

    def prefill() -> SpanKV:
        return engine.prefill(preceding, chunk, at, salt=unshared_salt())

    def alone() -> SpanKV:
        return relocate(engine.prefill([lead], chunk, start, salt=unshared_salt()), spec, 0)

    conditioned, canonical = prefill(), alone()
    patch = compress(deficit(conditioned, canonical, spec), spec, **options)
    ms = {
        "prefill": _best(prefill),
        "alone": _best(alone),
        "compress": _best(lambda: compress(deficit(conditioned, canonical, spec), spec, **options)),
        "relocate": _best(lambda: relocate(canonical, spec, at)),
        "apply": _best(lambda: apply_patch(canonical, patch, spec, at)),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, where in (("memory", "memory:"), ("disk", f"disk:{folder}")):
            store = open_store(where)
            # Nothing is kept decoded, so that reading the store and checking its bytes are timed.
            repo = SpanRepository(store, engine.spec.identity, max_live_bytes=0)
            repo.put_span("span/cost", canonical, {"token_ids": list(chunk.token_ids)})
            repo.put_patch("patch/cost", patch)
            ms[name] = _best(lambda repo=repo: (repo.get_span("span/cost"), repo.get_patch("patch/cost")))  # type: ignore[misc]
            store.close()
    saved = ms["prefill"] - ms["memory"] - ms["apply"]
    # The conditioned forward is not counted: it serves the first use.
    uses = max(1, math.ceil((ms["alone"] + ms["compress"]) / saved)) if saved > 0 else None
    sizes = {"tokens": size, "rank": patch.rank, "bytes": spec.span_bytes(size), "patch_bytes": patch.nbytes}
    return {**sizes, **{f"{name}_ms": round(value, 4) for name, value in ms.items()}, "uses": uses}


def _best(what: Callable[[], object]) -> float:
    """Milliseconds."""
    times = []
    settle: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(REPEATS):
        settle()
        begun = time.perf_counter()
        what()
        settle()
        times.append(1000 * (time.perf_counter() - begun))
    return min(times)
