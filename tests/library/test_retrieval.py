"""Retrievers against what they must find, and their libraries' own figures."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest

from ctxwin import Chunk, Library
from ctxwin.library import BM25, Fused, Pictures, Vectors
from ctxwin.media import png
from window.fake import FakeEngine

TEXTS = {
    "cars.txt": "The red car left the garage before the blue one.",
    "bus.txt": "A bus waits; nobody gets in.",
    "tax.txt": "Form 1040 is due in April.",
}


@pytest.fixture
def full(shelf: Library) -> Library:
    for name, text in TEXTS.items():
        shelf.add(text.encode(), name)
    for shade in (10, 120, 240):
        shelf.add(png(np.full((4, 4, 3), shade, np.uint8)), f"{shade}.png", caption=f"a square, shade {shade}")
    return shelf


def found(library: Library, query: str | Chunk, k: int = 4) -> list[str]:
    return [hit.file for hit in library.search(query, k)]


def embed(inputs: Sequence[str | Chunk]) -> np.ndarray:
    """Counts of letters, or of shades: a toy in which cosine means something."""
    rows = np.zeros((len(inputs), 300))
    for row, one in zip(rows, inputs, strict=True):
        if isinstance(one, str):
            np.add.at(row, [min(ord(c), 255) for c in one.lower()], 1)
        else:
            pixels = one.pixels(one.media[0])
            assert pixels is not None, "passages with media come with their pixels"
            row[256 + int(pixels.mean()) // 10] = 1
    return rows


def test_words_find_by_words(full: Library) -> None:
    assert found(full, "Which car is RED?") == ["cars.txt"] or found(full, "Which car is RED?")[0] == "cars.txt"
    assert found(full, "1040")[0] == "tax.txt" and found(full, "shade 120")[0] == "120.png"
    assert found(full, "zebra") == [] and found(full, "?!") == [] and found(full, Chunk.text("red car")) == []
    assert found(full, "a", k=2) and len(found(full, "a square", k=2)) == 2


@pytest.mark.parametrize(
    ("text", "found_by", "not_by"),
    [
        ("红色的泵在星期一加了油。", ["泵", "红色的泵", "泵在", "油"], ["阀", "油加"]),
        ("ポンプは月曜日に注油された", ["ポンプ", "ﾎﾟﾝﾌﾟ", "注油"], ["バルブ"]),
        ("펌프는 월요일에", ["펌프", unicodedata.normalize("NFD", "월요일")], ["밸브"]),
        ("ปั๊มสีแดง", ["ปั๊ม", "แดง"], ["วาล์ว"]),
        ("हिन्दी में लाल पंप", ["पंप"], ["पेप", "प"]),
        (
            "Die STRASSE am Kühler, İzmir",
            ["straße", unicodedata.normalize("NFD", "KÜHLER"), "ＳＴＲＡＳＳＥ", "izmir"],
            ["kuhler"],
        ),
    ],
)
def test_words_are_found_in_any_script_and_spelling(
    shelf: Library, text: str, found_by: list[str], not_by: list[str]
) -> None:
    shelf.add(unicodedata.normalize("NFD", text).encode(), "a.txt")
    shelf.add(b"another passage", "b.txt")
    assert all(found(shelf, query) == ["a.txt"] for query in found_by)
    assert not any(found(shelf, query) for query in not_by)


def test_words_score_as_the_formula_says(full: Library) -> None:
    """BM25 as Lucene has it (k1 = 1.5, b = 0.75), recomputed over the passages."""
    import math
    import re

    corpus = full.corpus(full.view().rows)
    documents = [re.findall(r"\w+", f"{name} {p.text}".lower()) for name, p in corpus.passages]
    mean = sum(map(len, documents)) / len(documents)
    wanted = []
    for words in documents:
        score = 0.0
        for word in ("red", "car", "bus"):
            df, tf = sum(word in d for d in documents), words.count(word)
            idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
            score += idf * tf / (tf + 1.5 * (0.25 + 0.75 * len(words) / mean))
        wanted.append(score)
    ranked = dict(BM25().rank(corpus, "red car bus", 10))
    assert ranked == pytest.approx({i: s for i, s in enumerate(wanted) if s > 0}, rel=1e-4)


def test_vectors_rank_by_cosine(full: Library) -> None:
    full.retriever = Vectors(embed, "letters")
    corpus = full.corpus(full.view().rows)
    rows = embed([p.text if not p.chunk.media else corpus.chunk_with_pixels(p) for _, p in corpus.passages])
    asked = embed(["a bus that waits"])[0]
    cosines = rows @ asked / np.linalg.norm(rows, axis=1) / np.linalg.norm(asked)
    ranked = full.retriever.rank(corpus, "a bus that waits", 6)
    assert [i for i, _ in ranked] == sorted(range(6), key=lambda i: -cosines[i])
    assert [s for _, s in ranked] == pytest.approx(sorted(cosines, reverse=True), abs=1e-6)
    assert found(full, Chunk.image(np.full((4, 4, 3), 241, np.uint8)), 1) == ["240.png"]


def test_vectors_are_kept_with_the_library(full: Library) -> None:
    calls: list[int] = []

    def counting(inputs: Sequence[str | Chunk]) -> np.ndarray:
        calls.append(len(inputs))
        return embed(inputs)

    full.retriever = Vectors(counting, "letters")
    first = found(full, "bus")
    again = Library(full.store, "shelf", retriever=Vectors(counting, "letters"), clock=full.clock)
    assert found(again, "bus") == first and calls == [6, 1, 1]


@pytest.mark.parametrize("bad", [lambda inputs: np.ones(len(inputs)), lambda inputs: np.full((len(inputs), 3), np.nan)])
def test_an_embedding_that_gives_no_rows_is_named(full: Library, bad: object) -> None:
    full.retriever = Vectors(bad, "broken")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="embedding 'broken' must give finite"):
        full.search("bus")


def test_another_size_under_the_same_name_is_refused(full: Library) -> None:
    full.retriever = Vectors(embed, "letters")
    full.search("bus")
    full.retriever = Vectors(lambda inputs: embed(inputs)[:, :7] + 1, "letters")
    with pytest.raises(ValueError, match="another name"):
        full.search("bus")


def test_pictures_find_pictures(full: Library, engine: FakeEngine) -> None:
    class Shades(FakeEngine):
        """Whose embedding of a picture is a direction of its shade."""

        def embed(self, key: str):  # type: ignore[no-untyped-def]
            import torch

            shade = super().embed(key).mean() / 997 * 3
            return torch.stack([shade.cos(), shade.sin()])[None]

    seeing = Shades(engine.store)
    full.retriever = Pictures(seeing)
    hits = full.search(Chunk.image(np.full((4, 4, 3), 120, np.uint8)), 3)
    assert hits[0].file == "120.png" and hits[0].score == pytest.approx(1.0)
    assert found(full, "a square") == [] and all(hit.file.endswith(".png") for hit in hits)


def test_fused_ranks_add_up(full: Library) -> None:
    words, vectors = BM25(), Vectors(embed, "letters")
    full.retriever = Fused((words, vectors))
    corpus = full.corpus(full.view().rows)
    wanted: dict[int, float] = {}
    for one in (words, vectors):
        for rank, (i, _) in enumerate(one.rank(corpus, "a red bus", 16), 1):
            wanted[i] = wanted.get(i, 0.0) + 1 / (60 + rank)
    assert dict(full.retriever.rank(corpus, "a red bus", 4)) == pytest.approx(
        dict(sorted(wanted.items(), key=lambda item: (-item[1], item[0]))[:4])
    )


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_k_is_checked(full: Library, k: int) -> None:
    with pytest.raises(ValueError, match="k must be an int >= 1"):
        full.search("bus", k)


def test_an_empty_library_finds_nothing(shelf: Library) -> None:
    assert shelf.search("anything") == []
