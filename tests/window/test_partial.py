"""Linked chunks: all text and the first tokens of each picture in context, the rest canonical (MPIC)."""

from __future__ import annotations

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Library, Window
from window.fake import FakeEngine

LINKED = Fidelity("patched", recompute=2, advanced={"forbid": ("survivor", "patched")})


def clip(seed: int, frames: int = 6, text: str = "abc") -> Chunk:
    """In the fake engine a token a frame, in front of which four of text stand."""
    rng = np.random.default_rng(seed)
    return Chunk.video([rng.integers(0, 255, (28, 28, 3), dtype=np.uint8) for _ in range(frames)], text=text)


def lanes(window: Window) -> list[str]:
    return [e.lane for e in window.chunks]


def library_of(engine: FakeEngine, *chunks: Chunk) -> Library:
    library = Library(engine.store, "shelf")
    for i, chunk in enumerate(chunks):
        library.add(chunk, f"file-{i}")
    library.prepare(engine)
    return library


def test_files_of_a_library_are_linked_in_any_order(engine: FakeEngine) -> None:
    chunks = [clip(i) for i in range(4)]
    library_of(engine, *chunks)
    window = Window(engine, "header", fidelity=LINKED)
    window.extend(chunks[::-1])
    plan = window.plan()
    assert [e.lane for e in plan.entries] == ["partial"] * 4 and not plan.exact
    assert [e.compute for e in plan.entries] == [6] * 4, "the text, and two of six frames"
    header = engine.encode_system_prompt("header").tokens
    assert [(step.purpose, step.computed) for step in plan.steps] == [
        ("chunks", header + 6), ("chunks", 3 * 6), ("answer", 0)
    ], "what touches the new system prompt, then all other gaps at once"  # fmt: skip
    answer = window.ask("q")
    assert answer.usage.computed_tokens == plan.computed_tokens + 3
    assert answer.usage.reused_tokens["partial"] == 40
    assert lanes(window) == ["resident"] * 4
    again = window.ask("q")
    assert again.usage.computed_tokens == 3 and again.token_ids == answer.token_ids and not again.usage.exact
    window.reorder([e.id for e in window.chunks[::-1]])
    assert [e.lane for e in window.plan().entries] == ["partial"] * 4


def test_the_plan_says_what_repairing_takes_behind_its_ask(engine: FakeEngine) -> None:
    chunks = [clip(i) for i in range(2)]
    library_of(engine, *chunks)
    window = Window(engine, "header", fidelity=LINKED)
    window.extend([*chunks, Chunk.text("new")])
    assert [e.lane for e in window.plan().entries] == ["partial", "partial", "computed"]
    expected = window.plan().repair_tokens
    window.ask("q")
    assert window.plan().repair_tokens == expected == 2 * 10 + 3
    before = engine.counters.prefill_tokens
    window.maintenance.refresh()
    assert engine.counters.prefill_tokens - before == expected and window.plan().exact


def test_what_is_linked_is_what_the_rule_says(engine: FakeEngine) -> None:
    """The KV of each token: in context for text and the head of a picture, the canonical for the rest."""
    from ctxwin.kv.relocate import relocate
    from window.fake import KV

    chunks = [clip(i) for i in range(2)]
    library_of(engine, *chunks)
    window = Window(engine, "header", fidelity=LINKED)
    window.extend(chunks)
    window.ask("q")
    exact = Window(engine, "header", fidelity=Fidelity("exact"))
    exact.extend(chunks)
    exact.ask("q")
    got, want = ([engine.repo.get_span(p.kv.span)[0] for p in w.snapshot().placed] for w in (window, exact))  # type: ignore
    clean = [engine.repo.get_span(key)[0] for key in neutral_keys(window)]  # type: ignore[index]
    media = window.snapshot().placed[0].media
    assert media == ((4, 6),)
    for mine, alone in zip(got, clean, strict=True):
        assert (mine.v[:, 6:] == relocate(alone, KV, mine.start).v[:, 6:]).all()
    assert abs(got[0].v[:, :6] - want[0].v[:, :6]).max() < 1e-6
    assert abs(got[0].v[:, 6:] - want[0].v[:, 6:]).max() > 1e-3


def neutral_keys(window: Window) -> list[str]:
    from ctxwin.window.lanes import neutral_key

    state = window.snapshot()
    return [neutral_key(state, p.chunk_id) for p in state.placed]


def test_exact_kv_goes_first_and_text_is_computed(engine: FakeEngine) -> None:
    chunks = [clip(0), Chunk.text("some text"), clip(1)]
    library_of(engine, *chunks)
    exact = Window(engine, "header", fidelity=Fidelity("exact"))
    exact.extend(chunks[:1])
    exact.ask("q")
    window = Window(engine, "header", fidelity=LINKED)
    window.extend(chunks)
    assert [e.lane for e in window.plan().entries] == ["resident", "computed", "partial"]
    assert [e.exact for e in window.plan().entries] == [True, True, False]


def test_idle_work_makes_what_is_computed_again_linkable(engine: FakeEngine) -> None:
    window = Window(engine, "header", fidelity=LINKED)
    ids = window.extend([clip(i) for i in range(3)])
    window.ask("q")
    assert window.maintenance.compress(if_short=True) == 0
    window.reorder(ids[::-1])
    assert window.ask("q").usage.reused_tokens["formed"] == 20, "the first of them has its canonical"
    window.maintenance.compress(if_short=True)
    window.reorder([ids[1], ids[2], ids[0]])
    assert "partial" in [e.lane for e in window.plan().entries]
    assert window.ask("q").usage.computed_tokens < 3 * 10


def test_a_lost_canonical_is_computed(engine: FakeEngine) -> None:
    chunks = [clip(i) for i in range(2)]
    library_of(engine, *chunks)
    window = Window(engine, "header", fidelity=LINKED)
    window.extend(chunks)
    for key in neutral_keys(window):
        engine.repo.delete(key)
    answer = window.ask("q")
    assert answer.usage.exact and answer.usage.computed_tokens >= 20


def test_a_count_that_is_none(engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match="recompute"):
        Fidelity("patched", recompute=-1)
    assert not Fidelity("blind", recompute=3).allows("partial") and not Fidelity("patched").allows("partial")
