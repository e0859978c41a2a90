"""The merged tier: chunks in fewer slots, per chunk, at any share, and back."""

from __future__ import annotations

import numpy as np
import pytest

from ctxwin import Chunk, Fidelity, Window, open_store
from ctxwin.engines.sampling import Sampling
from ctxwin.errors import UnknownChunk, UnsupportedModel
from ctxwin.window.serialization import plan_from, plan_to
from window.fake import KV, FakeEngine

MERGES = Fidelity("patched", merge=0.5, advanced={"forbid": ("patched",)})
TEXTS = ["abcdefgh", "ijklmnop", "qrstuvwx"]


def lanes(window: Window) -> list[str]:
    return [e.lane for e in window.chunks]


def opened(engine: FakeEngine, fidelity: Fidelity = MERGES) -> Window:
    window = Window(engine, "header", fidelity=fidelity)
    window.extend([Chunk.text(text) for text in TEXTS])
    window.ask("q")
    return window


def test_a_chunk_is_served_in_fewer_slots_and_comes_back_whole(engine: FakeEngine) -> None:
    window = opened(engine)
    middle, tokens = window.ids[1], engine.counters.prefill_tokens
    before = window.ask("q", logprobs=-1)
    assert window.maintenance.merge(middle) == 4
    assert engine.counters.prefill_tokens == tokens + 8 + 3, "one forward over the chunk"
    plan = window.plan()
    assert lanes(window) == ["resident", "merged", "resident"] and not plan.exact
    assert plan.entries[1].bytes * 2 == plan.entries[0].bytes and plan.computed_tokens == 0
    merged = window.ask("q", logprobs=-1)
    assert not merged.usage.exact and merged.usage.computed_tokens == 3
    assert merged.first_token_logprobs != before.first_token_logprobs
    window.check()
    assert window.maintenance.merge(middle, 1) == 8
    assert lanes(window)[1] == "formed", "its whole KV had gone"
    back = window.ask("q", logprobs=-1)
    assert back.usage.exact and back.first_token_logprobs == pytest.approx(before.first_token_logprobs)


def test_what_stands_behind_is_told_apart_by_what_it_saw(engine: FakeEngine) -> None:
    window = opened(engine)
    window.maintenance.merge(window.ids[0])
    window.append(Chunk.text("new"))
    answer = window.ask("q")
    assert answer.usage.computed_tokens == 6 and [e.exact for e in window.chunks] == [False, True, True, False]
    exact = Window(engine, "header", fidelity=Fidelity("exact"))
    exact.extend([Chunk.text(text) for text in (*TEXTS, "new")])
    assert exact.ask("q").usage.computed_tokens == 8 + 3 + 3, "the merged one anew, and what was computed behind it"


def test_whole_kv_that_another_window_holds_is_served(engine: FakeEngine) -> None:
    """Exact KV that is held is never given up for an approximation."""
    window, other = opened(engine), opened(engine)
    window.maintenance.merge(window.ids[1])
    assert lanes(window)[1] == "resident" and other.ask("q").usage.exact
    other.evict(other.ids[1], forget=True)


def test_an_evicted_chunk_comes_back_merged(engine: FakeEngine) -> None:
    window = opened(engine)
    gone = window.ids[0]
    window.evict(gone)
    held = len(engine.store.get(next(k for k in engine.store.list() if k.startswith("span/"))) or b"")
    assert held and window.maintenance.merge(gone, 0.25) == 2
    window.recall(gone)
    assert lanes(window) == ["merged", "resident", "resident"]
    assert window.ask("q").usage.reused_tokens["merged"] == 8


def test_a_merged_survivor_moves(engine: FakeEngine) -> None:
    window = opened(engine)
    window.maintenance.merge(window.ids[1])
    window.slide(1)
    assert lanes(window) == ["merged", "survivor"], "a merged chunk is planned as one, whatever left in front of it"
    plan = window.plan()
    assert plan.entries[0].bytes * 2 == plan.entries[1].bytes and window.ask("q").usage.computed_tokens == 3


def test_another_share_takes_the_chunk_anew(engine: FakeEngine) -> None:
    window = opened(engine)
    assert window.maintenance.merge(window.ids[2], 0.75) == 6 and window.maintenance.merge(window.ids[2], 0.25) == 2
    assert lanes(window)[2] == "merged" and window.plan().entries[2].bytes * 4 == window.plan().entries[0].bytes


def test_bytes_that_are_short_merge_what_has_left() -> None:
    """The cold tier: an evicted chunk that may come back keeps its place in half the bytes."""
    engine = FakeEngine(open_store("memory:", max_bytes=60_000))
    window = Window(engine, "header", fidelity=MERGES)
    ids = [window.append(Chunk.text(text * 12)) for text in TEXTS]
    window.ask("q")
    window.evict(ids[2])
    kept = window.snapshot().evicted[0].kv
    window.append(Chunk.text("more than fits" * 50))
    assert kept is not None and engine.repo.contains(kept.span) and 900 * KV.token_bytes > 0.75 * 60_000
    window.maintenance.compress(if_short=True)
    now = window.snapshot().evicted[0].kv
    assert now is not None and now.slots == 48 and not engine.repo.contains(kept.span)


def test_a_merged_chunk_survives_a_restart_and_a_loss(engine: FakeEngine) -> None:
    window = opened(engine)
    window.maintenance.merge(window.ids[1])
    answer, said = window.ask("q", logprobs=-1), window.snapshot().model_dump_json()
    window.close()
    again = Window.restore(engine, said)
    assert lanes(again)[1] == "merged"
    assert again.ask("q", logprobs=-1).first_token_logprobs == answer.first_token_logprobs
    key = again.snapshot().placed[1].kv
    assert key is not None
    again.engine.repo.delete(key.span)
    assert lanes(again)[1] == "formed" and again.ask("q").usage.exact


def test_forgetting_takes_merged_kv_along(engine: FakeEngine) -> None:
    window = opened(engine)
    first = window.ids[0]
    window.maintenance.merge(window.ids[1])
    merged = window.snapshot().placed[1].kv
    window.evict(first, forget=True)
    assert merged is not None and not engine.repo.contains(merged.span)
    assert window.ask("q").usage.exact


def test_fidelities_that_do_not_allow_it(engine: FakeEngine) -> None:
    window = opened(engine, Fidelity("patched"))
    with pytest.raises(ValueError, match=r"must allow merged KV, got 'patched' without merge"):
        window.maintenance.merge(window.ids[0])
    with pytest.raises(ValueError, match="merge"):
        Fidelity("patched", merge=1.0)
    assert not Fidelity("exact", merge=0.5).allows("merged")
    window = opened(engine)
    for share in (0, 1.5, True, "half"):
        with pytest.raises(ValueError, match="share must be a number"):
            window.maintenance.merge(window.ids[0], share)  # type: ignore[arg-type]
    with pytest.raises(UnknownChunk):
        window.maintenance.merge("nobody")
    window.toggle(window.ids[0], conditioned=False)
    with pytest.raises(ValueError, match="toggle it back"):
        window.maintenance.merge(window.ids[0])


def test_answers_over_merged_chunks_may_drop_tokens(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[float, int, bool]] = []
    plain = engine.generate

    def generate(layout: object, query: object, sampling: Sampling, **options: object) -> object:
        held.append((sampling.hold, sampling.hold_every, sampling.merge_prompt))
        return plain(layout, query, sampling, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "generate", generate)
    window = opened(engine, MERGES.with_advanced(eliminate=True))
    window.maintenance.merge(window.ids[0])
    window.ask("q")
    window.ask("q", remember=True)
    whole = (1.0, 1, False)
    assert held == [whole, (0.5, 1, False), whole], "nothing is merged; something is; what is remembered is whole"
    window = opened(engine, MERGES.with_advanced(eliminate=16, merge_prompt=True))
    held.clear()
    plan = plan_from(plan_to(window.plan()))
    assert not plan.exact and not window.ask("q").usage.exact and window.chunks[0].exact
    window.ask("q", remember=True)
    assert held == [(0.5, 16, True), whole]
    window.toggle(window.ids[0], conditioned=False)
    plan, answer = window.plan("q"), window.ask("q")
    assert plan.exact == answer.usage.exact
    assert held.pop() != (0.5, 16, True) and answer.usage.reused_tokens["canonical"] == 8, (
        "in place it would see others"
    )
    assert plan.computed_tokens == answer.usage.computed_tokens < window.tokens
    window.toggle(window.ids[0], conditioned=True)
    assert window.ask("q", max_tokens=7).text and opened(engine, MERGES.with_advanced(merge_prompt=True)).ask(
        "q", max_tokens=7
    )
    assert held[-1] == (0.5, 7, True), "never eliminated"
    with pytest.raises(ValueError, match="audit must be 0"):
        opened(engine, MERGES.model_copy(update={"audit": 0.5}).with_advanced(merge_prompt=True))


def test_an_engine_that_hides_its_attention(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxwin.engines.base import Engine

    window = opened(engine)
    monkeypatch.setattr(FakeEngine, "attended", Engine.attended)
    with pytest.raises(UnsupportedModel, match="does not expose its attention"):
        window.maintenance.merge(window.ids[0])
    assert lanes(window) == ["resident"] * 3


def test_short_chunks_stay_whole(engine: FakeEngine) -> None:
    window = Window(engine, "header", fidelity=MERGES)
    pixels = np.zeros((28, 28, 3), np.uint8)
    ids = window.extend([Chunk.text("ab"), Chunk.image(pixels)])
    window.ask("q")
    assert [window.maintenance.merge(i) for i in ids] == [2, 1] and lanes(window) == ["resident"] * 2
