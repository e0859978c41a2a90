"""Lanes by cost: which admissible way is taken at which prices, and what no price can buy."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis.vendor.pretty import pretty

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.cost import CostModel, Fit
from ctxwin.store.memory import MemoryStore
from ctxwin.store.tiered import TieredStore
from ctxwin.window.lanes import choose
from ctxwin.window.prices import Prices
from store.wrappers import WrapperStore
from window.fake import FakeEngine

pytestmark = pytest.mark.learns_prices

PATCHED = Fidelity("patched", rank=2)


def priced(*, token_ms: float, read_ms: float, request_ms: float = 1.0) -> Prices:
    """Forwards cost ``token_ms`` a token, reads from the store ``read_ms``."""
    model = CostModel(engine=Fit((request_ms, token_ms, 0, 0, 0, 0)))
    model.tiers = {"MemoryStore": Fit((read_ms, 0))}
    return Prices(model)


def lanes_of(window: Window, prices: Prices) -> list[str]:
    return [c.lane for c in choose(window.snapshot(), window.fidelity, window.core.assembly.has, prices)]


CHEAP_READS = priced(token_ms=2.0, read_ms=0.1)
DEAR_READS = priced(token_ms=2.0, read_ms=500.0)


def test_a_slow_store_loses_to_a_forward_and_stays_exact(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=Fidelity("exact")) as window:
        window.extend([Chunk.text("a" * 20), Chunk.text("b" * 20)])
        window.ask("q")
        assert lanes_of(window, CHEAP_READS) == ["resident", "resident"]
        made = choose(window.snapshot(), window.fidelity, window.core.assembly.has, DEAR_READS)
        assert [c.lane for c in made] == ["computed", "computed"] and all(c.conditioning.exact for c in made)
        assert {c.conditioning.span for c in made} == {p.kv.span for p in window.snapshot().placed if p.kv}


def test_an_approximation_gives_way_to_a_cheaper_forward(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=PATCHED) as window:
        a, _b, _c = window.extend([Chunk.text(t * 20) for t in "abc"])
        window.ask("q")
        window.evict(a)
        assert lanes_of(window, CHEAP_READS) == ["survivor", "survivor"]
        made = choose(window.snapshot(), window.fidelity, window.core.assembly.has, DEAR_READS)
        assert [c.lane for c in made] == ["formed", "formed"] and all(c.conditioning.exact for c in made)


def test_exact_kv_is_not_given_up_for_an_approximation_at_any_price(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=PATCHED) as window:
        a, _b = window.extend([Chunk.text(t * 20) for t in "ab"])
        window.ask("q")
        window.evict(a)
        window.ask("q")
        window.recall(a, at=0)  # b is held exactly behind a, and would survive as well
        slow = Prices(DEAR_READS.model, lambda key: "MemoryStore")
        made = choose(window.snapshot(), window.fidelity, window.core.assembly.has, slow)
        assert all(c.conditioning.exact for c in made)


def test_small_savings_change_nothing(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=PATCHED) as window:
        a, _b = window.extend([Chunk.text(t * 20) for t in "ab"])
        window.ask("q")
        window.evict(a)
        for read_ms in (40.0, 44.0, 50.0):  # a forward takes 40, and a quarter must be saved
            assert lanes_of(window, priced(token_ms=2.0, read_ms=read_ms)) == ["survivor"]
        assert lanes_of(window, priced(token_ms=2.0, read_ms=60.0)) == ["formed"]
        assert lanes_of(window, priced(token_ms=0.01, read_ms=4.0)) == ["survivor"], "less than five milliseconds"


def test_a_forward_between_held_chunks_pays_for_its_request(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=PATCHED) as window:
        a, _b, _c = window.extend([Chunk.text(t * 20) for t in "abc"])
        window.ask("q")
        window.evict(a)
        # b stands in front of c: a request of its own; c is the last, and the query's forward takes it along.
        assert lanes_of(window, priced(token_ms=2.0, read_ms=100.0, request_ms=200.0)) == ["survivor", "formed"]


class Slow(WrapperStore):
    """A store at the far end of a slow line."""

    delay = 0.0

    def get(self, key: str) -> bytes | None:
        time.sleep(self.delay * key.startswith("span/"))
        return super().get(key)

    def tier(self, key: str) -> str:
        return "far"


def test_a_window_learns_that_its_store_is_slow_and_its_plan_says_what_the_ask_does() -> None:
    far = Slow(MemoryStore())
    engine = FakeEngine(TieredStore([far]))
    engine.repo._live.max_bytes = 0
    with Window(engine, "h", fidelity=Fidelity("exact")) as window:
        window.extend([Chunk.text(t * 4) for t in "abcd"])
        for _ in range(50):  # the first calls of a process take longer than others, whatever they do
            before = window.ask("q")
            if before.usage.reused_tokens == {"resident": window.tokens}:
                break
        else:
            pytest.fail("what is stored was never read")
        far.delay = 0.2
        reused: list[int] = []
        for _ in range(40):
            if reused and max(reused) > 10 > reused[-1]:
                break
            plan = window.plan()
            answer = window.ask("q")
            assert answer.text == before.text and answer.usage.reused_tokens == plan.tokens_by_lane
            assert answer.usage.computed_tokens == plan.computed_tokens + engine.encode_query("q").tokens
            reused.append(answer.usage.reused_tokens.get("resident", 0))
        assert max(reused) > 10 > reused[-1], "reads of 200 ms are dearer than forwards of 4 tokens"


def test_the_plan_prices_chunks_and_the_ask(engine: FakeEngine) -> None:
    with Window(engine, "h", fidelity=PATCHED) as window:
        window.extend([Chunk.text(t * 20) for t in "ab"])
        engine.costs.engine = Fit((3.0, 2.0, 0, 0, 0, 0))
        engine.costs.library = Fit((1.0, 0.5))
        plan = window.plan()
        assert [e.ms for e in plan.entries] == pytest.approx([40.0, 40.0])
        assert plan.ms == pytest.approx(3.0 + 1.0 + 2 * 0.5 + 80.0 + 2.0 * plan.system_prompt_tokens)
        assert "ms" in str(plan) and pretty(plan) == str(plan), "a notebook shows the table, too"


def test_prices_go_over_http() -> None:
    from ctxwin.window import serialization

    with Window(FakeEngine(), "h") as window:
        window.append(Chunk.text("aa"))
        plan = window.plan()
        sent: dict[str, Any] = serialization.plan_to(plan)
        assert sent["ms"] == plan.ms > 0 and sent["entries"][0]["ms"] == plan.entries[0].ms > 0
        assert serialization.plan_from(sent).ms == plan.ms


def test_forgetting_repairing_and_refreshing_forget_how_things_were_served(engine: FakeEngine) -> None:
    def moved() -> tuple[Window, list[str]]:
        window = Window(engine, "h", fidelity=PATCHED)
        ids = window.extend([Chunk.text(t * 3) for t in "zabc"])
        window.ask("q")
        window.evict(ids[0])
        window.ask("q")
        assert window.core.assembly.memo.memos
        return window, ids

    window, ids = moved()
    window.recall(ids[0], repair=True)
    assert not window.core.assembly.memo.memos
    window.close()
    window, ids = moved()
    window.evict(ids[1], forget=True)
    assert not window.core.assembly.memo.memos
    window.close()
    window, ids = moved()
    assert window.maintenance.refresh() and not window.core.assembly.memo.memos
    window.close()
