"""`Library`: files that outlive windows, in versions, with who may read them and when they expire.

A static library (MPIC, section 4.1) is a user's own uploads, in the store of that user's tenant. A dynamic one (section 4.2) is
references that an administrator adds, replaces and removes while windows run: it has a store of its own, and tenants read it
by `grant`. Both are this class; what differs is whose store it lies in.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import BadMedia, ChunkUnavailable, NameTaken, StoreFull, UnknownFile, UnknownVersion
from ctxwin.hashing import digest
from ctxwin.library.files import MAX_FILE_BYTES, passages_of
from ctxwin.library.prepared import lend, prepare
from ctxwin.library.records import Edition, Entry, Fenced, Granted, Head, Passage, Row, get, put
from ctxwin.library.retrieval import BM25, Corpus, Retriever
from ctxwin.store.archive import read_archive, write_archive
from ctxwin.store.base import Store
from ctxwin.store.spans import SpanRepository

KEPT = 64
"""Versions of a library that windows can still read."""
_NAME = re.compile(r"[\w.-]{1,100}")
_FILE_NAME = re.compile(r"[^\x00-\x1f/\\]{1,255}")
_CORPORA = 4


@dataclass(frozen=True)
class Hit:
    """A passage that was found. ``score`` is the retriever's: comparable within one search only."""

    file: str
    passage: Passage
    score: float


class Library:
    """Files by name.

    Args:
        store: where they lie; what shares the store shares the library. The store's own limit may drop what nobody has open:
            give references that must stay a store of their own, with room.
        name: letters, digits, ``_``, ``.`` and ``-``.
        ttl: seconds after its last use at which a file expires that says nothing itself; None: as `create` was told, or never.
        retriever: how `search` finds; default: by words (`BM25`).
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
        if not _NAME.fullmatch(name):
            raise ValueError(f"a library's name must be 1 to 100 letters, digits, '_', '.' or '-', got {name[:120]!r}")
        _check_ttl(ttl)
        self.store, self.name, self.ttl = store, name, ttl
        self.retriever: Retriever = retriever or BM25()
        self.max_bytes, self.max_files, self.max_passages, self.clock = max_bytes, max_files, max_passages, clock
        self.repo = SpanRepository(store, "")
        self._head = Fenced(store, _head_key(name))
        self._corpora: OrderedDict[str, Corpus] = OrderedDict()

    def create(self, *, ttl: float | None = None) -> None:
        """Makes the library, empty, and says when its files expire; `add` makes one, too. Raises NameTaken."""
        _check_ttl(ttl)
        if self.exists:
            raise NameTaken(f"a library must have a name of its own, got {self.name!r} again; choose another name")
        self._head.update(Head(name=self.name), lambda head: head.model_copy(update={"ttl": ttl}))

    @property
    def exists(self) -> bool:
        """Whether anybody has made it."""
        return self.store.read(self._head.key) is not None

    @property
    def expires_after(self) -> float | None:
        """Seconds after its last use at which a file expires that says nothing itself."""
        return self.ttl or self._head.read(Head(name=self.name)).ttl

    def add(
        self,
        source: str | Path | bytes | Chunk,
        name: str = "",
        *,
        caption: str = "",
        ttl: float | None = None,
        replace: bool = False,
    ) -> Entry:
        """Adds a file, or replaces one; returns what it was cut into.

        Args:
            source: a path, the bytes of a file, or a chunk, which is one passage as it is.
            name: default: the path's last part, the chunk's label.
            caption: words that search finds it by, beside its own.
            ttl: seconds after its last use at which it expires; None takes the library's.
            replace: whether a file of this name may be replaced; windows that have opened the library keep the old one.

        Raises:
            NameTaken: there is one of this name. BadMedia: another type, a broken or a huge file, or too many of them.
            StoreFull, StoreUnavailable: nothing is changed then.

        Cost: decoding, a write a picture, and one of the list of files. No KV: see `prepare`.
        """
        name = name or _named(source)
        self.check_name(name, replace=replace)
        _check_ttl(ttl)
        return self.add_passages(name, *_cut(source, name, caption), ttl=ttl, replace=replace)

    def check_name(self, name: str, *, replace: bool = False) -> None:
        """Whether a file may be added under ``name``: raises ValueError, NameTaken."""
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"a file's name must be 1 to 255 characters without slashes, got {name[:300]!r}")
        if not replace and name in self.view().names:
            raise NameTaken(_taken(name))

    def add_passages(
        self, name: str, passages: Sequence[Passage], size: int, *, ttl: float | None = None, replace: bool = False
    ) -> Entry:
        """`add` for a file that is cut already, ``size`` bytes large."""
        entry = Entry(
            name=name,
            passages=tuple(p.model_copy(update={"chunk": self._kept(p.chunk)}) for p in passages),
            bytes=size,
            added=self.clock(),
            ttl=ttl or self.expires_after,
        )
        self._add([(entry, entry.added)], replace)
        return entry

    def remove(self, name: str) -> None:
        """Takes a file out; windows that have opened the library keep it. Raises UnknownFile."""

        def change(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            left = tuple(r for r in rows if r.name != name)
            if len(left) == len(rows):
                raise UnknownFile(_unknown(name, self.name))
            return left

        self._change(change, {})

    def export(self, path: str | Path) -> tuple[int, int]:
        """Writes its files, as they are now, to one file; returns how many records and bytes. KV and grants stay behind."""
        rows = self.view().rows
        media = (f"source/{m.content}" for _, p in self.corpus(rows).passages for m in p.chunk.media)
        return write_archive(Path(path), self.store, dict.fromkeys([*(r.key for r in rows), *media]))

    def load(self, path: str | Path, *, replace: bool = False) -> tuple[str, ...]:
        """Adds the files that `export` wrote, as one version; returns their names. They expire counted from now.

        Raises NameTaken for a name that is there, unless it may be replaced; BadMedia for another file, or a damaged one.
        """
        entries: list[Entry] = []
        for key, blob in read_archive(Path(path)):
            if not key.startswith(("entry/", "source/")):
                raise BadMedia(f"the archive of a library must hold files and media, got {key[:80]!r} in {str(path)!r}")
            if not self.store.contains(key) and not self.store.put(key, blob):
                raise StoreFull(
                    "the store must take the archive's records, and is full; make room there, or raise its limit"
                )
            if key.startswith("entry/"):
                entry = get(self.repo, key, Entry)
                if entry is None:
                    raise BadMedia(
                        f"the archive {str(path)!r} must be undamaged, got a file that is not what its key says"
                    )
                entries.append(entry)
        self._add([(entry, self.clock()) for entry in entries], replace)
        return tuple(entry.name for entry in entries)

    def delete(self) -> None:
        """Removes the library with all its versions; its media go when the store drops them. Windows keep what they placed."""
        self.store.retire(self._head.key)

    def view(self, version: int | None = None) -> LibraryView:
        """The library as of a version; None: as it is now. Raises UnknownVersion for one that is not kept (the newest 64 are)."""
        head = self._head.read(Head(name=self.name))
        editions = dict(head.editions)
        newest = max(editions, default=0)
        if version is not None and version not in editions and (version or newest):
            raise UnknownVersion(
                f"version must be a kept one of library {self.name} ({min(editions, default=0)}..{newest}), got {version}; "
                "open a new window to read it as it is now"
            )
        wanted = newest if version is None else version
        edition = get(self.repo, editions[wanted], Edition) if wanted else Edition()
        if edition is None:
            raise ChunkUnavailable(f"the list of files of library {self.name} has left the store; add them again")
        # A file that expired is gone for everybody; of an old version only what was replaced or removed stays.
        now, current = self.clock(), wanted == newest
        alive = [r for r in edition.rows if not current or head.expires.get(r.name, now + 1) > now]
        return LibraryView(self, wanted, tuple(alive))

    def files(self) -> tuple[Row, ...]:
        """The files there are now, with when they expire."""
        expires = self._head.read(Head(name=self.name)).expires
        return tuple(row.model_copy(update={"expires": expires.get(row.name)}) for row in self.view().rows)

    def search(self, query: str | Chunk, k: int = 4) -> list[Hit]:
        """See `LibraryView.search`, in the library as it is now."""
        return self.view().search(query, k)

    def prepare(self, engine: Engine, stopped: Callable[[], bool] = lambda: False) -> int:
        """Computes what a window would have to: vision embeddings, and KV behind a neutral header; returns how many passages.

        The header is the empty system prompt, so that nothing of any tenant is in it. What is held already costs nothing, so
        this can be stopped and called again. For idle time. Cost: an encode a picture and a forward a passage.
        """
        corpus = self.corpus(self.view().rows)
        return prepare(self.repo, (corpus.shown(passage) for _, passage in corpus.passages), engine, stopped)

    def grant(self, tenant: str) -> None:
        """Lets a tenant read it."""
        self._granted(tenant).update(Granted(), lambda g: Granted(libraries=tuple(sorted({*g.libraries, self.name}))))

    def revoke(self, tenant: str) -> None:
        """Ends that; its windows keep what they have placed."""
        self._granted(tenant).update(
            Granted(), lambda g: Granted(libraries=tuple(name for name in g.libraries if name != self.name))
        )

    def _granted(self, tenant: str) -> Fenced:
        return Fenced(self.store, f"grants/{digest('grants', tenant)}")

    def used(self, names: Sequence[str]) -> None:
        """Renews the expiry of files that have one and are past half of it."""
        now = self.clock()
        head, rows = self._head.read(Head(name=self.name)), {r.name: r for r in self.view().rows}
        later = {
            n: now + r.ttl for n in names if (r := rows.get(n)) and r.ttl and head.expires.get(n, now) - now < r.ttl / 2
        }
        if later:
            self._head.update(Head(name=self.name), lambda h: h.model_copy(update={"expires": h.expires | later}))

    def corpus(self, rows: Sequence[Row]) -> Corpus:
        """The passages of ``rows``, as retrievers read them; remembered for the versions used last."""
        name = digest("corpus", [r.key for r in rows])
        found = self._corpora.get(name)
        if found is None:
            entries = [self.entry(row) for row in rows]
            found = Corpus(name, tuple((e.name, p) for e in entries for p in e.passages), self.repo)
            self._corpora[name] = found
        with suppress(KeyError):  # another thread may have dropped it
            self._corpora.move_to_end(name)
            while len(self._corpora) > _CORPORA:
                self._corpora.popitem(last=False)
        return found

    def entry(self, row: Row) -> Entry:
        """The file of ``row``. Raises ChunkUnavailable where the store has dropped it."""
        found = get(self.repo, row.key, Entry)
        if found is None:
            raise ChunkUnavailable(f"file {row.name!r} of library {self.name} has left the store; add it again")
        return found

    def _kept(self, chunk: Chunk) -> Chunk:
        """``chunk`` as an entry has it, with its pixels in the store and no path."""
        for part in chunk.media:
            pixels = chunk.pixels(part)
            if pixels is None:
                raise ChunkUnavailable(f"a chunk must have its pixels, got none for {chunk.label!r}; make it again")
            kept = self.repo.contains(f"source/{part.content}")
            if not kept and not self.repo.put_source(part.content, part.pack(pixels)):
                raise StoreFull("the store must take a file's pixels, and is full; make room there, or raise its limit")
        parts = tuple(p.model_copy(update={"source": None}) if p in chunk.media else p for p in chunk.parts)
        return chunk.light().model_copy(update={"parts": parts})

    def _add(self, entries: Sequence[tuple[Entry, float]], replace: bool) -> None:
        """Lists ``entries``, each used at that time, in the next version."""
        rows = [
            Row(key=put(self.repo, "entry", e), passages=len(e.passages), **e.model_dump(exclude={"passages"}))
            for e, _ in entries
        ]
        names = {row.name for row in rows}

        def change(before: tuple[Row, ...]) -> tuple[Row, ...]:
            others = tuple(row for row in before if row.name not in names)
            if len(others) < len(before) and not replace:
                raise NameTaken(_taken(next(row.name for row in before if row.name in names)))
            made = (*others, *rows)
            for what, most, got in (
                ("files", self.max_files, len(made)),
                ("bytes", self.max_bytes, sum(row.bytes for row in made)),
                ("passages", self.max_passages, sum(row.passages for row in made)),
            ):
                if got > most:
                    raise BadMedia(f"library {self.name} must have at most {most:,} {what}, got {got:,}; remove some")
            return made

        self._change(change, {e.name: used + e.ttl if e.ttl else None for e, used in entries})

    def _change(
        self, change: Callable[[tuple[Row, ...]], tuple[Row, ...]], expires: Mapping[str, float | None]
    ) -> None:
        """Makes the next version, in which some files expire anew; what has expired leaves with it."""

        def update(head: Head) -> Head:
            now, version, before = self.clock(), 0, Edition()
            if head.editions:
                version, key = head.editions[-1]
                found = get(self.repo, key, Edition)
                if found is None:
                    raise ChunkUnavailable(
                        f"the list of files of library {self.name} has left the store; delete it and add again"
                    )
                before = found
            rows = change(tuple(r for r in before.rows if head.expires.get(r.name, now + 1) > now))
            key = put(self.repo, "edition", Edition(version=version + 1, rows=rows))
            until = {**head.expires, **expires}
            left = {r.name: at for r in rows if (at := until.get(r.name)) is not None}
            editions = (*head.editions, (version + 1, key))[-KEPT:]
            return head.model_copy(update={"editions": editions, "expires": left})

        self._head.update(Head(name=self.name), update)


@dataclass(frozen=True)
class LibraryView:
    """A library as of one version: what a window that opened it then goes on reading."""

    library: Library
    version: int
    rows: tuple[Row, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the files."""
        return frozenset(row.name for row in self.rows)

    def entry(self, name: str) -> Entry:
        """A file. Raises UnknownFile, ChunkUnavailable."""
        for row in self.rows:
            if row.name == name:
                return self.library.entry(row)
        raise UnknownFile(_unknown(name, self.library.name))

    def search(self, query: str | Chunk, k: int = 4) -> list[Hit]:
        """At most ``k`` passages for a question or a picture, best first; among equals those added first.

        Cost: the retriever's; the first search of a version reads its files.
        """
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be an int >= 1, got {k!r}")
        corpus = self.library.corpus(self.rows)
        found = self.library.retriever.rank(corpus, query, k) if corpus.passages else []
        return [Hit(*corpus.passages[i], score) for i, score in found[:k]]

    def find(self, query: str | Chunk, k: int, engine: Engine) -> list[Chunk]:
        """The chunks of `search` with their pixels, and what was prepared for ``engine``'s model in its store.

        Their files count as used. Raises ChunkUnavailable.
        """
        hits, corpus = self.search(query, k), self.library.corpus(self.rows)
        self.library.used(list(dict.fromkeys(hit.file for hit in hits)))
        for hit in hits:
            lend(self.library.repo, hit.passage.chunk, engine)
        return [corpus.shown(hit.passage) for hit in hits]


def libraries(store: Store) -> Iterator[str]:
    """Names of the libraries in ``store``, sorted. Cost: a listing."""
    for key in list(store.list("library/")):
        raw = store.read(key)
        if raw is not None:
            yield Head.model_validate_json(raw).name


def granted(store: Store, tenant: str) -> tuple[str, ...]:
    """The libraries in ``store`` that ``tenant`` may read.

    What is not granted is not looked at, so that it takes as long as what is not there.
    """
    return Fenced(store, f"grants/{digest('grants', tenant)}").read(Granted()).libraries


def _check_ttl(ttl: float | None) -> None:
    if ttl is not None and not 0 < ttl < math.inf:
        raise ValueError(f"ttl must be positive seconds or None, got {ttl}")


def _head_key(name: str) -> str:
    return f"library/{digest('library', name)}"


def _named(source: str | Path | bytes | Chunk) -> str:
    if isinstance(source, Chunk):
        return source.label or source.id[:16]
    return "" if isinstance(source, bytes) else Path(source).name


def _cut(source: str | Path | bytes | Chunk, name: str, caption: str) -> tuple[list[Passage], int]:
    if isinstance(source, Chunk):
        words = " ".join(part.text for part in source.parts if part.kind == "text")
        size = len(words.encode()) + sum(m.shape[0] * m.shape[1] * m.shape[2] * 3 for m in source.media)
        return [Passage(chunk=source, text=f"{caption} {words}".strip())], size
    if isinstance(source, bytes):
        return passages_of(name, source, caption), len(source)
    path = Path(source)
    if not path.is_file():
        raise BadMedia(f"a file must be there and readable, got {str(path)!r}")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise BadMedia(f"a file must have at most {MAX_FILE_BYTES:,} bytes, got {size:,} in {name!r}; split it")
    return passages_of(name, path.read_bytes(), caption), size


def _taken(name: str) -> str:
    return f"a file of a library must have a name of its own, got {name!r} again; replace it, or choose another name"


def _unknown(name: str, library: str) -> str:
    return f"a file must be one of library {library}, got {name[:300]!r}; it may have expired"
