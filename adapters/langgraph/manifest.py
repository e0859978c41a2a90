"""Full window states in a store, so that a checkpoint needs to hold little more than a digest.

Everything is content-addressed. An *entry* is one placed or evicted chunk; it is written once and never again. A *page*
lists entries; where one ends follows from the digests in it, so that a step rewrites the last page only. A *manifest* lists
the entries in the window, the pages of what was evicted, and the rest of the state. A step writes a few KB, however long the
session is. Nothing here is leased: what the store drops is rebuilt (`ctxwin.adapters.langgraph.reference`) or counted as lost.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from ctxwin.hashing import digest
from ctxwin.window.state import Placed, State

if TYPE_CHECKING:
    from ctxwin.store.spans import SpanRepository

_PAGE = 32  # entries a page on average
_LONGEST = 4 * _PAGE
_REFRESHED = 32  # evicted entries a save looks at, in turn
_CACHED = 8192  # entries held decoded, per repository


class _Entries:
    """Entries that were written or read in this process, decoded; the least recently used leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_digest: OrderedDict[str, Placed] = OrderedDict()
        self._by_object: dict[int, str] = {}  # of objects held above, so that no id is used again

    def get(self, name: str) -> Placed | None:
        with self._lock:
            found = self._by_digest.get(name)
            if found is not None:
                self._by_digest.move_to_end(name)
            return found

    def name(self, placed: Placed) -> str | None:
        with self._lock:
            return self._by_object.get(id(placed))

    def add(self, name: str, placed: Placed) -> None:
        with self._lock:
            old = self._by_digest.pop(name, None)
            if old is not None:
                self._by_object.pop(id(old), None)
            self._by_digest[name] = placed
            self._by_object[id(placed)] = name
            while len(self._by_digest) > _CACHED:
                _, gone = self._by_digest.popitem(last=False)
                self._by_object.pop(id(gone), None)

    def drop(self, placement: str) -> list[str]:
        """Lets go of every entry of a placement; returns their digests."""
        with self._lock:
            names = [name for name, placed in self._by_digest.items() if placed.id == placement]
            for name in names:
                self._by_object.pop(id(self._by_digest.pop(name)), None)
        return names


_entries: WeakKeyDictionary[SpanRepository, _Entries] = WeakKeyDictionary()
_lock = threading.Lock()


def _known(repo: SpanRepository) -> _Entries:
    with _lock:
        return _entries.setdefault(repo, _Entries())


@dataclass(frozen=True)
class Manifest:
    """What is to be written for one state.

    Attributes:
        digest: of the manifest, and so of everything in the state.
        record: its JSON.
        entries: digests of placed chunks, then of evicted ones; pages: digests of the evicted ones, by page digest.
    """

    digest: str
    record: dict[str, Any]
    entries: tuple[str, ...]
    pages: dict[str, list[str]]


def describe(repo: SpanRepository, state: State) -> Manifest:
    """The manifest of ``state``; writes nothing. Cost: JSON and a digest of each chunk not met before."""
    known = _known(repo)
    names = []
    for placed in (*state.placed, *state.evicted):
        name = known.name(placed)
        if name is None:
            name = digest("entry", _json(placed))
            known.add(name, placed)
        names.append(name)
    count = len(state.placed)
    pages = {digest("page", page): page for page in _paged(names[count:])}
    record = {
        "state": state.model_dump(mode="json", exclude={"placed", "evicted"}, exclude_defaults=True),
        "placed": names[:count],
        "evicted": [[name, len(page)] for name, page in pages.items()],
    }
    return Manifest(digest("manifest", record), record, tuple(names), pages)


def write(repo: SpanRepository, state: State) -> str:
    """Stores ``state``, as far as it is not stored yet; returns its manifest's digest.

    Cost: an entry for each chunk that is new or was conditioned, the last page, the manifest.
    """
    manifest = describe(repo, state)
    if repo.contains(f"manifest/{manifest.digest}"):
        return manifest.digest
    chunks = (*state.placed, *state.evicted)
    count, gone = len(state.placed), len(state.evicted)
    # What was evicted long ago is looked at in turn: that marks it as used, and what the store dropped comes back.
    first = state.version * _REFRESHED
    turn = {count + (first + i) % gone for i in range(min(gone, _REFRESHED))}
    fresh = {name: page for name, page in manifest.pages.items() if not repo.contains(f"page/{name}")}
    unsure = {name for page in fresh.values() for name in page}
    for i, (name, placed) in enumerate(zip(manifest.entries, chunks, strict=True)):
        if (i < count or i in turn or name in unsure) and not repo.contains(f"entry/{name}"):
            repo.put_json(f"entry/{name}", _json(placed), bound=False)
    for name, page in fresh.items():
        repo.put_json(f"page/{name}", page, bound=False)
    repo.put_json(f"manifest/{manifest.digest}", manifest.record, bound=False)
    return manifest.digest


def read(repo: SpanRepository, name: str) -> tuple[State, list[int], int] | None:
    """The state of a manifest; None where the manifest is not in the store or cannot be read.

    Also the indices of placed chunks whose entries are gone (the state lacks them), and how many evicted ones are.
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
    for name in _known(repo).drop(placement):
        repo.delete(f"entry/{name}")


def _entry(repo: SpanRepository, name: str) -> Placed | None:
    known = _known(repo)
    found = known.get(name)
    if found is None:
        record = repo.get_json(f"entry/{name}", bound=False)
        if record is None:
            return None
        try:
            found = Placed.model_validate(record)
        except ValidationError:  # of a version that wrote other fields: a miss
            return None
        known.add(name, found)
    return found


def _json(placed: Placed) -> dict[str, Any]:
    return placed.model_dump(mode="json", exclude_defaults=True)


def _paged(names: Sequence[str]) -> list[list[str]]:
    """``names`` in pages. A page ends behind a digest that says so, so a change anywhere changes the page it is in."""
    pages: list[list[str]] = []
    for name in names:
        if not pages or len(pages[-1]) >= _LONGEST or (pages[-1] and int(pages[-1][-1][-8:], 16) % _PAGE == 0):
            pages.append([])
        pages[-1].append(name)
    return pages
