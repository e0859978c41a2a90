"""How passages are found: by words, by vectors, by pictures, and by several ways at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import add
from typing import TYPE_CHECKING, Any, Protocol
from unicodedata import category, normalize

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.errors import ChunkUnavailable
from ctxwin.extras import optional_imports
from ctxwin.hashing import digest
from ctxwin.library.records import Passage
from ctxwin.policies.retrieval import Pools
from ctxwin.store.lru import LRUCache
from ctxwin.store.spans import SpanRepository

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

Ranked = list[tuple[int, float]]
"""Indices into a corpus with scores, best first."""
_FUSED = 60  # the constant of Cormack, Clarke and Buettcher, "Reciprocal rank fusion" (SIGIR 2009)
_UNSPACED = (  # Thai to Khmer, kana and Han, which have no blanks between words, and Hangul, whose words end in particles
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u9fff"
    "\uac00-\ud7a3\U00020000-\U0003ffff"
)


@dataclass(frozen=True)
class Corpus:
    """Passages to search.

    Attributes:
        name: of its content; the same passages have the same name.
        passages: each with the name of its file.
        repo: the library's store, where retrievers may keep what follows from a passage.
        note: told the keys of what they keep there, by passage, and a name for it, so that it goes with the files.
    """

    name: str
    passages: tuple[tuple[str, Passage], ...]
    repo: SpanRepository
    note: Callable[[Sequence[str], str], None] = lambda keys, name: None

    def chunk_with_pixels(self, passage: Passage) -> Chunk:
        """Return its chunk with its pixels. Raises ChunkUnavailable where the store has dropped them."""
        pixels = {}
        for part in passage.chunk.media:
            if (raw := self.repo.get_source(part.content)) is None:
                raise ChunkUnavailable(f"the pixels of {passage.chunk.label!r} left the library's store; add it again")
            pixels[part.content] = part.unpack(raw)
            if part.digest(pixels[part.content]) != part.content:
                raise ChunkUnavailable(f"the pixels of {passage.chunk.label!r} changed in the library's store; add it")
        return passage.chunk.holding(pixels)


class Retriever(Protocol):
    """Finds passages for a question or a picture. Thread-safe; the same corpus and query give the same ranking."""

    def rank(self, corpus: Corpus, query: str | Chunk, k: int) -> Ranked:
        """The best ``k`` passages at most; none where nothing fits the query."""


_Indices = partial(LRUCache[Any], 4)  # of the latest corpora, by name


@dataclass(frozen=True)
class BM25:
    """By words: BM25 (Robertson and Zaragoza, 2009) over names, captions and texts, by bm25s. Pictures find nothing.

    Case and ways to write a letter (``ß``, ``SS``; composed or not; full width) make no difference. Scripts without blanks, and
    Hangul, are found by pairs of letters, as by Lucene's ``CJKAnalyzer``, and a letter alone wherever it stands.

    Cost: an index of the corpus, once; then a pass over the query's words.
    """

    _indices: LRUCache[Any] = field(default_factory=_Indices, init=False, repr=False, compare=False)

    def rank(self, corpus: Corpus, query: str | Chunk, k: int) -> Ranked:
        """See `Retriever.rank`; passages that have none of the words are not found."""
        with optional_imports():
            import bm25s
        words = _words(query) if isinstance(query, str) else []
        if not words:
            return []

        def build() -> Any:
            index = bm25s.BM25()
            words = [_words(f"{name} {passage.text}", letters=True) or [""] for name, passage in corpus.passages]
            index.index(words, show_progress=False)
            return index

        scores = np.asarray(self._indices.get_or_build(corpus.name, build).get_scores(words), dtype=np.float64)
        return _best(scores, k, above=0.0)


@dataclass(frozen=True)
class Vectors:
    """By an embedding of the user's choice: cosine, by faiss.

    Args:
        embed: gives ``[n, d]`` for n texts and chunks. Texts are queries and passages without media; a passage with media
            comes as its chunk, with pixels: an embedding of texts alone may take ``chunk.label`` and raise for others.
        name: of the embedding; stored vectors of another name are not used.
        least: least cosine of what is found, in -1..1.

    Any model will do: ``SentenceTransformer("folder").encode``, a CLIP folder, vLLM's own pooling, or LangChain's
    ``embeddings.embed_documents``. Cost: one embedding a passage, kept in the library's store; one a query.
    """

    embed: Callable[[Sequence[str | Chunk]], Any]
    name: str
    least: float = -1.0
    _indices: LRUCache[Any] = field(default_factory=_Indices, init=False, repr=False, compare=False)

    def rank(self, corpus: Corpus, query: str | Chunk, k: int) -> Ranked:
        """See `Retriever.rank`."""
        with optional_imports():
            import faiss
        index = self._indices.get_or_build(corpus.name, lambda: self._built(corpus, faiss))
        query_vector = self._normed([query])
        if query_vector.shape[1] != index.d:
            raise ValueError(
                f"embedding {self.name!r} must have the {index.d} dimensions of what is stored under its name, got "
                f"{query_vector.shape[1]}; give the new one another name"
            )
        scores, neighbours = index.search(query_vector, min(k, len(corpus.passages)))
        ranked = ((int(i), float(s)) for i, s in zip(neighbours[0], scores[0], strict=True) if i >= 0)
        return sorted((one for one in ranked if one[1] >= self.least), key=lambda one: (-one[1], one[0]))

    def _built(self, corpus: Corpus, faiss: Any) -> Any:
        import torch

        repo = SpanRepository(corpus.repo.store, digest("embedding", self.name))
        keys = [f"embed/{digest('vector', self.name, p.chunk.id, p.text)}" for _, p in corpus.passages]
        corpus.note(keys, self.name)
        cached = [repo.get_embedding(key) for key in keys]
        missing = [i for i, vector in enumerate(cached) if vector is None]
        for begin in range(0, len(missing), 32):
            batch = missing[begin : begin + 32]
            passages = [corpus.passages[i][1] for i in batch]
            vectors = self._normed([corpus.chunk_with_pixels(p) if p.chunk.media else p.text for p in passages])
            for i, vector in zip(batch, vectors, strict=True):
                cached[i] = row = torch.from_numpy(vector)[None]
                repo.put_embedding(keys[i], row)
        rows = np.concatenate([np.asarray(vector, dtype=np.float32) for vector in cached])
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows)
        return index

    def _normed(self, inputs: Sequence[str | Chunk]) -> np.ndarray:
        rows = np.asarray(self.embed(inputs), dtype=np.float32)
        if rows.ndim != 2 or len(rows) != len(inputs) or not np.isfinite(rows).all():
            raise ValueError(
                f"embedding {self.name!r} must give finite [{len(inputs)}, d] for {len(inputs)} inputs, got {rows.shape}"
            )
        return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))


@dataclass(frozen=True)
class Pictures:
    """Passages that look most like a picture: cosine of mean-pooled vision embeddings of the served model.

    Text finds nothing. Cost: a run of the vision tower for each picture that ``engine`` has not seen.
    """

    engine: Engine
    _pools: Pools = field(default_factory=Pools, init=False, repr=False, compare=False)

    def rank(self, corpus: Corpus, query: str | Chunk, k: int) -> Ranked:
        """See `Retriever.rank`; passages without media, or whose pixels are gone, are not found."""
        if isinstance(query, str) or not query.media:
            return []
        import torch

        query_vector = self._pools.of(self.engine, query)
        scores = np.full(len(corpus.passages), -np.inf)
        for i, (_, passage) in enumerate(corpus.passages):
            with suppress(ChunkUnavailable):
                if passage.chunk.media:
                    pooled = self._pools.of(self.engine, corpus.chunk_with_pixels(passage))
                    scores[i] = float(torch.nn.functional.cosine_similarity(query_vector, pooled, dim=0))
        return _best(scores, k, above=-np.inf)


@dataclass(frozen=True)
class Fused:
    """Several retrievers, fused by reciprocal ranks: 1 / (60 + rank), added up (Cormack, Clarke and Buettcher, 2009)."""

    retrievers: tuple[Retriever, ...]

    def rank(self, corpus: Corpus, query: str | Chunk, k: int) -> Ranked:
        """See `Retriever.rank`. Each is asked for four times as many."""
        scores = np.zeros(len(corpus.passages))
        for retriever in self.retrievers:
            for rank, (i, _) in enumerate(retriever.rank(corpus, query, 4 * k), 1):
                scores[i] += 1 / (_FUSED + rank)
        return _best(scores, k, above=0.0)


def _best(scores: np.ndarray, k: int, above: float) -> Ranked:
    return [(int(i), float(scores[i])) for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > above]


def _words(text: str, *, letters: bool = False) -> list[str]:
    """Return the words of a text, and pairs of unspaced letters; with ``letters`` these one by one, too, as they are indexed."""
    words: list[str] = []
    folded = normalize("NFKC", normalize("NFKC", text).casefold()).replace("i\u0307", "i")  # of the capital with a dot
    for word, run in _pattern().findall(folded):
        words += [word] if word else map(add, run, run[1:])
        words += run if letters or len(run) == 1 else ()
    return words


@cache
def _pattern() -> re.Pattern[str]:
    """Return the pattern of words and of runs of unspaced letters; ``\\w`` lacks the marks by which many scripts write vowels."""
    marks = "".join(c for c in map(chr, range(0x300, 0x1F000)) if category(c) in ("Mn", "Mc"))
    return re.compile(rf"([^\W{_UNSPACED}]+(?:[{marks}]+[^\W{_UNSPACED}]*)*)|([{_UNSPACED}]+)")
