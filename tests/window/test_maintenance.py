"""Work on a window besides its edits and questions: compression, orbit patches, re-forming and computing ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.segments import Segment
from ctxwin.kv.patch import apply_patch
from ctxwin.window.lanes import canonical_key
from window.fake import KV, FakeEngine
from window.test_window import fresh, lanes


def test_compress_serves_patches_and_gives_bytes_back(engine: FakeEngine, window: Window) -> None:
    long = window.append(Chunk.text("l" * 30))
    window.ask("q")
    span = window.snapshot().placed[-1].kv.span  # type: ignore[union-attr]
    assert window.maintenance.compress() > 0
    assert lanes(window)[-1] == "patched"
    assert not window.chunks[-1].exact
    assert not engine.repo.contains(span)
    usage = window.ask("q").usage
    assert usage.computed_tokens == 3
    assert usage.reused_tokens["patched"] >= 30
    assert window.maintenance.refresh() and window.plan().exact
    assert window.ids[-1] == long
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


def test_an_orbit_patch_serves_every_order_of_its_set(engine: FakeEngine) -> None:
    window = Window(
        engine, "hd", fidelity=Fidelity("patched", rank=4, orbit=True, advanced={"forbid": ("resident", "survivor")})
    )
    a, b, c = window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cccccccccccc")])
    assert window.maintenance.prepare_orbit([a, b]) == [c]
    for order in ([a, b, c], [b, a, c]):
        window.reorder(order)
        assert lanes(window)[-1] == "orbit"
        assert not window.ask("q").usage.exact
        assert lanes(window)[-1] == "orbit", "asking does not change the lane"
    with pytest.raises(ValueError, match="first placed chunks"):
        window.maintenance.prepare_orbit([c])
    with pytest.raises(ValueError, match="leave a chunk behind"):
        window.maintenance.prepare_orbit([a, b, c])


def test_an_orbit_patch_holds_what_its_chunk_absorbed(engine: FakeEngine) -> None:
    """At full rank the canonical with the patch is the mean of what forwards behind the others in either order give."""
    window = Window(engine, "hd", fidelity=Fidelity("patched", rank=64, orbit=True))
    a, b, c = window.extend([Chunk.text("aa"), Chunk.text("bb"), Chunk.text("cccccccccccc")])
    window.maintenance.prepare_orbit([a, b], orders=2)
    [key] = engine.store.list("orbit/")
    patch = engine.repo.get_patch(key)
    canonical, _ = engine.repo.get_span(canonical_key(window.snapshot(), window.chunk(c).id)[1])
    whole = []
    for order in ((a, b), (b, a)):
        front, at = [Segment(engine.encode_system_prompt("hd"), 0)], engine.encode_system_prompt("hd").advance
        for placement in order:
            encoded = engine.encode(window.chunk(placement))
            front.append(Segment(encoded, at, span=engine.prefill(front, encoded, at)))
            at += encoded.advance
        whole.append(engine.prefill(front, engine.encode(window.chunk(c)), at))
    served = apply_patch(canonical, patch, KV, at)
    assert (whole[0].v - canonical.v).abs().max() > 0.01
    torch.testing.assert_close(served.v, (whole[0].v + whole[1].v) / 2, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(served.k, (whole[0].k + whole[1].k) / 2, atol=1e-3, rtol=1e-3)


def test_refresh_bounds_the_drift(engine: FakeEngine, window: Window) -> None:
    for i in range(6):
        window.append(Chunk.text(f"n{i}"))
        window.slide(1)
        window.ask("q")
    depths = [e.depth for e in window.chunks]
    assert max(depths) > 2
    approximate = [e.id for e in window.chunks if not e.exact]
    for left in range(len(approximate), 0, -1):
        # One a time, front to back: each becomes exact, because everything in front of it is.
        assert window.maintenance.refresh(1) == [approximate[-left]]
        assert sum(not e.exact for e in window.chunks) == left - 1
    window.maintenance.refresh()
    assert window.plan().exact
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)


@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_what_was_prefilled_is_not_computed_by_the_answer(mode: Any) -> None:
    asked, ahead = (Window(FakeEngine(), "hd", fidelity=Fidelity(mode)) for _ in range(2))
    for i in range(6):
        for window in (asked, ahead):
            placed = window.append(Chunk.text(f"n{i}"))
            if i > 2:
                window.slide(1)
        version, due = ahead.version, [e.id for e in ahead.chunks if e.compute]
        assert ahead.maintenance.prefill() == due and due[-1] == placed
        assert ahead.version == version and ahead.maintenance.prefill() == []
        answers = [window.ask("q", max_tokens=3) for window in (asked, ahead)]
        assert answers[0].token_ids == answers[1].token_ids
        query = answers[1].usage.prompt_tokens - ahead.tokens
        assert answers[1].usage.computed_tokens == query < answers[0].usage.computed_tokens
        assert [e.lane for e in ahead.chunks] == [e.lane for e in asked.chunks]
        ahead.check()


def test_prefill_ends_where_the_store_takes_nothing(engine: FakeEngine) -> None:
    engine.repo.put_span = lambda *_: False  # type: ignore[assignment,method-assign]
    window = Window(engine, "hd", fidelity=Fidelity("patched"))
    window.extend([Chunk.text(text) for text in "abc"])
    assert window.maintenance.prefill() == list(window.ids)
    assert list(window.ask("q", max_tokens=3).token_ids) == fresh(engine, window)
