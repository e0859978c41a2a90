"""A snapshot may come from anybody: what it says of KV is proven by keys and records, or not used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from twins import twins
from window.fake import FakeEngine

TEXTS = ("aa", "bb", "cc", "dd")


def window_of(engine: FakeEngine, texts: tuple[str, ...], mode: Any = "exact") -> Window:
    window = Window(engine, "h", fidelity=Fidelity(mode, rank=2))
    window.extend([Chunk.text(text) for text in texts])
    return window


def told(engine: FakeEngine, texts: tuple[str, ...], mode: Any = "exact") -> dict[str, Any]:
    window = window_of(engine, texts, mode)
    window.ask("q")
    made: dict[str, Any] = json.loads(window.snapshot().model_dump_json())
    return made


def truth(texts: tuple[str, ...]) -> tuple[int, ...]:
    return window_of(FakeEngine(), texts).ask("q", max_tokens=3).token_ids


def right(engine: FakeEngine, texts: tuple[str, ...]) -> bool:
    """Whether a bystander's exact window over the same store answers like one that computes everything."""
    return window_of(engine, texts).ask("q", max_tokens=3).token_ids == truth(texts)


@pytest.mark.parametrize("mode", ["exact", "patched"])
def test_kv_of_another_place_is_not_taken_for_exact(mode: Any) -> None:
    engine = FakeEngine()
    foreign = told(engine, ("xx", "bb"))["placed"][1]["kv"]
    forged = told(engine, ("aa", "bb"))
    mine = forged["placed"][1]["kv"]
    forged["placed"][1]["kv"] = {**foreign, "provenance": mine["provenance"], "antecedents": mine["antecedents"]}
    engine.repo.delete(mine["span"])
    forged["fidelity"]["mode"] = mode
    with Window.restore(engine, forged) as window:
        window.append(Chunk.text("cc"))
        answer = window.ask("q", max_tokens=3)
        assert not answer.usage.exact or answer.token_ids == truth(("aa", "bb", "cc"))
    assert right(engine, ("aa", "bb")) and right(engine, ("aa", "bb", "cc"))


def check_no_forgery(data: st.DataObject) -> None:
    """Fields of KV are exchanged between snapshots at random; exact windows over the same store stay right."""
    engine = FakeEngine()
    orders = [("aa", "bb", "cc"), ("xx", "bb", "cc"), ("cc", "bb"), ("bb", "aa", "xx", "cc")]
    pool = [p["kv"] for order in orders for p in told(engine, order, "patched")["placed"]]
    texts = data.draw(st.permutations(TEXTS))[: data.draw(st.integers(1, 4))]
    forged = json.loads(window_of(engine, tuple(texts), "patched").snapshot().model_dump_json())
    ids = [p["id"] for p in forged["placed"]]
    for i, placed in enumerate(forged["placed"]):
        if data.draw(st.booleans()):
            kv = dict(data.draw(st.sampled_from(pool)))
            kv |= {k: v for k, v in data.draw(st.sampled_from(pool)).items() if data.draw(st.booleans())}
            kv["antecedents"] = ids[:i] if data.draw(st.booleans()) else []
            kv |= {"exact": data.draw(st.booleans()), "depth": data.draw(st.integers(0, 2))}
            placed |= {"kv": kv, "seen": True}
    forged["fidelity"]["mode"] = data.draw(st.sampled_from(["exact", "patched"]))
    with Window.restore(engine, forged) as window:
        answer = window.ask("q", max_tokens=3)
        window.check()
        if answer.usage.exact:
            assert answer.token_ids == truth(tuple(texts))
        window.append(Chunk.text("ee"))
        window.ask("q")
        if window.maintenance.compress():
            window.ask("q")
    for n in range(1, len(texts) + 1):
        assert right(engine, tuple(texts[:n])) and right(engine, (*texts[:n], "ee"))


test_no_forgery_reaches_a_bystander, test_no_forgery_of_many_reaches_a_bystander = twins(
    check_no_forgery, 25, 150, data=st.data()
)


def test_a_record_of_another_chunk_is_a_miss(engine: FakeEngine) -> None:
    """Pictures of one size have the same token ids; what a record was made of is compared as well."""
    import numpy as np

    window = Window(engine, "h", fidelity=Fidelity("exact"))
    a = Chunk.image(np.full((4, 4, 3), 1, np.uint8))
    window.append(a)
    window.ask("q")
    [placed] = window.snapshot().placed
    assert placed.kv is not None
    span, said = engine.repo.get_span(placed.kv.span) or pytest.fail("it was stored")
    expected = window.ask("q", max_tokens=3).token_ids
    engine.repo.delete(placed.kv.span)
    engine.repo.put_span(placed.kv.span, span, {**said, "chunk": "0" * 64})
    answer = window.ask("q", max_tokens=3)
    assert answer.usage.misses == 1 and answer.token_ids == expected


@pytest.mark.parametrize("field", ["tokens", "advance"])
def test_counts_are_compared(engine: FakeEngine, field: str) -> None:
    forged = told(engine, ("aa", "bb"))
    forged["placed"][0][field] = 7
    with (
        Window.restore(engine, forged) as window,
        pytest.raises(ValueError, match="must have 2 tokens over 2 positions"),
    ):
        window.ask("q")
    forged["placed"][0][field] = 0
    with pytest.raises(ValueError, match="at least one token"):
        Window.restore(engine, forged)


def test_what_follows_from_content_is_derived(engine: FakeEngine) -> None:
    forged = told(engine, ("aa", "bb"))
    forged |= {"system_prompt_tokens": 1, "system_prompt_advance": 50}
    forged["placed"][0]["chunk_id"] = "0" * 64
    with Window.restore(engine, forged) as window:
        window.check()
        assert window.tokens == 2 + 4 and window.plan().computed_tokens == 0
    for wrong in ({"arrivals": 1}, {"version": -1}, {"placed": [forged["placed"][0]] * 2}):
        with pytest.raises(ValueError, match="a snapshot must"):
            Window.restore(engine, {**forged, **wrong})


@pytest.mark.parametrize("key", ["span/../../etc/passwd", "embed/" + "0" * 64, ""])
def test_keys_of_another_kind_are_not_looked_up(engine: FakeEngine, key: str) -> None:
    forged = told(engine, ("aa", "bb"), "patched")
    forged["placed"][1]["kv"]["span"] = key
    with Window.restore(engine, forged) as window:
        assert window.ask("q", max_tokens=3).token_ids == truth(("aa", "bb"))
