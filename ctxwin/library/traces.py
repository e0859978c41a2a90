"""Traces of the records that files of a library leave in stores, so that they can be removed with the files.

A file that is added, prepared or placed leaves a record ``trace/<library>/<file>/<model>`` in the store where that happens: its
chunks, and the keys of its entry, pixels, embeddings and of what was prepared. KV names its chunks itself. A record goes when
nothing of it is left, so that what an open window still serves is removed once that window has let go of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ctxwin.hashing import digest
from ctxwin.library.prepared import prepared_key
from ctxwin.library.records import Entry, Trace
from ctxwin.window.core import open_windows
from ctxwin.window.placements import stored_kv
from ctxwin.window.removed import is_removed

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.store.base import Store
    from ctxwin.store.spans import SpanRepository

_PREFIX = "trace/"


def library_id(name: str) -> str:
    """The library's part of a trace's key."""
    return digest("library", name)[:16]


def origin_of(library: str, entry: str) -> str:
    """`Chunk.origin` of a file: ``library`` is its `library_id`, ``entry`` the key of its `Entry`."""
    return f"{library}/{entry.partition('/')[2]}"


def note_trace(repo: SpanRepository, origin: str, entry: Entry, engine: Engine | None = None) -> None:
    """Record in ``repo`` what ``entry`` leaves there: by being added, or by being prepared or placed on ``engine``.

    Cost: a lookup where that is recorded already.
    """
    model = "" if engine is None else engine.spec.identity
    key = f"{_PREFIX}{origin}/{digest('trace', model)[:16]}"
    if repo.contains(key):
        return
    chunks = [passage.chunk for passage in entry.passages]
    keys = {f"source/{m.content}" for chunk in chunks for m in chunk.media}
    if engine is None:
        keys.add(f"entry/{origin.partition('/')[2]}")
    else:
        for chunk in chunks:
            keys |= {*engine.media_keys(chunk), prepared_key(engine, chunk)}
    _put(repo, key, [chunk.id for chunk in chunks], keys)


def note_keys(repo: SpanRepository, origin: str, keys: Sequence[str], name: str) -> None:
    """Record that ``keys`` in ``repo`` follow from a file, for what is called ``name``."""
    key = f"{_PREFIX}{origin}/{digest('keys', name)[:16]}"
    if not repo.contains(key):
        _put(repo, key, (), keys)


def _put(repo: SpanRepository, key: str, chunks: Iterable[str], keys: Iterable[str]) -> None:
    trace = Trace(chunks=tuple(dict.fromkeys(chunks)), keys=tuple(sorted(set(keys))))
    repo.put_json(key, trace.model_dump(mode="json"), bound=False)


def traced_libraries(store: Store) -> set[str]:
    """The `library_id` of every library whose files have left something in ``store``. Cost: a listing."""
    return {key.split("/")[1] for key in store.list(_PREFIX)}


def traced_entries(repo: SpanRepository, library: str) -> Iterator[str]:
    """Yield the keys of a library's entries by its traces, without those that were removed. Cost: a listing, and their reads."""
    for key in repo.store.list(f"{_PREFIX}{library}/"):
        yield from (name for name in _read(repo, key).keys if name.startswith("entry/"))


def collect(repo: SpanRepository, library: str, present: set[str]) -> bool:
    """Remove what files that have left ``library`` left in the store of ``repo``.

    What another file needs stays, and so does what a window that is open here has placed, or had placed from elsewhere.

    Args:
        library: a `library_id`.
        present: keys of the entries that it still has, old versions included.

    Returns:
        Whether nothing is left. Cost: a listing; where something goes, a read of every trace, and of every span and patch.
    """
    every = [(key, *key.split("/")[1:3]) for key in list(repo.store.list(_PREFIX))]
    leaving = {key: _read(repo, key) for key, of, entry in every if of == library and f"entry/{entry}" not in present}
    if not leaving:
        return True
    needed_chunks, needed = _merged([_read(repo, key) for key, *_ in every if key not in leaving])
    held_chunks, needed_by_windows = _window_needs(repo.store)
    chunks, keys = _merged(leaving.values())
    entries = {key for key in keys if key.startswith("entry/")}
    kv = set(stored_kv(repo, chunks - needed_chunks)) if chunks - needed_chunks else set()
    for key in (keys | kv) - needed - (needed_by_windows - entries):
        repo.delete(key)
    incomplete = False
    for key, trace in leaving.items():
        if needed_by_windows.isdisjoint(trace.keys) and held_chunks.isdisjoint(trace.chunks):
            repo.delete(key)
        else:
            _put(repo, key, trace.chunks, set(trace.keys) - entries)
            incomplete = True
    return not incomplete


def _merged(traces: Collection[Trace]) -> tuple[set[str], set[str]]:
    return {chunk for trace in traces for chunk in trace.chunks}, {key for trace in traces for key in trace.keys}


def _window_needs(store: Store) -> tuple[set[str], set[str]]:
    """Return chunks and keys that this process's open windows need in ``store``, without evicted chunks of removed files."""
    chunks, keys = set[str](), set[str]()
    for core in open_windows(store):
        state = core.state
        keys |= state.keys()
        for p in (*state.placed, *(p for p in state.evicted if not is_removed(p.chunk))):
            chunks.add(p.chunk_id)
            keys |= {*core.engine.media_keys(p.chunk), *(f"source/{m.content}" for m in p.chunk.media)}
    return chunks, keys


def _read(repo: SpanRepository, key: str) -> Trace:
    payload = repo.get_json(key, bound=False)
    return Trace() if payload is None else Trace.model_validate(payload)
