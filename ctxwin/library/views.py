"""`LibraryView`: a library as of one version, which finds in it."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Members of a `Library` that its views read."""

    name: str
    retriever: Retriever
    repo: SpanRepository

    def entry(self, row: Row) -> Entry:
        """Return the file of ``row``. Raises ChunkUnavailable."""

    def corpus(self, rows: Sequence[Row]) -> Corpus:
        """Return the passages of ``rows`` for retrievers."""

    def renew(self, names: Sequence[str]) -> None:
        """Renew the expiry of used files."""

    def sweep(self, engine: Engine | None = None) -> None:
        """Remove expired files, and records that removed files left."""

    def trace(self, row: Row, engine: Engine) -> str:
        """Record which keys a file will leave in the stores of ``engine`` and of the library; return its `Chunk.origin`."""


@dataclass(frozen=True)
class LibraryView:
    """A library as of one version: what a window that opened it then goes on reading."""

    library: ReadableLibrary
    version: int
    rows: tuple[Row, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the files."""
        return frozenset(row.name for row in self.rows)

    def entry(self, name: str) -> Entry:
        """A file. Raises UnknownFile, ChunkUnavailable."""
        for row in self.rows:
            if row.name == nfc(name):
                return self.library.entry(row)
        raise UnknownFile(unknown_file(name, self.library.name))

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
        hits, corpus = self.search(query, k), self.library.corpus(self.rows)
        self.library.renew(list(dict.fromkeys(hit.file for hit in hits)))
        self.library.sweep(engine)
        rows = {row.name: row for row in self.rows}
        origins = {name: self.library.trace(rows[name], engine) for name in {hit.file for hit in hits}}
        for hit in hits:
            lend(self.library.repo, hit.passage.chunk, engine)
        return [corpus.chunk_with_pixels(hit.passage).drawn_from(origins[hit.file]) for hit in hits]


def unknown_file(name: str, library: str) -> str:
    """Return the message for a file that a library does not have."""
    return f"a file must be one of library {library}, got {name[:300]!r}; it may have expired"
