"""References: small JSON values that represent windows in graph state, and how windows are restored from them.

A reference names an immutable version of a window, whose manifest is in the engine's store. In addition to the digest it
holds the placed chunks (text, path or digest of pictures, sampling; no KV bookkeeping), about 400 bytes each plus their text.
A thread can therefore continue after the store has lost its content: placed chunks are rebuilt from their sources, evicted
ones can no longer be recalled. A picture with a path survives a lost store; one from memory has its pixels only there.

The store is content-addressed. An *entry* is one placed or evicted chunk, written once and never changed. A *page* lists
entries; the digests in it decide where it ends, so that a step rewrites only the last page. A *manifest* lists the entries
in the window, the pages of evicted ones, and the other fields of the state. What lists entries also has their antecedents, as
runs of orders that they share (`ctxwin.window.antecedents`). A step writes a few KB, independent of the session's length.
Nothing is leased: what the store drops is rebuilt or counted as lost.

A reference consists of dict, list, str, int and float: safe for every checkpoint serializer, also with
``LANGGRAPH_STRICT_MSGPACK=true``.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from ctxwin.hashing import digest
from ctxwin.store.lru import LRUCache
from ctxwin.validation import describe
from ctxwin.window.antecedents import Antecedents, pack, unpack
from ctxwin.window.state import Placed, State
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.store.spans import SpanRepository

log = logging.getLogger("ctxwin")

_PAGE = 32  # mean entries per page
_MAX_PAGE = 4 * _PAGE
_REFRESHED = 32  # evicted entries that a save checks, in turn
_CACHED = 8192  # decoded entries in memory, per repository
FORMAT = 1
_RANKS = ("adopted", "version", "operations")  # compared by `merge_windows`, in this order
_DROPPED = {"kv", "seen", "unseen", "read", "chunk_id"}  # fields of a placed chunk that are bookkeeping or derived

_entries: WeakKeyDictionary[SpanRepository, LRUCache[Placed]] = WeakKeyDictionary()
_names: LRUCache[tuple[Placed, str]] = LRUCache(_CACHED)
_lock = threading.Lock()


def _entry_cache(repo: SpanRepository) -> LRUCache[Placed]:
    """Return the decoded entries that this process has written or read, by digest."""
    with _lock:
        return _entries.setdefault(repo, LRUCache(_CACHED))


@dataclass(frozen=True)
class Restored:
    """A state restored from a reference.

    Attributes:
        lost: evicted chunks that can no longer be recalled.
        rebuilt: placed chunks whose KV bookkeeping is lost; they are computed again from their sources.
    """

    state: State
    lost: int = 0
    rebuilt: int = 0


def save(
    window: Window,
    *,
    operations: int = 0,
    adopted: int = 0,
    parent: str | None = None,
    notes: Mapping[str, Any] | None = None,
    written: Sequence[str] = (),
) -> dict[str, Any]:
    """Store the window's state and return its reference.

    Args:
        operations: number of operations so far, over all nodes; `merge_windows` compares it if versions are equal.
        adopted: number of adoptions so far (`Session.ref`); `merge_windows` compares it before the version.
        parent: id of the window it was forked from.
        notes: plain JSON of the caller, stored in the reference.
        written: ids of the checkpoint and the task that write it, and the manifest that task began with, by which
            `merge_windows` identifies parallel writers.

    Cost: a few KB of writes, independent of the number of evicted chunks.
    """
    state = window.snapshot()
    entries = [p.model_dump(mode="json", exclude_defaults=True, exclude=_DROPPED) for p in state.placed]
    optional: dict[str, Any] = {
        "parent": parent,
        "written": list(written),
        "notes": copy.deepcopy(dict(notes or {})),
        "encodes": window.core.vision_encodes,  # counted in the next answer, which may be another node's
    }
    return {
        **_head(state),
        **{key: value for key, value in optional.items() if value},
        "format": FORMAT,
        "window": state.window,
        "version": state.version,  # always present, also 0, as are the other fields that `merge_windows` compares
        "operations": operations,
        "adopted": adopted,
        "manifest": write_manifest(window.engine.repo, state),
        "tokens": state.tokens,
        "evicted": len(state.evicted),
        "placed": entries,
    }


def load(engine: Engine, reference: Mapping[str, Any], **options: Any) -> Window:
    """Return the window of a reference. ``options``: as for `Window.restore` (``seed``, ``eviction``, ``retrieval``).

    Raises ValueError or TypeError if it is not a reference. If both content and source of a placed chunk are gone, the next
    ask raises ChunkUnavailable; the chunk can be evicted to continue without it.
    """
    return Window.restore(engine, restore(engine.repo, reference).state, **options)


def restore(repo: SpanRepository, reference: Mapping[str, Any]) -> Restored:
    """Return the state of a reference: from the store if it is stored there, else from the reference itself."""
    check(reference)
    stored = read_manifest(repo, reference["manifest"])
    if stored is not None and not stored[1] and not stored[2]:
        return Restored(stored[0])
    light = _rebuild(reference)
    if stored is None:
        state, lost, rebuilt = light, reference["evicted"], len(light.placed)
    else:
        stored_entries = {p.id: p for p in stored[0].placed}
        state = stored[0].replace(placed=tuple(stored_entries.get(p.id, p) for p in light.placed))
        lost, rebuilt = stored[2], len(stored[1])
    log.warning(
        f"the store lost content of window {state.window} version {state.version}: {lost} evicted chunks cannot be "
        f"recalled, {rebuilt} placed ones are rebuilt"
    )
    return Restored(state, lost, rebuilt)


def check(reference: Any) -> None:
    """Raise TypeError or ValueError if ``reference`` does not have the form that `save` returns."""
    if not isinstance(reference, Mapping):
        raise TypeError(
            f"a window reference must be a dict from Session.ref(), got {type(reference).__name__}; keep the engine and "
            "the window out of the state"
        )
    if missing := {"format", "window", "placed", "manifest", *_RANKS} - reference.keys():
        raise ValueError(f"a window reference must have {sorted(missing)}, got {sorted(reference)}; use Session.ref()")
    if reference["format"] != FORMAT:
        raise ValueError(
            f"a window reference must have format {FORMAT}, got {reference['format']!r}; use the ctxwin that wrote it"
        )


def lost_sources(repo: SpanRepository, reference: Mapping[str, Any]) -> set[str]:
    """Return the contents of placed pictures that came from memory and whose pixels the store has lost.

    Raises like `restore`. Cost: a look-up for each.
    """
    check(reference)
    media = (part for p in _rebuild(reference).placed if p.chunk.keep_source for part in p.chunk.media)
    return {part.content for part in media if part.source is None and not repo.contains(f"source/{part.content}")}


def _rebuild(reference: Mapping[str, Any]) -> State:
    """Return the state as far as the reference holds it: nothing computed, nothing evicted."""
    excluded = {"format", "placed", "evicted"}
    head = {key: value for key, value in reference.items() if key in State.model_fields and key not in excluded}
    try:
        state = State.model_validate(head)
        entries = [Placed.model_validate({**record, "chunk_id": ""}) for record in reference["placed"]]
    except ValidationError as error:
        raise ValueError(
            f"a window reference must be what Session.ref() returned, got another dict: {describe(error)}"
        ) from error
    return state.replace(placed=tuple(p.replace(chunk_id=p.chunk.id, read=state.version) for p in entries))


def merge_windows(left: dict[str, Any] | None, right: dict[str, Any] | None) -> dict[str, Any] | None:
    """Reduce two references of a window key to the one that the state keeps.

    Same window: the one that was adopted more often (`Session.ref` with ``adopt=True``), then the higher version, then
    more operations, then the greater digest of the placed chunks. The order in which parallel branches finish therefore does
    not matter, a repeated run keeps the same one, and an older version changes nothing: a node returns to it with
    ``adopt=True``, ``update_state`` with LangGraph's ``Overwrite(reference)``. Another window: the one written last (LangGraph
    applies the writes of a step in a fixed order). Nor does None change anything, or the empty dict that a key starts with.

    If two nodes of one step wrote, the other's edits are not in the result: that is logged, and its reference stays in the
    result until the next node has written (`Session.dropped`, `Session.gather`).
    """
    if not left or not right:
        return right or left
    check(left)
    check(right)
    winner, other = right, left
    if left["window"] == right["window"] and max(left, right, key=_rank) is left:
        winner, other = left, right
    writer, parallel = winner.get("written"), other.get("written")
    if not (
        writer
        and parallel
        and writer[0] == parallel[0]  # the same checkpoint
        and writer[1] != parallel[1]  # another task
        and writer[2] != other["manifest"]  # which has not seen the other's edits
    ):
        return winner
    log.warning(
        f"two parallel nodes wrote window {winner['window']}: version {winner['version']} of window {other['window']} is not "
        "in the result; Session.gather() takes its chunks, or let branches write keys of their own and join them"
    )
    dropped = [{k: v for k, v in other.items() if k != "dropped"}, *other.get("dropped", ())]
    return {**winner, "dropped": sorted([*winner.get("dropped", ()), *dropped], key=_rank)}


def _rank(reference: dict[str, Any]) -> tuple[Any, ...]:
    contents = [{k: v for k, v in record.items() if k != "id"} for record in reference["placed"]]
    # Placement ids depend on the run, contents do not.
    return (
        *(reference[name] for name in _RANKS),
        digest("placed", contents),
        reference["manifest"],
        digest(reference.get("notes", {})),
    )


def _name(entry: Placed) -> str:
    """Return the digest of an entry, cached by the object's id; the cache holds the object, so the id stays unique."""
    return _names.get_or_build(
        str(id(entry)), lambda: (entry, digest("entry", entry.model_dump(mode="json", exclude_defaults=True)))
    )[1]


def manifest_of(repo: SpanRepository, state: State) -> tuple[str, dict[str, Any], dict[str, list[str]]]:
    """Return the manifest of ``state``: its digest (which covers the entire state), its JSON, and its pages by digest.

    Writes nothing. Cost: JSON and a digest of each chunk that is not cached.
    """
    cache, names = _entry_cache(repo), []
    for entry in (*state.placed, *state.evicted):
        names.append(_name(entry))
        if cache.get(names[-1]) is None:
            cache.put(names[-1], entry, 1)
    count = len(state.placed)
    pages = {digest("page", page): page for page in _split_pages(names[count:])}
    record = {
        "state": _head(state),
        "placed": names[:count],
        "evicted": [[name, len(page)] for name, page in pages.items()],
    }
    return digest("manifest", record), record, pages


def write_manifest(repo: SpanRepository, state: State) -> str:
    """Store the parts of ``state`` that are not stored yet; return its manifest's digest.

    Cost: an entry for each chunk that is new or was conditioned, the last page, the manifest.
    """
    manifest, record, pages = manifest_of(repo, state)
    if repo.contains(f"manifest/{manifest}"):
        return manifest
    fresh = {name: page for name, page in pages.items() if not repo.contains(f"page/{name}")}
    chunks, at = state.evicted, 0
    for name, page in pages.items():
        if name in fresh:
            repo.put_json(f"page/{name}", {"names": page, **_pack(chunks[at : at + len(page)])}, bound=False)
        at += len(page)
    evicted = [name for page in pages.values() for name in page]
    # Old evicted entries are checked in turn: that marks them as used, and those the store has dropped are written again.
    first = state.version * _REFRESHED
    turn = {evicted[(first + i) % len(evicted)] for i in range(min(len(evicted), _REFRESHED))}
    unsure = turn.union(record["placed"], *fresh.values())
    for name, entry in zip((*record["placed"], *evicted), (*state.placed, *state.evicted), strict=True):
        if name in unsure and not repo.contains(f"entry/{name}"):
            # Antecedents are part of what lists an entry.
            bare = entry if entry.kv is None else entry.replace(kv=entry.kv.without_antecedents())
            fields = bare.model_dump(mode="json", exclude_defaults=True, exclude={"kv": {"antecedents"}})
            repo.put_json(f"entry/{name}", fields, bound=False)
    repo.put_json(f"manifest/{manifest}", record | _pack(state.placed), bound=False)
    return manifest


def read_manifest(repo: SpanRepository, name: str) -> tuple[State, list[int], int] | None:
    """Return the state of a manifest, the indices of placed chunks whose entries are gone (the state lacks them), and the
    number of lost evicted ones; None if the manifest is not in the store or cannot be read.

    Cost: a read for each chunk that this process has not cached.
    """
    record = repo.get_json(f"manifest/{name}", bound=False)
    if record is None:
        return None
    entries = _read_entries(repo, record["placed"], record)
    evicted: list[Placed] = []
    lost = 0
    for page, length in record["evicted"]:
        listed = repo.get_json(f"page/{page}", bound=False) or {"names": []}
        readable = [p for p in _read_entries(repo, listed["names"], listed) if p is not None]
        evicted += readable
        lost += length - len(readable)
    try:
        state = State.model_validate(record["state"])
    except ValidationError:  # of a version that wrote other fields
        return None
    missing = [i for i, p in enumerate(entries) if p is None]
    return state.replace(placed=tuple(p for p in entries if p is not None), evicted=tuple(evicted)), missing, lost


def forget(repo: SpanRepository, placement: str) -> None:
    """Delete the cached entries of a placement from the store; manifests that list them then lack them."""
    cache = _entry_cache(repo)
    for name, entry in cache.items():
        if entry.id == placement:
            cache.pop(name)
            repo.delete(f"entry/{name}")


def _read_entries(repo: SpanRepository, names: Sequence[str], listed: Mapping[str, Any]) -> list[Placed | None]:
    """Return the entries of these names, with antecedents as they are ``listed``; None for those that are gone."""
    cache = _entry_cache(repo)
    entries = [cache.get(name) for name in names]
    fronts: list[Any] = [None] * len(names)
    with suppress(ValueError):  # malformed: KV without antecedents is no KV
        if None in entries and len(listed.get("runs", ())) == len(names):
            runs = [{"kv": {"antecedents": run}} for run in listed["runs"]]
            fronts = [kv["kv"]["antecedents"] for kv in unpack({"orders": listed["orders"], "placed": runs})["placed"]]
    for i, (name, front) in enumerate(zip(names, fronts, strict=True)):
        if entries[i] is None and (record := repo.get_json(f"entry/{name}", bound=False)) is not None:
            if record.get("kv"):
                record["kv"] = None if front is None else record["kv"] | {"antecedents": front}
            with suppress(ValidationError):  # of a version that wrote other fields: a miss
                entries[i] = entry = Placed.model_validate(record)
                cache.put(name, entry, 1)
                _names.put(str(id(entry)), (entry, name), 1)
    return entries


def _pack(entries: Sequence[Placed]) -> dict[str, Any]:
    """Return the antecedents of ``entries`` as runs of orders."""
    fronts: list[Antecedents | None] = []
    last: Antecedents | None = None
    for entry in entries:
        front = entry.kv.antecedents if entry.kv else None
        if front and last and front.order is not last.order:  # as those of entries that were restored
            front = last.order.run(last.version, list(front)) or front
        fronts.append(front)
        last = front or last
    data = pack({"placed": [{"kv": {"antecedents": []}} for _ in fronts]}, {"placed": fronts})
    return {"runs": [chunk["kv"]["antecedents"] for chunk in data["placed"]], "orders": data.get("orders", [])}


def _head(state: State) -> dict[str, Any]:
    """Return the fields of ``state`` apart from its chunks, which leave first: pydantic walks those that it excludes, too."""
    return state.replace(placed=(), evicted=()).model_dump(mode="json", exclude_defaults=True)


def _split_pages(names: Sequence[str]) -> list[list[str]]:
    """Split ``names`` into pages. Digests decide where a page ends, so that a change affects only its own page."""
    pages: list[list[str]] = []
    for name in names:
        if not pages or len(pages[-1]) >= _MAX_PAGE or (pages[-1] and int(pages[-1][-1][-8:], 16) % _PAGE == 0):
            pages.append([])
        pages[-1].append(name)
    return pages
