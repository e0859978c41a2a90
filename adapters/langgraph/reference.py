"""The small JSON value that stands for a window in graph state, and the way back from it.

A reference names a version of a window, which never changes; its manifest is in the engine's store. Beside the digest it
holds the placed chunks (text, path or digest of pictures, sampling; no KV bookkeeping), about 400 bytes each plus their text.
So a thread goes on where the store has lost its content: what is placed is rebuilt from its sources, what was evicted cannot
be recalled any more. A picture with a path survives a lost store; one that was given in memory has its pixels only there.

In the store everything is content-addressed. An *entry* is one placed or evicted chunk, written once and never changed. A
*page* lists entries; where it ends follows from the digests in it, so that a step rewrites the last page only. A *manifest*
lists the entries in the window, the pages of what was evicted, and the rest of the state. A step writes a few KB, however long
the session is. Nothing of it is leased: what the store drops is rebuilt or counted as lost.

A reference is plain dict, list, str, int, float: safe for every checkpoint serializer, also with
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
from ctxwin.store.recent import Recent
from ctxwin.window.state import Placed, State
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.store.spans import SpanRepository

log = logging.getLogger("ctxwin")

_PAGE = 32  # entries a page on average
_LONGEST = 4 * _PAGE
_REFRESHED = 32  # evicted entries that a save checks, in turn
_CACHED = 8192  # entries held decoded, per repository
FORMAT = 1
_RANKS = ("adopted", "version", "operations")  # what `merge_windows` compares, in this order
_DROPPED = {"kv", "seen", "unseen", "read", "chunk_id"}  # of a placed chunk: bookkeeping, or follows from it

_entries: WeakKeyDictionary[SpanRepository, Recent[Placed]] = WeakKeyDictionary()
_names: Recent[tuple[Placed, str]] = Recent(_CACHED)
_lock = threading.Lock()


def _known(repo: SpanRepository) -> Recent[Placed]:
    """Entries that this process has written or read, decoded, by digest."""
    with _lock:
        return _entries.setdefault(repo, Recent(_CACHED))


@dataclass(frozen=True)
class Restored:
    """What a reference gave.

    Attributes:
        lost: evicted chunks that cannot be recalled any more.
        rebuilt: placed chunks whose KV bookkeeping is gone: they are computed again from their sources.
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
    """Stores the window's state and returns its reference.

    Args:
        operations: how many led here, over all nodes; `merge_windows` compares them where versions are equal.
        adopted: how often a branch was declared the one to go on with; `merge_windows` compares it before the version.
        parent: id of the window it was forked from.
        notes: plain JSON of the caller's, carried along.
        written: ids of the checkpoint and the task it is written in, and the manifest that task began with, by which
            `merge_windows` knows parallel writers.

    Cost: a few KB of writes, however much was evicted.
    """
    state = window.snapshot()
    head = state.model_dump(mode="json", exclude={"placed", "evicted", "format"}, exclude_defaults=True)
    placed = [p.model_dump(mode="json", exclude_defaults=True, exclude=_DROPPED) for p in state.placed]
    beside: dict[str, Any] = {
        "parent": parent,
        "written": list(written),
        "notes": copy.deepcopy(dict(notes or {})),
        "encodes": window.core.vision_encodes,  # they belong to the next answer, which may be another node's
    }
    return {
        **head,
        **{key: value for key, value in beside.items() if value},
        "format": FORMAT,
        "window": state.window,
        "version": state.version,  # as what else `merge_windows` compares, also where it is 0
        "operations": operations,
        "adopted": adopted,
        "manifest": write_manifest(window.engine.repo, state),
        "tokens": state.tokens,
        "evicted": len(state.evicted),
        "placed": placed,
    }


def load(engine: Engine, reference: Mapping[str, Any], **options: Any) -> Window:
    """The window of a reference. ``options``: as `Window.restore` (``seed``, ``eviction``, ``retrieval``).

    Raises ValueError or TypeError for what is no reference. Where content and source of a placed chunk are gone, the next
    ask raises ChunkUnavailable; the chunk can be evicted to go on without it.
    """
    return Window.restore(engine, restore(engine.repo, reference).state, **options)


def restore(repo: SpanRepository, reference: Mapping[str, Any]) -> Restored:
    """The state of a reference: from the store where it is there, else from the reference itself."""
    check(reference)
    found = read_manifest(repo, reference["manifest"])
    if found is not None and not found[1] and not found[2]:
        return Restored(found[0])
    light = _rebuilt(reference)
    if found is None:
        state, lost, rebuilt = light, reference["evicted"], len(light.placed)
    else:
        held = {p.id: p for p in found[0].placed}
        state = found[0].replace(placed=tuple(held.get(p.id, p) for p in light.placed))
        lost, rebuilt = found[2], len(found[1])
    log.warning(
        f"the store lost content of window {state.window} version {state.version}: {lost} evicted chunks cannot be "
        f"recalled, {rebuilt} placed ones are rebuilt"
    )
    return Restored(state, lost, rebuilt)


def check(reference: Any) -> None:
    """TypeError or ValueError where ``reference`` is not what `save` returns."""
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


def _rebuilt(reference: Mapping[str, Any]) -> State:
    """The state as far as the reference itself has it: nothing computed, nothing evicted."""
    beside = {"format", "placed", "evicted"}
    head = {key: value for key, value in reference.items() if key in State.model_fields and key not in beside}
    try:
        state = State.model_validate(head)
        placed = [Placed.model_validate({**record, "chunk_id": ""}) for record in reference["placed"]]
    except ValidationError as error:
        raise ValueError(
            f"a window reference must be what Session.ref() returned, got another dict: {error}"
        ) from error
    return state.replace(placed=tuple(p.replace(chunk_id=p.chunk.id, read=state.version) for p in placed))


def merge_windows(left: dict[str, Any] | None, right: dict[str, Any] | None) -> dict[str, Any] | None:
    """The reducer of a window key: which reference the state goes on with.

    Same window: the one that was adopted more often (`Session.ref` with ``adopt=True``), then the higher version, then
    more operations, then the greater digest of what is placed. So the order in which parallel branches finish does not
    matter, the same run goes on with the same one, and a node goes back to an older version only with ``adopt=True``.
    Another window: the one written last (LangGraph applies the writes of a step in a fixed order). None changes nothing,
    and neither does the empty dict that LangGraph starts a key with.

    Where nodes of one step both wrote, the other's edits are not in the result: that is logged, and its reference is kept in
    the result until the next node has written (`Session.dropped`, `Session.gather`).
    """
    if not left or not right:
        return right or left
    check(left)
    check(right)
    goes_on, other = right, left
    if left["window"] == right["window"] and max(left, right, key=_rank) is left:
        goes_on, other = left, right
    theirs, ours = other.get("written"), goes_on.get("written")
    if not (theirs and ours and theirs[0] == ours[0] and theirs[1] != ours[1] and ours[2] != other["manifest"]):
        return goes_on
    log.warning(
        f"two parallel nodes wrote window {goes_on['window']}: version {goes_on['version']} of window {other['window']} is not "
        "in the result; Session.gather() takes its chunks, or let branches write keys of their own and join them"
    )
    dropped = [{k: v for k, v in other.items() if k != "dropped"}, *other.get("dropped", ())]
    return {**goes_on, "dropped": sorted([*goes_on.get("dropped", ()), *dropped], key=_rank)}


def _rank(made: dict[str, Any]) -> tuple[Any, ...]:
    contents = [{k: v for k, v in placed.items() if k != "id"} for placed in made["placed"]]
    # Ids follow from the run's; contents do not.
    return (
        *(made[name] for name in _RANKS),
        digest("placed", contents),
        made["manifest"],
        digest(made.get("notes", {})),
    )


def _name(placed: Placed) -> str:
    """Digest of an entry, remembered by the object; the object is held, so that no other one has its id."""
    held = _names.get(str(id(placed)))
    if held is None:
        held = placed, digest("entry", _json(placed))
        _names.put(str(id(placed)), held, 1)
    return held[1]


def manifest_of(repo: SpanRepository, state: State) -> tuple[str, dict[str, Any], dict[str, list[str]]]:
    """The manifest of ``state``: its digest (and so that of everything in the state), its JSON, and its pages by digest.

    Writes nothing. Cost: JSON and a digest of each chunk not met before.
    """
    known, names = _known(repo), []
    for placed in (*state.placed, *state.evicted):
        names.append(_name(placed))
        if known.get(names[-1]) is None:
            known.put(names[-1], placed, 1)
    count = len(state.placed)
    pages = {digest("page", page): page for page in _paged(names[count:])}
    record = {
        "state": state.model_dump(mode="json", exclude={"placed", "evicted"}, exclude_defaults=True),
        "placed": names[:count],
        "evicted": [[name, len(page)] for name, page in pages.items()],
    }
    return digest("manifest", record), record, pages


def write_manifest(repo: SpanRepository, state: State) -> str:
    """Stores ``state``, as far as it is not stored yet; returns its manifest's digest.

    Cost: an entry for each chunk that is new or was conditioned, the last page, the manifest.
    """
    manifest, record, pages = manifest_of(repo, state)
    if repo.contains(f"manifest/{manifest}"):
        return manifest
    fresh = {name: page for name, page in pages.items() if not repo.contains(f"page/{name}")}
    evicted = [name for page in pages.values() for name in page]
    # What was evicted long ago is checked in turn: that marks it as used, and what the store has dropped comes back.
    first = state.version * _REFRESHED
    turn = {evicted[(first + i) % len(evicted)] for i in range(min(len(evicted), _REFRESHED))}
    unsure = turn.union(record["placed"], *fresh.values())
    for name, placed in zip((*record["placed"], *evicted), (*state.placed, *state.evicted), strict=True):
        if name in unsure and not repo.contains(f"entry/{name}"):
            repo.put_json(f"entry/{name}", _json(placed), bound=False)
    for name, page in fresh.items():
        repo.put_json(f"page/{name}", page, bound=False)
    repo.put_json(f"manifest/{manifest}", record, bound=False)
    return manifest


def read_manifest(repo: SpanRepository, name: str) -> tuple[State, list[int], int] | None:
    """The state of a manifest, the indices of placed chunks whose entries are gone (the state lacks them), and how many
    evicted ones are gone; None where the manifest is not in the store or cannot be read.

    Cost: a read for each chunk that this process has not met.
    """
    record = repo.get_json(f"manifest/{name}", bound=False)
    if record is None:
        return None
    placed = [_entry(repo, entry) for entry in record["placed"]]
    evicted: list[Placed] = []
    lost = 0
    for page, length in record["evicted"]:
        listed = repo.get_json(f"page/{page}", bound=False)
        found = [p for entry in listed or () if (p := _entry(repo, entry)) is not None]
        evicted += found
        lost += length - len(found)
    try:
        state = State.model_validate(record["state"])
    except ValidationError:  # of a version that wrote other fields
        return None
    missing = [i for i, p in enumerate(placed) if p is None]
    return state.replace(placed=tuple(p for p in placed if p is not None), evicted=tuple(evicted)), missing, lost


def forget(repo: SpanRepository, placement: str) -> None:
    """Deletes the entries of a placement that this process has met; manifests that list them then lack them."""
    known = _known(repo)
    for name, placed in known.items():
        if placed.id == placement:
            known.pop(name)
            repo.delete(f"entry/{name}")


def _entry(repo: SpanRepository, name: str) -> Placed | None:
    known = _known(repo)
    found = known.get(name)
    if found is None and (record := repo.get_json(f"entry/{name}", bound=False)) is not None:
        with suppress(ValidationError):  # of a version that wrote other fields: a miss
            found = Placed.model_validate(record)
            known.put(name, found, 1)
    return found


def _json(placed: Placed) -> dict[str, Any]:
    return placed.model_dump(mode="json", exclude_defaults=True)


def _paged(names: Sequence[str]) -> list[list[str]]:
    """``names`` in pages. Digests decide where a page ends, so that a change changes only the page it is in."""
    pages: list[list[str]] = []
    for name in names:
        if not pages or len(pages[-1]) >= _LONGEST or (pages[-1] and int(pages[-1][-1][-8:], 16) % _PAGE == 0):
            pages.append([])
        pages[-1].append(name)
    return pages
