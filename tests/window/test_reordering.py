"""What a plan says of a reorder, held against asks that take either way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from window.fake import FakeEngine


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_both_ways_compute_what_the_plan_says(sizes: list[int], data: st.DataObject) -> None:
    engine, query = FakeEngine(), FakeEngine().encode_query("q").tokens
    budget = sum(sizes) + 2 * query + 5 + data.draw(st.integers(0, 20))
    with Window(engine, "hd", budget, fidelity=Fidelity("exact")) as window:
        window.extend([Chunk.text(chr(97 + i) * size) for i, size in enumerate(sizes)])
        window.ask("q", 1)
        assert window.plan().reorder is None
        before, order = window.fork(), data.draw(st.permutations(window.ids))
        if data.draw(st.booleans()):
            added = Chunk.text("new")
            order.append(window.append(added))
            before.append(added)
        window.reorder(order)
        places_before = {placement: i for i, placement in enumerate(before.ids)}
        advice, places = window.plan().reorder, [places_before[p] for p in order if p in places_before]
        assert (advice is None) == (places == sorted(places))
        if advice is None:
            return
        assert window.ask("q", 1).usage.computed_tokens == query + advice.repair
        copies = [window.chunk(placement) for placement in advice.copied]
        fits = before.tokens + sum(engine.encode(copy).tokens for copy in copies) <= budget
        assert advice.cheaper == ("copy" if fits and advice.copy < advice.repair else "repair")
        before.extend(copies)
        if before.tokens + query < budget:
            assert before.ask("q", 1).usage.computed_tokens == query + advice.copy
        last = {before.chunk(placement).id: i for i, placement in enumerate(before.ids)}
        wanted = [window.chunk(placement).id for placement in order if placement in places_before]
        assert wanted == sorted(wanted, key=lambda chunk: last[chunk]), "each stands last where the new order has it"
        assert window.plan().reorder is None


def test_a_prepared_reorder_needs_no_advice() -> None:
    with Window(FakeEngine(), "hd", 60, fidelity=Fidelity("patched", rank=4, orbit=True)) as window:
        a, b, c = window.extend([Chunk.text(text * 4) for text in "abc"])
        window.ask("q", 1)
        window.maintenance.prepare_orbit([a, b, c])
        window.reorder([b, c, a])
        plan = window.plan()
        assert (plan.computed_tokens, plan.reorder) == (0, None)
        window.reorder([c, a, b])
        window.append(Chunk.text("d"))
        assert "copies" not in str(window.plan())
