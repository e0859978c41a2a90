"""Full window states in a store, so that a checkpoint needs to hold little more than a digest.

Everything is content-addressed. An *entry* is one placed or evicted chunk, written once and never changed. A *page* lists
entries; where it ends follows from the digests in it, so that a step rewrites the last page only. A *manifest* lists
the entries in the window, the pages of what was evicted, and the rest of the state. A step writes a few KB, however long the
session is. Nothing here is leased: what the store drops is rebuilt (`ctxwin.adapters.langgraph.reference`) or counted as lost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from ctxwin.hashing import digest
from ctxwin.store.recent import Recent
from ctxwin.window.state import Placed, State

if TYPE_CHECKING:
    from ctxwin.store.spans import SpanRepository

_PAGE = 32  # entries a page on average
_LONGEST = 4 * _PAGE
_REFRESHED = 32  # evicted entries that a save checks, in turn
_CACHED = 8192  # entries held decoded, per repository


_entries: WeakKeyDictionary[SpanRepository, Recent[Placed]] = WeakKeyDictionary()
_lock = threading.Lock()


def _known(repo: SpanRepository) -> Recent[Placed]:
    """Entries that this process has written or read, decoded, by digest."""
    with _lock:
        return _entries.setdefault(repo, Recent(_CACHED))


class _Same:
    """A placed chunk by its identity: comparing its content would cost what `_name` saves."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed

    def __hash__(self) -> int:
        return id(self.placed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.placed is other.placed


@lru_cache(_CACHED)
def _name(same: _Same) -> str:
    return digest("entry", _json(same.placed))


def describe(repo: SpanRepository, state: State) -> tuple[str, dict[str, Any], dict[str, list[str]]]:
    """The manifest of ``state``: its digest (and so that of everything in the state), its JSON, and its pages by digest.

    Writes nothing. Cost: JSON and a digest of each chunk not met before.
    """
    known, names = _known(repo), []
    for placed in (*state.placed, *state.evicted):
        names.append(_name(_Same(placed)))
        known.put(names[-1], placed, 1)
    count = len(state.placed)
    pages = {digest("page", page): page for page in _paged(names[count:])}
    record = {
        "state": state.model_dump(mode="json", exclude={"placed", "evicted"}, exclude_defaults=True),
        "placed": names[:count],
        "evicted": [[name, len(page)] for name, page in pages.items()],
    }
    return digest("manifest", record), record, pages


def write(repo: SpanRepository, state: State) -> str:
    """Stores ``state``, as far as it is not stored yet; returns its manifest's digest.

    Cost: an entry for each chunk that is new or was conditioned, the last page, the manifest.
    """
    manifest, record, pages = describe(repo, state)
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


def read(repo: SpanRepository, name: str) -> tuple[State, list[int], int] | None:
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
