"""LangChain's retrievers and vector stores as libraries of windows, and a library as a retriever."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore

from ctxwin import Chunk, Library, Window, open_engine
from ctxwin.store import open_store
from engines.scripted import ScriptedEngine
from engines.tool_models import write_tool_model
from langchain_ctxwin import Documents, LibraryRetriever
from window.fake import FakeEngine
from window.test_lookups import called

FACTS = [f"Fact {i} about the pump." for i in range(6)]


@pytest.fixture
def vectors() -> InMemoryVectorStore:
    made = InMemoryVectorStore(DeterministicFakeEmbedding(size=64))
    made.add_documents([Document(text, metadata={"source": f"{i}.md"}) for i, text in enumerate(FACTS)])
    return made


def test_a_window_places_what_a_vector_store_or_a_retriever_finds(vectors: InMemoryVectorStore) -> None:
    for source in (vectors, vectors.as_retriever(search_kwargs={"k": 5})):
        with Window(FakeEngine(), "h", 900) as window:
            ids = window.retrieve(FACTS[2], Documents(source), k=3)
            assert len(ids) == 3 and window.chunk(ids[0]).label == "2.md"
            assert window.chunk(ids[0]).id == Chunk.text(FACTS[2]).id
            assert window.retrieve(Chunk.text(FACTS[2]), Documents(source), k=1) == ids[:1], "what is placed stays"


class Bare(BaseRetriever):
    """Finds documents of which nothing but their text is known."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(text) for text in FACTS]


def test_documents_without_a_name_are_placed_as_well() -> None:
    with Window(FakeEngine(), "h", 900) as window:
        ids = window.retrieve("pump", Documents(Bare()), k=3)
        assert [window.chunk(i) for i in ids] == [Chunk.text(text) for text in FACTS[:3]]


def test_the_model_looks_things_up_in_a_vector_store(vectors: InMemoryVectorStore, tmp_path: Path) -> None:
    with open_engine(f"hf:{write_tool_model(tmp_path)}", dtype="float32") as engine:
        scripted = ScriptedEngine(engine, [called(FACTS[4], "documents"), "So it is."])
        with Window(scripted, "h", 3000) as window:
            made = window.ask("What of the pump?", 300, libraries=[Documents(vectors)])
            assert made.text == "So it is." and made.looked_up[0].labels[0] == "4.md"
            assert FACTS[4] in scripted.prompts[1] and FACTS[4] not in scripted.prompts[0].replace("look_up", "")


def test_a_library_is_a_retriever() -> None:
    shelf = Library(open_store("memory:"), "manuals")
    shelf.add(b"The pump is oiled every 200 hours.", "pump.txt")
    shelf.add(b"The valve is red.", "valve.txt", caption="plant 3")
    found = LibraryRetriever(library=shelf, k=1).invoke("the valve of plant 3")
    (document,) = found
    assert "valve is red" in document.page_content and document.metadata["source"] == "valve.txt"
    assert document.metadata["chunk"] == shelf.search("the valve of plant 3", 1)[0].passage.chunk.id


def test_what_cannot_be_searched_is_refused(vectors: InMemoryVectorStore) -> None:
    with pytest.raises(TypeError, match="retriever or a vector store of LangChain, got list"):
        Documents([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        LibraryRetriever(library=Library(open_store("memory:"), "manuals"), kk=1)
    with pytest.raises(ValueError, match="must be text"):
        Documents(vectors).find(Chunk.tokens([5]), 2, FakeEngine())
    with FakeEngine() as engine, Window(engine, "h") as window:
        with pytest.raises(ValueError, match="must be text, and not empty, got ''"):
            window.retrieve("", Documents(vectors))
        with pytest.raises(TypeError, match=r"pass langchain_ctxwin.Documents\(library\)"):
            window.retrieve("a", vectors)  # type: ignore[arg-type]
