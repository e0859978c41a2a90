"""Computing a library's KV ahead of use, and lending it to a window's store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.store.spans import SpanRepository
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine
    from ctxwin.store.base import Store

_log = logging.getLogger("ctxwin")


def prepare(repo: SpanRepository, chunks: Iterable[Chunk], engine: Engine, stopped: Callable[[], bool]) -> int:
    """Compute embeddings and neutral KV of ``chunks`` (with pixels) and note their keys in ``repo``; see `Library.prepare`."""
    done = 0
    with Window(engine, "", fidelity=Fidelity("exact")) as window:
        for chunk in chunks:
            if stopped():
                break
            stored = repo.get_json(prepared_key(engine, chunk), bound=False)
            if stored is not None and all(map(repo.contains, stored)):
                continue
            try:
                placement = window.append(chunk)
            except BudgetExceeded as error:
                _log.warning("%r was not prepared: %s", chunk.label, error)
                continue
            window.maintenance.prefill()
            (entry,) = window.snapshot().placed
            keys = sorted(engine.media_keys(chunk) | ({entry.kv.span} if entry.kv else set()))
            engine.repo.flush()
            _copy(engine.repo.store, repo.store, keys)
            repo.put_json(prepared_key(engine, chunk), keys, bound=False)
            window.evict(placement)
            done += 1
    return done


def lend(repo: SpanRepository, chunk: Chunk, engine: Engine) -> None:
    """Copy what was prepared of ``chunk`` for ``engine``'s model to its store, if that is another one.

    A copy of its own, so that neither store's evictions, nor how long they take, tell anything of the other.
    """
    _copy(repo.store, engine.repo.store, repo.get_json(prepared_key(engine, chunk), bound=False) or [])


def _copy(source: Store, target: Store, keys: Iterable[str]) -> None:
    """A store that refuses, or has lost one, costs a computation."""
    if source is target:
        return
    for key in keys:
        if not target.contains(key) and (blob := source.get(key)) is not None:
            target.put(key, blob)


def prepared_key(engine: Engine, chunk: Chunk) -> str:
    """Key of the record that names what was prepared of ``chunk`` for the model of ``engine``."""
    return f"prepared/{digest('prepared', engine.spec.name, engine.spec.identity, chunk.id)}"
