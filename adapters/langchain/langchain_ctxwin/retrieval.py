"""Libraries for LangChain, and LangChain's retrievers and vector stores for windows."""

from __future__ import annotations

from typing import Self

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict

from ctxwin.chunk import Chunk, TextPart
from ctxwin.engines.base import Engine
from ctxwin.library import Library


class Documents:
    """A retriever or a vector store of LangChain as a source that windows retrieve from.

    ``window.retrieve(query, Documents(store))`` and ``window.ask(query, libraries=[Documents(store)])`` place the documents it
    finds as texts, labelled with their ``source`` or id. It has no versions: a search sees the current documents.

    Args:
        source: searched by words.
        name: the library's name for the model and the window.
    """

    version = 0

    def __init__(self, source: BaseRetriever | VectorStore, name: str = "documents") -> None:
        if not isinstance(source, BaseRetriever | VectorStore):
            raise TypeError(f"source must be a retriever or a vector store of LangChain, got {type(source).__name__}")
        self._source, self.name = source, name

    def view(self, version: int | None = None, /) -> Self:
        """Return the current documents; there are no versions."""
        return self

    def find(self, query: str | Chunk, k: int, engine: Engine) -> list[Chunk]:
        """Return at most ``k`` documents, the best first. Raises ValueError for a query without text."""
        words = query if isinstance(query, str) else " ".join(p.text for p in query.parts if isinstance(p, TextPart))
        if not words.strip():
            raise ValueError(f"a query to documents must be text, and not empty, got {query!r:.80}")
        if isinstance(self._source, VectorStore):
            documents = self._source.similarity_search(words, k=k)
        else:
            documents = self._source.invoke(words)[:k]
        return [Chunk.text(d.page_content, label=_label(d)) for d in documents if d.page_content.strip()]


class LibraryRetriever(BaseRetriever):
    """A library as a retriever of LangChain. Pictures come as their captions, with the chunk's id beside them."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    library: Library
    k: int = 4

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        hits = self.library.search(query, self.k)
        return [
            Document(hit.passage.text, metadata={"source": hit.file, "score": hit.score, "chunk": hit.passage.chunk.id})
            for hit in hits
        ]


def _label(document: Document) -> str:
    return str(document.metadata.get("source") or document.id or "")
