"""`Library`: versioned files that outlive windows, with grants of access and expiry times.

MPIC, section 3.1, has two kinds. A static library is a user's own uploads, in the store of that user's tenant. A dynamic one is
references that an administrator adds, replaces and removes while windows run: it has its own store, and tenants read it by
`grant`. Both are this class; they differ only in the store.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from weakref import WeakKeyDictionary

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import BadMedia, ChunkUnavailable, NameTaken, StoreFull, UnknownFile, UnknownVersion
from ctxwin.hashing import digest
from ctxwin.library.files import cut
from ctxwin.library.prepared import prepare
from ctxwin.library.records import Edition, Entry, Fenced, Granted, Head, Passage, Row, get, nfc, put
from ctxwin.library.retrieval import BM25, Corpus, Retriever
from ctxwin.library.traces import collect, library_id, note_keys, note_trace, origin_of, traced_entries
from ctxwin.library.views import Hit, LibraryView, unknown_file
from ctxwin.store.archive import read_archive, write_archive
from ctxwin.store.base import Store, store_full
from ctxwin.store.lru import LRUCache
from ctxwin.store.spans import SpanRepository
from ctxwin.validation import check_numbers, check_unicode
from ctxwin.window.removed import note_present, note_removed

__all__ = ["KEPT", "Hit", "Library", "LibraryView", "granted_libraries", "libraries"]

KEPT = 64
"""Versions of a library that windows can still read."""
_NAME = re.compile(r"[\w.-]{1,100}")
_FILE_NAME = re.compile(r"[^\x00-\x1f/\\]{1,255}")
_LOST = "the list of files of library {} has left the store; delete the library, and add them again"
_TAKEN = "a file of a library must have a name of its own, got {!r} again; replace it, or choose another name"
_CORPORA = 4
_log = logging.getLogger("ctxwin")


class Library:
    """Files by name.

    Args:
        store: holds the files; users of the same store share the library. The store's own limit may evict files that no window
            has open: give references that must stay a store of their own, large enough for them.
        name: letters, digits, ``_``, ``.`` and ``-``.
        ttl: seconds after its last use at which a file without its own ttl expires; None: that of `create`, or never.
        retriever: ranks passages for `search`; default: by words (`BM25`).
        max_bytes, max_files, max_passages: most bytes of files, most files, and most passages of them together.
        clock: seconds since the epoch; servers that share a library should agree to within seconds.

    Every change is one version, written before the call returns; processes that change it at once take turns. Thread-safe.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        ttl: float | None = None,
        retriever: Retriever | None = None,
        max_bytes: int = 10 * 10**9,
        max_files: int = 10_000,
        max_passages: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if isinstance(store, str):
            raise TypeError(f"store must be an open store, got {store!r}; pass open_store({store!r})")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"a library's name must be 1 to 100 letters, digits, '_', '.' or '-', got {name!r:.120}")
        _check_ttl(ttl)
        check_numbers(max_bytes=max_bytes, max_files=max_files, max_passages=max_passages)
        self.store, self.name, self.ttl = store, name, ttl
        self.retriever: Retriever = retriever or BM25()
        self.max_bytes, self.max_files, self.max_passages, self.clock = max_bytes, max_files, max_passages, clock
        self.repo = SpanRepository(store, "")
        self._head = Fenced(store, f"library/{digest('library', name)}")
        self._corpora: LRUCache[Corpus] = LRUCache(_CORPORA)
        self._id = library_id(name)
        self._collected: WeakKeyDictionary[SpanRepository, int] = WeakKeyDictionary()  # at which `Head.removals`

    def create(self, *, ttl: float | None = None) -> None:
        """Create the library, empty, and set when its files expire; `add` also creates one. Raises NameTaken."""
        _check_ttl(ttl)
        if self.exists:
            raise NameTaken(f"a library must have a name of its own, got {self.name!r} again; choose another name")
        self._head.update(Head(name=self.name), lambda head: head.model_copy(update={"ttl": ttl}))

    @property
    def exists(self) -> bool:
        """True if the library has been created. Cost: a read; where there is none, a listing."""
        return self.store.read(self._head.key) is not None or self._lost

    @property
    def _lost(self) -> bool:
        """Return True if files that its record would list are stored: it was written before them, and is deleted with them."""
        return any(map(self.store.contains, traced_entries(self.repo, self._id)))

    def _current(self) -> Head:
        """Return its record, a new one where it has none. Raises ChunkUnavailable where the store lost it."""
        head = self._head.read(Head(name=""))
        if not head.name and self._lost:
            head = self._head.read(head)  # another process may have created it meanwhile
            if not head.name:
                raise ChunkUnavailable(_LOST.format(self.name))
        return head if head.name else Head(name=self.name)

    @property
    def expires_after(self) -> float | None:
        """Seconds after its last use at which a file without its own ttl expires."""
        return self.ttl or self._current().ttl

    def add(
        self,
        source: str | Path | bytes | bytearray | memoryview | Chunk,
        name: str = "",
        *,
        caption: str = "",
        ttl: float | None = None,
        replace: bool = False,
    ) -> Entry:
        """Add a file, or replace one; return its entry with the passages it was cut into.

        Args:
            source: a path, the bytes of a file, or a chunk: one passage, which takes the name as its label where it has none.
            name: default: the path's last part, the chunk's label.
            caption: words that search matches beside the file's own.
            ttl: seconds after its last use at which it expires; None takes the library's.
            replace: whether a file of this name may be replaced; windows that have opened the library keep the old one.

        Raises:
            NameTaken: a file of this name exists.
            BadMedia: another type, a broken or a huge file, or too many of them.
            StoreFull, StoreUnavailable: nothing was changed.

        Cost: decoding, a write per picture, and one of the list of files. No KV: see `prepare`.
        """
        if not isinstance(source, str | Path | bytes | bytearray | memoryview | Chunk):
            raise TypeError(f"source must be a path, the bytes of a file or a Chunk, got {type(source).__name__}")
        source = bytes(source) if isinstance(source, bytearray | memoryview) else source
        check_unicode("caption", caption)
        if not name and not isinstance(source, bytes):
            name = source.label or source.id[:16] if isinstance(source, Chunk) else Path(source).name
        name = nfc(name)
        self.check_name(name, replace=replace)
        _check_ttl(ttl)
        return self.add_passages(name, *cut(source, name, caption), ttl=ttl, replace=replace)

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Raise ValueError or NameTaken where no file may be added under ``name``."""
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"a file's name must be 1 to 255 characters without slashes, got {name[:300]!r}")
        check_unicode("a file's name", name)
        if not replace and nfc(name) in self.view().names:
            raise NameTaken(_TAKEN.format(name))

    def add_passages(
        self, name: str, passages: Sequence[Passage], size: int, *, ttl: float | None = None, replace: bool = False
    ) -> Entry:
        """Add a file that is already cut into passages, ``size`` bytes large; see `add`."""
        stored = tuple(p.model_copy(update={"chunk": self._store_pixels(p.chunk)}) for p in passages)
        entry = Entry(name=name, passages=stored, bytes=size, added=self.clock(), ttl=ttl or self.expires_after)
        self._add(self._store_entries([entry]), entry.added, replace)
        return entry

    def remove(self, name: str) -> None:
        """Remove a file from all versions, with its records, pixels, embeddings and KV. Raises UnknownFile.

        Passages placed in an open window are served until they leave it, and cannot be recalled; their KV is then removed
        (`sweep`). A store that borrowed from this one is cleaned when the library is next used there.
        """

        def change(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            remaining = tuple(r for r in rows if r.name != nfc(name))
            if len(remaining) == len(rows):
                raise UnknownFile(unknown_file(name, self.name, (r.name for r in rows)))
            return remaining

        self._current()
        self._change(change, {})

    def export(self, path: str | Path) -> tuple[int, int]:
        """Write its current files to one file; return the number of records and bytes. KV and grants are not exported."""
        rows = self.view().rows
        media = {f"source/{m.content}": name for name, p in self.corpus(rows).passages for m in p.chunk.media}
        for key in self.store.missing(media):
            raise ChunkUnavailable(f"file {media[key]!r} must have its pixels in the store; remove it, or add it again")
        return write_archive(Path(path), self.store, dict.fromkeys([*(r.key for r in rows), *media]))

    def load(self, path: str | Path, *, replace: bool = False) -> tuple[str, ...]:
        """Add the files that `export` wrote, as one version; return their names. Expiry counts from now.

        Raises NameTaken for an existing name, unless it may be replaced; BadMedia for another or a damaged file.
        """
        entries: list[Entry] = []
        with ExitStack() as undo:  # nothing stays of what ends early, as by Ctrl-C: no trace leads to it yet
            for key, blob in read_archive(Path(path), self.store):
                if not key.startswith(("entry/", "source/")):
                    raise BadMedia(f"a library's archive must hold files and media, got {key[:80]!r} in {str(path)!r}")
                if not self.store.persists(key):
                    if not self.store.contains(key):
                        undo.callback(self.store.delete, key)
                    if not (self.store.put(key, blob) and self.store.persists(key)):
                        raise store_full("the archive's records")
                if key.startswith("entry/"):
                    if (entry := get(self.repo, key, Entry)) is None:
                        raise BadMedia(f"{str(path)!r} must be whole, got a file that is not what its key says")
                    entries.append(entry)
            rows = self._store_entries(entries)
            undo.pop_all()
        self._add(rows, self.clock(), replace)
        return tuple(entry.name for entry in entries)

    def delete(self) -> None:
        """Remove the library with all its versions, grants and files, as `remove`. Windows keep the passages they placed."""
        head = self._head.read(Head(name=self.name))
        entries = self._entries(head.editions)
        self._head.update(Head(name=self.name), lambda _: Head(name=self.name))  # empty until nothing is left of it
        for key in list(self.store.list("grants/")):
            Fenced(self.store, key).update(Granted(), self._without_grant)
        self._drop_editions({key for _, key in head.editions})
        note_removed(origin_of(self._id, key) for key in entries)
        self._corpora = LRUCache(_CORPORA)
        for repo in {self.repo, *self._collected.keys()}:
            self._collect(repo, set(), Head(name=self.name))
        self.store.delete(self._head.key)  # not retired: it may be created again

    def sweep(self, engine: Engine | None = None) -> None:
        """Remove expired files, and records that removed files left in the library's store and in that of ``engine``.

        Every use of a library does so too; call this where the library is otherwise unused. Records that an open window still
        serves are removed by a later sweep. Cost: a read; for removals see `ctxwin.library.traces.collect`.
        """
        self._read_head()
        if engine is not None:
            self._collect(engine.repo)

    def view(self, version: int | None = None) -> LibraryView:
        """Return the library at a version; None is the newest. Raises UnknownVersion beyond the newest 64."""
        head = self._read_head()
        editions = dict(head.editions)
        newest = max(editions, default=0)
        if version is not None and version not in editions and (version or newest):
            raise UnknownVersion(
                f"version must be a kept one of library {self.name} ({min(editions, default=0)}..{newest}), got {version}; "
                "open a new window to read it as it is now"
            )
        number = newest if version is None else version
        edition = get(self.repo, editions[number], Edition) if number else Edition()
        if edition is None:
            raise ChunkUnavailable(_LOST.format(self.name))
        # An expired or removed file is gone from every version; an old version keeps only replaced files.
        now = self.clock()
        alive = [r for r in edition.rows if r.key not in head.gone and head.expires.get(r.name, now + 1) > now]
        return LibraryView(self, number, tuple(alive))

    def _read_head(self) -> Head:
        """Return the head after removing expired files from it."""
        head, now = self._current(), self.clock()
        if any(at <= now for at in head.expires.values()):
            try:
                head = self._change(lambda rows: rows, {}, expiry=True)
            except (StoreFull, ChunkUnavailable) as error:  # they are hidden all the same
                _log.warning("files of library %s that have expired could not be removed: %s", self.name, error)
        if head.removals or self._collected.get(self.repo):
            note_removed(origin_of(self._id, key) for key in head.gone)
            self._collect(self.repo, head=head)
        return head

    def _collect(self, repo: SpanRepository, present: set[str] | None = None, head: Head | None = None) -> None:
        """Remove the records of removed files from a store, unless that was done since the last removal."""
        head = self._current() if head is None else head
        if present is None and self._collected.setdefault(repo, 0) == head.removals:
            return
        if present is None:
            present = self._entries(head.editions) - head.gone.keys()
        self._collected[repo] = head.removals if collect(repo, self._id, present) else -1

    def _entries(self, editions: Iterable[tuple[int, str]]) -> set[str]:
        return {row.key for _, key in editions for row in (get(self.repo, key, Edition) or Edition()).rows}

    def _drop_editions(self, keys: set[str]) -> None:
        """Delete lists of files that no library of the store refers to; equal lists are one record."""
        for key in list(self.store.list("library/")) if keys else ():
            try:
                keys = keys - {edition for _, edition in Fenced(self.store, key).read(Head(name="")).editions}
            except OSError as error:
                _log.warning("lists of files are not deleted, as another library may need them: %s", error)
                return
        for key in keys:
            self.repo.delete(key)

    def files(self) -> tuple[Row, ...]:
        """Return the current files with their expiry times."""
        expires = self._head.read(Head(name=self.name)).expires
        return tuple(row.model_copy(update={"expires": expires.get(row.name)}) for row in self.view().rows)

    def search(self, query: str | Chunk, k: int = 4) -> list[Hit]:
        """Search the newest version; see `LibraryView.search`."""
        return self.view().search(query, k)

    def prepare(self, engine: Engine, stopped: Callable[[], bool] = lambda: False) -> int:
        """Compute the vision embeddings and KV of all passages ahead of use; return the number of passages.

        KV is computed after the empty system prompt, which contains nothing of any tenant; exact windows do not serve it.
        Stored results are skipped, so this can be stopped and called again. For idle time. Cost: an encode per picture and a
        forward per passage.
        """
        rows = self.view().rows
        corpus = self.corpus(rows)
        for row in rows:
            self.trace(row, engine)
        return prepare(self.repo, (corpus.chunk_with_pixels(p) for _, p in corpus.passages), engine, stopped)

    def grant(self, tenant: str) -> None:
        """Allow a tenant to read it."""
        self._grants_of(tenant).update(Granted(), lambda g: Granted(libraries=tuple(sorted({*g.libraries, self.name}))))

    def revoke(self, tenant: str) -> bool:
        """Withdraw a tenant's grant; return whether it had one. Its windows keep the passages they have placed."""
        grants = self._grants_of(tenant)
        if had := self.name in grants.read(Granted()).libraries:
            grants.update(Granted(), self._without_grant)
        return had

    def _without_grant(self, granted: Granted) -> Granted:
        return Granted(libraries=tuple(name for name in granted.libraries if name != self.name))

    def _grants_of(self, tenant: str) -> Fenced:
        if not tenant:
            raise ValueError("tenant must be a name, got ''; who opens the store itself needs no grant")
        return Fenced(self.store, f"grants/{digest('grants', tenant)}")

    def renew(self, names: Sequence[str]) -> None:
        """Renew the expiry of used files that are past half of their ttl."""
        now = self.clock()
        expires, rows = self._head.read(Head(name=self.name)).expires, {r.name: r for r in self.view().rows}
        new = {n: now + r.ttl for n in names if (r := rows.get(n)) and r.ttl and expires.get(n, now) - now < r.ttl / 2}
        if new:
            try:
                self._head.update(Head(name=self.name), lambda h: h.model_copy(update={"expires": h.expires | new}))
            except StoreFull as error:
                _log.warning("files of library %s are used, and expire nevertheless: %s", self.name, error)

    def corpus(self, rows: Sequence[Row]) -> Corpus:
        """Return the passages of ``rows`` for retrievers; cached for the latest versions used."""
        name = digest("corpus", [r.key for r in rows])
        if (corpus := self._corpora.get(name)) is None:
            entries = [self.entry(row) for row in rows]
            owners = [origin_of(self._id, row.key) for row, e in zip(rows, entries, strict=True) for _ in e.passages]

            def note(keys: Sequence[str], what: str) -> None:
                by_owner: dict[str, list[str]] = {}
                for owner, key in zip(owners, keys, strict=True):
                    by_owner.setdefault(owner, []).append(key)
                for owner, owned in by_owner.items():
                    note_keys(self.repo, owner, owned, what)

            corpus = Corpus(name, tuple((e.name, p) for e in entries for p in e.passages), self.repo, note)
            self._corpora.put(name, corpus, 1)
        return corpus

    def entry(self, row: Row) -> Entry:
        """Return the file of ``row``. Raises ChunkUnavailable where the store has evicted it."""
        if (entry := get(self.repo, row.key, Entry)) is None:
            raise ChunkUnavailable(f"file {row.name!r} of library {self.name} has left the store; add it again")
        return entry

    def trace(self, row: Row, engine: Engine) -> str:
        """Record which keys a file will leave in the stores of ``engine`` and of the library; return its `Chunk.origin`."""
        origin = origin_of(self._id, row.key)
        for repo in (self.repo, engine.repo) if engine.repo.store is not self.store else (self.repo,):
            note_trace(repo, origin, self.entry(row), engine)
        return origin

    def _store_pixels(self, chunk: Chunk) -> Chunk:
        """Store the pixels of ``chunk`` and return it without them and without paths, as an entry holds it."""
        for part in chunk.media:
            pixels = chunk.pixels(part)
            if pixels is None:
                raise ChunkUnavailable(f"a chunk must have its pixels, got none for {chunk.label!r}; make it again")
            key = f"source/{part.content}"
            if not self.store.persists(key):
                self.repo.put_source(part.content, part.pack(pixels))
                if not self.store.persists(key):
                    raise store_full("a file's pixels")
        parts = tuple(p.model_copy(update={"source": None}) if p in chunk.media else p for p in chunk.parts)
        return chunk.light().model_copy(update={"parts": parts})

    def _store_entries(self, entries: Sequence[Entry]) -> list[Row]:
        """Store ``entries`` and their traces; return their rows."""
        if self.store.read(self._head.key) is None:  # before what it lists, so that it is known to be lost (`_lost`)
            self._head.update(self._current(), lambda head: head)
        rows = [
            Row(key=put(self.repo, "entry", e), passages=len(e.passages), **e.model_dump(exclude={"passages"}))
            for e in entries
        ]
        note_present(origin_of(self._id, row.key) for row in rows)
        for row, entry in zip(rows, entries, strict=True):
            note_trace(self.repo, origin_of(self._id, row.key), entry)
        return rows

    def _add(self, rows: Sequence[Row], used: float, replace: bool) -> None:
        """Add ``rows``, last used at ``used``, in the next version."""
        names = {row.name for row in rows}

        def change(current: tuple[Row, ...]) -> tuple[Row, ...]:
            others = tuple(row for row in current if row.name not in names)
            if len(others) < len(current) and not replace:
                raise NameTaken(_TAKEN.format(next(row.name for row in current if row.name in names)))
            updated = (*others, *rows)
            for what, most, got in (
                ("files", self.max_files, len(updated)),
                ("bytes", self.max_bytes, sum(row.bytes for row in updated)),
                ("passages", self.max_passages, sum(row.passages for row in updated)),
            ):
                if got > most:
                    raise BadMedia(f"library {self.name} must have at most {most:,} {what}, got {got:,}; remove some")
            return updated

        self._change(change, {row.name: used + row.ttl if row.ttl else None for row in rows})

    def _change(
        self,
        change: Callable[[tuple[Row, ...]], tuple[Row, ...]],
        expires: Mapping[str, float | None],
        *,
        expiry: bool = False,
    ) -> Head:
        """Write the next version, with new expiry times for some files and without the expired ones.

        ``change`` maps the current files to those of the next version; older versions keep the files that those in ``expires``
        replace. ``expiry``: only remove expired files, in place of the newest version.
        """
        dropped: set[str] = set()

        def update(head: Head) -> Head:
            now, version, latest = self.clock(), 0, Edition()
            if head.editions:
                version, key = head.editions[-1]
                stored = get(self.repo, key, Edition)
                if stored is None:
                    raise ChunkUnavailable(_LOST.format(self.name))
                latest = stored
            alive = tuple(r for r in latest.rows if head.expires.get(r.name, now + 1) > now)
            rows = change(alive)
            version += not expiry
            key = put(self.repo, "edition", Edition(version=version, rows=rows))
            until = {**head.expires, **expires}
            expiry_times = {r.name: at for r in rows if (at := until.get(r.name)) is not None}
            older = head.editions[:-1] if expiry else head.editions
            editions = (*older, (version, key))[-KEPT:]
            here, replaced = {r.key for r in rows}, {r.key for r in alive if r.name in expires}
            removed = {**head.gone, **{r.key: version for r in latest.rows if r.key not in replaced}}
            names = {r.name for r in latest.rows} - {r.name for r in rows}
            for _, earlier in older if names else ():  # earlier files of a removed name are removed too
                listed = (get(self.repo, earlier, Edition) or Edition()).rows
                removed |= {r.key: version for r in listed if r.name in names}
            removed = {key: at for key, at in removed.items() if key not in here and at > editions[0][0] - expiry}
            dropped.clear()
            dropped.update({key for _, key in head.editions} - {key for _, key in editions})
            leave = any(r.key not in here | replaced for r in latest.rows)
            for _, ended in (*older, (version, key))[:-KEPT]:
                leave = leave or not self._entries([(0, ended)]) <= self._entries(editions[:1])
            update = {"editions": editions, "expires": expiry_times, "gone": removed, "removals": head.removals + leave}
            return head.model_copy(update=update)

        head = self._head.update(Head(name=self.name), update)
        self._drop_editions(dropped)
        self._corpora = LRUCache(_CORPORA)
        note_removed(origin_of(self._id, key) for key in head.gone)
        for repo in {self.repo, *self._collected.keys()}:
            self._collect(repo, head=head)
        return head


def libraries(store: Store) -> Iterator[str]:
    """Iterate over the names of the libraries in ``store``, sorted. Cost: a listing."""
    for key in list(store.list("library/")):
        if name := Fenced(store, key).read(Head(name="")).name:
            yield name


def granted_libraries(store: Store, tenant: str) -> tuple[str, ...]:
    """Return the libraries in ``store`` that ``tenant`` may read.

    Libraries that are not granted are not read, so that they take as long to refuse as those that do not exist.
    """
    raw = store.read(f"grants/{digest('grants', tenant)}")
    try:
        return () if raw is None else Granted.model_validate_json(raw).libraries
    except ValueError as error:
        _log.warning("what %r may read is malformed, and counts as nothing: %s", tenant, error)
        return ()


def _check_ttl(ttl: float | None) -> None:
    check_numbers(ttl=ttl)
    if ttl is not None and not 0 < ttl < math.inf:
        raise ValueError(f"ttl must be positive seconds or None, got {ttl}")
