"""`LibraryView`: a library as of one version, which finds in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Protocol

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import UnknownFile
from ctxwin.library.prepared import lend
from ctxwin.library.records import Entry, Passage, Row, nfc
from ctxwin.library.retrieval import Corpus, Retriever
from ctxwin.store.spans import SpanRepository
from ctxwin.validation import check_integer


@dataclass(frozen=True)
class Hit:
    """A passage that was found. ``score`` is the retriever's: comparable within one search only."""

    file: str
    passage: Passage
    score: float


class ReadableLibrary(Protocol):
    """Members of a `Library` that its views read; see there."""

    name: str
    retriever: Retriever
    repo: SpanRepository

    def entry(self, row: Row) -> Entry: ...
    def corpus(self, rows: Sequence[Row]) -> Corpus: ...
    def renew(self, names: Sequence[str]) -> None: ...
    def sweep(self, engine: Engine | None = None) -> None: ...
    def trace(self, row: Row, engine: Engine) -> str: ...


@dataclass(frozen=True)
class LibraryView:
    """A library as of one version: what a window that opened it then goes on reading."""

    library: ReadableLibrary
    version: int
    rows: tuple[Row, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of the files."""
        return frozenset(self._by_name)

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows}

    def entry(self, name: str) -> Entry:
        """A file. Raises UnknownFile, ChunkUnavailable."""
        if (row := self._by_name.get(nfc(name))) is None:
            raise UnknownFile(unknown_file(name, self.library.name, self.names))
        return self.library.entry(row)

    def search(self, query: str | Chunk, k: int = 4) -> list[Hit]:
        """At most ``k`` passages for a question or a picture, best first; among equals those added first.

        Cost: the retriever's; the first search of a version reads its files.
        """
        check_integer("k", k, 1)
        corpus = self.library.corpus(self.rows)
        ranked = self.library.retriever.rank(corpus, query, k) if corpus.passages else []
        return [Hit(*corpus.passages[i], score) for i, score in ranked[:k]]

    def find(self, query: str | Chunk, k: int, engine: Engine) -> list[Chunk]:
        """The chunks of `search` with their pixels, and what was prepared for ``engine``'s model in its store.

        Their files count as used. Raises ChunkUnavailable.
        """
        return self._lent([(hit.file, hit.passage) for hit in self.search(query, k)], engine)

    def take(self, names: Iterable[str], engine: Engine) -> list[Chunk]:
        """As `find`, the chunks of all passages of files by their ``names``, in this order. Raises UnknownFile, too."""
        return self._lent([(entry.name, p) for entry in map(self.entry, names) for p in entry.passages], engine)

    def _lent(self, passages: Sequence[tuple[str, Passage]], engine: Engine) -> list[Chunk]:
        names, corpus = (
            list(dict.fromkeys(name for name, _ in passages)),
            Corpus("", tuple(passages), self.library.repo),
        )
        self.library.renew(names)
        self.library.sweep(engine)
        origins = {name: self.library.trace(self._by_name[name], engine) for name in names}
        for _, passage in passages:
            lend(self.library.repo, passage.chunk, engine)
        return [corpus.chunk_with_pixels(passage).drawn_from(origins[name]) for name, passage in passages]


def unknown_file(name: str, library: str, names: Iterable[str]) -> str:
    """Return the message for a file that a library does not have, with those of its ``names`` that are nearest."""
    near = "".join(f", or be {other!r}" for other in get_close_matches(name[:300], names))
    return f"a file must be one of library {library}, got {name[:300]!r}; it may have expired{near}"
