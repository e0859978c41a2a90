"""What a look back brings back, against naive searches; and that it is all or nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ctxwin import Chunk, Window
from ctxwin.errors import BudgetExceeded, ChunkUnavailable, UnknownChunk
from ctxwin.policies import ById, ByPriority, BySimilarity, ByToolCall
from window.fake import FakeEngine


@dataclass(frozen=True)
class Given:
    """Always the same ids."""

    ids: Sequence[str]

    def choose(self, window: Window, query: str | Chunk) -> Sequence[str]:
        return self.ids


@pytest.fixture
def looking(engine: FakeEngine) -> Window:
    """Five of six chunks are evicted."""
    window = Window(engine, "h", budget=60)
    window.extend([Chunk.text(t * 3) for t in "abcdef"])
    window.slide(5)
    return window


def test_by_id_brings_back_what_is_named_in_the_order_it_is_named(looking: Window) -> None:
    a, b, c, d, e = looking.evicted
    assert looking.look_back(f"what of {d} and {b}, or {d}? Not {looking.ids[0]}.") == [d, b]
    assert looking.ids[1:] == (b, d), "behind what is placed, the oldest first"
    assert looking.evicted == (a, c, e)
    assert looking.look_back("nothing is named") == []
    assert looking.look_back(Chunk.text(a)) == []


def hermes(name: str, arguments: Any, key: str = "arguments") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, key: arguments})}\n</tool_call>"


def test_tool_calls_are_read_in_every_form(looking: Window) -> None:
    a, b, c, d, e = looking.evicted
    choose = ByToolCall().choose
    assert choose(looking, f"I look again.\n{hermes('recall', {'id': c})}") == [c]
    assert choose(looking, hermes("recall", {"id": c}) + hermes("recall", {"id": a})) == [c, a]
    assert choose(looking, hermes("recall", {"id": [d, b, d]})) == [d, b]
    assert choose(looking, hermes("recall", {"id": e}, "parameters")) == [e]
    assert choose(looking, hermes("recall", json.dumps({"id": e}))) == [e]
    assert choose(looking, f'Sure: {{"name": "recall", "arguments": {{"id": "{a}"}}}} - wait {{x}}') == [a]
    assert choose(looking, f'[{{"name": "recall", "arguments": {{"id": "{b}"}}}}]') == [b]
    assert choose(looking, hermes("click", {"id": a}) + hermes("recall", {"ids": a})) == []
    assert choose(looking, f"recall {a}") == [], "naming is not calling"
    assert choose(looking, Chunk.text(hermes("recall", {"id": a}))) == []
    other = ByToolCall(tool="look_back", argument="frame")
    assert other.choose(looking, hermes("look_back", {"frame": a}) + hermes("recall", {"id": b})) == [a]


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        '{"name": "recall", "arguments": {"id": ID}}',
        '{"name": "recall", "arguments": {"id": "A"}',
        '<tool_call>{"name": "recall", "arguments": </tool_call>',
        '{"note": {"name": "recall", "arguments": {"id": "A"}}, broken}',
        '{"name": "recall", "arguments": "{"}',
        '{"name": "recall", "arguments": 7}',
        '{"name": "recall", "arguments": {"id": 7}}',
        '{"name": "recall", "arguments": {"id": [7, null, {}]}}',
        '{"name": "recall"}',
        '{"name": 7, "arguments": {"id": "A"}}',
        '{"name": "recall", "arguments": {"id": ' + "9" * 5000 + "}}",
        '{"a":' * 20,
    ],
)
def test_broken_calls_are_ignored_and_good_ones_behind_them_found(looking: Window, broken: str) -> None:
    a, b, *_ = looking.evicted
    text = broken.replace("A", a)
    assert ByToolCall().choose(looking, text) == []
    assert ByToolCall().choose(looking, text + "\n" + hermes("recall", {"id": b})) == [b]


def test_absurd_nesting_is_no_call(looking: Window) -> None:
    assert ByToolCall().choose(looking, '{"a":' * 100_000) == []


def test_ids_that_are_not_evicted_are_ignored_and_logged(looking: Window, caplog: pytest.LogCaptureFixture) -> None:
    a, placed = looking.evicted[0], looking.ids[0]
    looking.retrieval = ByToolCall()
    with caplog.at_level(logging.WARNING, logger="ctxwin"):
        assert looking.look_back(hermes("recall", {"id": ["nope", a, placed]})) == [a]
    assert [r.getMessage() for r in caplog.records] == [
        f"a call of recall names {i!r}, which is not evicted; ignored" for i in ("nope", placed)
    ]


class Seeing(FakeEngine):
    """Embeddings with a hidden width: one row a frame, mean colour and 1."""

    def embed(self, key: str) -> torch.Tensor:
        super().embed(key)
        return self.rows[key]

    rows: dict[str, torch.Tensor]

    def encode(self, chunk: Chunk) -> Any:
        encoded = super().encode(chunk)
        self.rows = getattr(self, "rows", {})
        for part, span in zip(chunk.media, encoded.media, strict=True):
            pixels = chunk.pixels(part)
            if pixels is not None:
                self.rows[span.key] = torch.from_numpy(pixels.reshape(len(pixels), -1, 3).mean(1)).float()
        return encoded


def picture(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)


def cosine(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Of the mean colours of two lists of frames."""
    u, v = (np.mean([f.reshape(-1, 3).mean(0) for f in frames], axis=0) for frames in (a, b))
    return float(u @ v / (np.linalg.norm(u) * np.linalg.norm(v)))


def test_similarity_against_numpy() -> None:
    rng = np.random.default_rng(0)
    engine = Seeing()
    window = Window(engine, "h")
    frames: dict[str, list[np.ndarray]] = {}
    for i in range(8):
        shown = [picture(rng) for _ in range(1 + i % 3)]
        chunk = Chunk.video(shown) if len(shown) > 1 else Chunk.image(shown[0])
        frames[window.append(chunk)] = shown
    window.append(Chunk.text("no picture"))
    window.slide(6)
    window.append(Chunk.text("neither"))
    evicted, newest = [i for i in window.evicted if i in frames], [i for i in window.ids if i in frames][-1]
    asked = [picture(rng)]

    def naive(query: Sequence[np.ndarray], count: int, least: float = -1.0) -> list[str]:
        ranked = sorted(evicted, key=lambda i: -cosine(query, frames[i]))
        return [i for i in ranked if cosine(query, frames[i]) >= least][:count]

    query = Chunk.image(asked[0], text="where was this?")
    for count in (1, 3, 99):
        assert BySimilarity(count).choose(window, query) == naive(asked, count)
        assert BySimilarity(count).choose(window, "where was this?") == naive(frames[newest], count)
        assert BySimilarity(count).choose(window, Chunk.text("where?")) == naive(frames[newest], count)
        assert BySimilarity(count, to=evicted[2]).choose(window, "where?") == naive(frames[evicted[2]], count)
    ranks = sorted(cosine(asked, frames[i]) for i in evicted)
    middle = (ranks[2] + ranks[3]) / 2
    assert BySimilarity(99, least=middle).choose(window, query) == naive(asked, 99, middle)
    assert len(naive(asked, 99, middle)) == len(evicted) - 3
    assert BySimilarity(99, least=1.0).choose(window, query) == []


def test_among_equals_the_newest_comes_first() -> None:
    window = Window(Seeing(), "h")
    same = np.full((2, 2, 3), 7, np.uint8)
    ids = window.extend([Chunk.image(same, text=str(i)) for i in range(4)])
    window.append(Chunk.image(same))
    window.slide(4)
    assert BySimilarity(3).choose(window, "again?") == [ids[3], ids[2], ids[1]]


def test_without_a_picture_there_is_nothing_to_compare(looking: Window) -> None:
    looking.retrieval = BySimilarity()
    assert looking.look_back("where?") == []
    with pytest.raises(UnknownChunk, match="placed or evicted chunk, got 'nope'"):
        BySimilarity(to="nope").choose(looking, "where?")


def test_lost_embeddings_are_made_again_or_skipped(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(1)
    engine = Seeing()
    window = Window(engine, "h", retrieval=BySimilarity(9))
    kept, gone, _ = window.extend([Chunk.image(picture(rng), keep_source=k) for k in (True, False, True)])
    window.slide(2)
    window.ask("q")
    for key in list(engine.store.list("embed/")):
        engine.store.delete(key)
    encodes = engine.counters.vision_encodes
    with caplog.at_level(logging.WARNING, logger="ctxwin"):
        assert window.look_back("where?") == [kept]
    assert f"chunk {gone} is skipped" in caplog.text
    assert engine.counters.vision_encodes == encodes + 2, "the probe and the kept one, from their sources"
    assert window.ask("q").usage.vision_encodes == 2, "and the next answer says so"
    with pytest.raises(ChunkUnavailable):
        BySimilarity(to=gone).choose(window, "where?")


def test_held_chunks_are_never_encoded_again() -> None:
    rng = np.random.default_rng(2)
    engine = Seeing()
    window = Window(engine, "h", retrieval=BySimilarity(2))
    window.extend([Chunk.image(picture(rng)) for _ in range(5)])
    window.slide(4)
    assert engine.counters.vision_encodes == 5
    assert len(window.look_back("which?")) == 2
    assert engine.counters.vision_encodes == 5
    window.look_back(Chunk.image(picture(rng)))
    assert engine.counters.vision_encodes == 6, "a query picture is seen once"
    assert window.ask("q").usage.vision_encodes == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count must be an int >= 1, got 0"),
        ({"least": 2.0}, r"least must be a cosine in -1\.\.1, got 2.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BySimilarity(**arguments)


def test_a_look_back_makes_room_by_the_eviction_policy(engine: FakeEngine) -> None:
    window = Window(engine, "h", budget=17, eviction=ByPriority())  # the system prompt takes 2
    a, b, c, d, e = window.extend(
        [Chunk.text(t * 3, priority=p) for t, p in zip("abcde", (0, 3, 1, 2, 1), strict=True)]
    )
    window.evict(a)
    window.pin(c)
    assert window.look_back(f"back to {a}", reserve_tokens=3) == [a]
    assert window.ids == (b, c, d, a), "c is pinned, e has the lowest priority of the others, a has just come back"
    assert window.evicted == (e,)
    assert window.tokens + 3 <= window.budget


def test_a_look_back_is_all_or_nothing(looking: Window) -> None:
    a, b, c, *_ = looking.evicted
    (f,) = looking.ids
    looking.pin(f)
    state = looking.snapshot()
    with pytest.raises(BudgetExceeded, match="tokens, got 61") as caught:
        looking.look_back(f"{a} {b} {c}", reserve_tokens=47)  # 2 + 3 * 4 + 47
    assert (caught.value.needed, caught.value.budget) == (61, 60)
    assert looking.snapshot() == state
    looking.retrieval = Given([a, "nope"])
    with pytest.raises(UnknownChunk, match="must be a placed or evicted chunk, got 'nope'"):
        looking.look_back("q")
    looking.retrieval = Given([a, f])
    with pytest.raises(UnknownChunk, match="placed already"):
        looking.look_back("q")
    assert looking.snapshot() == state
    looking.check()
    looking.retrieval = Given([a, b, a])
    assert looking.look_back("q", reserve_tokens=46) == [a, b]
    assert looking.ids == (f, a, b)
    assert ById().choose(looking, a) == []
