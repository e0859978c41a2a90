"""`AsyncWindow` does what `Window` does, off the event loop: one suite for both, then what only async code can do."""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import threading
import typing
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import AsyncWindow, Chunk, Fidelity, Window
from ctxwin.errors import AnswerStopped, ReadOnlyWindow
from ctxwin.policies import OldestFirst
from ctxwin.window.answer import Answer
from ctxwin.window.ask import Question
from ctxwin.window.async_window import AsyncMaintenance, Attribute
from ctxwin.window.core import open_windows
from ctxwin.window.events import Event
from ctxwin.window.maintenance import Maintenance
from window.fake import FakeEngine
from window.guarded import GuardedEngine

ELSEWHERE = {
    "aask",
    "astream",
    "over",
}  # awaited they are `ask` and `stream`; `opening` takes a window instead of a core
OPEN = {"at", "fork", "restore"}  # return a window, which is awaited or entered
OWN = {"window", "opening", "run", "retrieval"}


def public(kind: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers_static(kind) if not name.startswith("_")}


def parameters(member: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(getattr(member, "__func__", member)).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


@pytest.mark.parametrize("kinds", [(Window, AsyncWindow), (Maintenance, AsyncMaintenance)])
def test_every_public_name_of_a_window_is_there_with_its_signature(kinds: tuple[type, type]) -> None:
    plain, awaited = map(public, kinds)
    assert set(plain) - ELSEWHERE == set(awaited) - OWN
    assert parameters(kinds[0].__init__) == parameters(kinds[1].__init__) or kinds[0] is Maintenance
    for name in set(plain) - ELSEWHERE:
        member, other = plain[name], awaited[name]
        if isinstance(other, Attribute):
            (kind,) = typing.get_args(other.__orig_class__)  # type: ignore[attr-defined]
            assert kind == typing.get_type_hints(member.fget)["return"], name
        elif isinstance(member, property):
            assert inspect.iscoroutinefunction(other) if name == "chunks" else isinstance(other, property), name
        else:
            assert parameters(member) == parameters(other), name
            assert inspect.iscoroutinefunction(other) == (name not in {"stream", *OPEN}), name


# one suite for both


@dataclass
class Side:
    """A window of either class, whose methods are called alike."""

    window: Any
    events: list[tuple[Any, ...]] = field(default_factory=list)

    async def do(self, name: str, *args: Any, **options: Any) -> Any:
        target = self.window
        for part in name.split("."):
            target = getattr(target, part)
        result = target(*args, **options) if callable(target) else target
        return await result if inspect.isawaitable(result) else result

    def hear(self, event: Event) -> None:
        self.events.append((event.op, event.ids, event.version, event.state, event.note))

    def one(self, rng: random.Random, ids: str = "ids") -> str:
        return rng.choice(getattr(self.window, ids) or ("none",))


class Shelf:
    """A library of three texts."""

    name, version = "shelf", 0

    def view(self, version: int | None = None, /) -> Shelf:
        return self

    def find(self, query: Any, k: int, engine: Any) -> list[Chunk]:
        return [Chunk.text(text) for text in ("x", "y", "z")][:k]


def new(rng: random.Random) -> Chunk:
    text = rng.choice("abc") * rng.randint(1, 3)
    return Chunk.image(np.full((4, 4, 3), len(text), np.uint8), text=text) if rng.random() < 0.3 else Chunk.text(text)


def coin(rng: random.Random) -> bool:
    return rng.random() < 0.3


async def restore(side: Side) -> Any:
    return await side.do("restore", side.window.engine, await side.do("snapshot"), seed="again")


async def reorder(side: Side, rng: random.Random) -> Any:
    ids = list(side.window.ids)
    rng.shuffle(ids)
    return await side.do("reorder", ids)


async def adopt(side: Side, rng: random.Random) -> Any:
    branch = Side(await side.do("fork", rng.choice([None, "other"])))
    await branch.do("append", new(rng))
    if coin(rng):
        await side.do("append", Chunk.text("moved"))  # then it cannot be adopted
    try:
        return await side.do("adopt", branch.window, force=coin(rng))
    finally:
        await branch.do("close")


async def stream(side: Side, rng: random.Random) -> Any:
    made = side.window.stream("q", 3, remember=coin(rng))
    texts = [text async for text in made] if hasattr(made, "__anext__") else list(made)
    return "".join(texts), await comparable(made.answer)


async def answer(side: Side, rng: random.Random) -> Any:
    tokens: list[int] = []
    question = Question.of("what?", 3, n=rng.randint(1, 2), remember=coin(rng))
    made = await side.do("answer", question, on_token=lambda token, _: tokens.append(token) or len(tokens) < 2)
    return tokens, await comparable(made)


async def observe(side: Side, rng: random.Random) -> Any:
    end = await side.do("observe", side.hear)
    if coin(rng):
        end()
    return None


Step = Callable[[Side, random.Random], Awaitable[Any]]
STEPS: dict[str, Step] = {
    "append": lambda s, r: s.do("append", new(r)),
    "extend": lambda s, r: s.do("extend", [new(r) for _ in range(r.randint(0, 3))]),
    "insert": lambda s, r: s.do("insert", r.randint(-3, 3), new(r), lazy=coin(r)),
    "remember": lambda s, r: s.do("remember", "asked elsewhere", r.choice(["yes", "", [7, 8]])),
    "evict": lambda s, r: s.do("evict", s.one(r), forget=coin(r), lazy=coin(r)),
    "slide": lambda s, r: s.do("slide", r.choice([None, 1, 2]), reserve_tokens=r.randint(0, 60)),
    "recall": lambda s, r: s.do("recall", s.one(r, "evicted"), r.choice([None, 0, "cheapest"]), repair=coin(r)),
    "look_back": lambda s, r: s.do("look_back", f"what was in {s.one(r, 'evicted')}?", reserve_tokens=8),
    "retrieve": lambda s, r: s.do("retrieve", "q", Shelf(), r.randint(1, 3)),
    "reorder": reorder,
    "toggle": lambda s, r: s.do("toggle", s.one(r), conditioned=coin(r), lazy=coin(r)),
    "pin": lambda s, r: s.do("pin", s.one(r), pinned=not coin(r)),
    "undo": lambda s, r: s.do("undo"),
    "chunk": lambda s, r: s.do("chunk", s.one(r)),
    "chunks": lambda s, r: s.do("chunks"),
    "plan": lambda s, r: s.do("plan", r.choice([None, "q"])),
    "snapshot": lambda s, r: s.do("snapshot"),
    "check": lambda s, r: s.do("check"),
    "observe": observe,
    "at": lambda s, r: s.do("at", s.window.version - r.randint(0, 3)),
    "fork": lambda s, r: s.do("fork", r.choice([None, "another"])),
    "restore": lambda s, r: restore(s),
    "adopt": adopt,
    "ask": lambda s, r: s.do("ask", r.choice("qr"), 3, remember=coin(r), logprobs=r.choice([None, -1])),
    "stream": stream,
    "answer": answer,
    "disposable": lambda s, r: s.do("disposable", s.one(r), "q", 3, clean=coin(r)),
    "maintenance.check": lambda s, r: s.do("maintenance.check"),
    "maintenance.dependents": lambda s, r: s.do("maintenance.dependents", s.one(r)),
    "maintenance.touch": lambda s, r: s.do("maintenance.touch", s.one(r)),
    "maintenance.forget_beyond": lambda s, r: s.do("maintenance.forget_beyond", r.randint(0, 3)),
    "maintenance.prefill": lambda s, r: s.do("maintenance.prefill"),
    "maintenance.prepare_orbit": lambda s, r: s.do("maintenance.prepare_orbit", s.window.ids[:2], orders=2),
    "maintenance.apply_pending": lambda s, r: s.do("maintenance.apply_pending"),
    "maintenance.refresh": lambda s, r: s.do("maintenance.refresh", r.choice([None, 1])),
    "maintenance.compress": lambda s, r: s.do("maintenance.compress", if_short=coin(r)),
    "maintenance.merge": lambda s, r: s.do("maintenance.merge", s.one(r), r.choice([None, 0.5, 1])),
}


async def comparable(result: Any) -> Any:
    """A result without what two runs may differ in: times, and which class a window has."""
    if isinstance(result, Answer):
        others = tuple([await comparable(other) for other in result.others])
        return replace(result, usage=replace(result.usage, ttft_s=0.0, total_s=0.0), others=others)
    if isinstance(result, Window | AsyncWindow):
        made = Side(result)
        try:
            return await made.do("snapshot"), await made.do("plan"), result.parent
        finally:
            await made.do("close")
    return result


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await comparable(await call)
    except Exception as error:
        return type(error), str(error)


async def same_on_both(names: list[str], seed: int, mode: Any) -> None:
    """Run a program on both; every result, error, event and state must be the same."""
    fidelity = Fidelity(mode, **({"rank": 2, "merge": 0.5, "orbit": True} if mode == "patched" else {}))
    with FakeEngine() as plain, GuardedEngine(threading.get_ident()) as guarded:
        with Window(plain, "hd", 60, fidelity) as begin:
            state = begin.snapshot()
        window = Window.restore(plain, state, seed="s")
        async with AsyncWindow.restore(guarded, state, seed="s") as other:
            sides = Side(window), Side(other)
            for i, name in enumerate(names):
                one, two = [await outcome(STEPS[name](side, random.Random(seed + i))) for side in sides]
                assert one == two, name
                assert window.snapshot() == await other.snapshot(), name
                assert [getattr(window, n) for n in PLAIN] == [getattr(other, n) for n in PLAIN]
            assert sides[0].events == sides[1].events
            window.close()
            await other.close()
            one, two = [await outcome(side.do("append", Chunk.text("late"))) for side in sides]
            assert one == two == (ReadOnlyWindow, "this window is closed; restore its snapshot to go on")
        assert plain.store.stats().leased == guarded.store.stats().leased == 0


PLAIN = [name for name, member in public(AsyncWindow).items() if isinstance(member, Attribute)]
PLAIN = [name for name in PLAIN if name not in ("engine", "eviction", "retrieval")]
NAMES = {n for n, m in public(Window).items() if n == "chunks" or not isinstance(m, property)} - ELSEWHERE
NAMES |= {f"maintenance.{n}" for n, m in public(Maintenance).items() if not isinstance(m, property)}


def test_the_suite_runs_every_public_method() -> None:
    assert set(STEPS) == NAMES - {"close"}, "`close` ends every program"


@pytest.mark.parametrize("mode", ["exact", "patched"])
@pytest.mark.parametrize("name", STEPS)
def test_a_method_does_the_same_awaited(name: str, mode: Any) -> None:
    before = ["observe", "extend", "append", "ask", "append", "evict", "ask"]
    asyncio.run(same_on_both([*before, name, "plan", name, "ask", "check"], 3, mode))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=5, max_size=25),
    st.integers(0, 1000),
    st.sampled_from(["exact", "patched"]),
)
def test_programs_do_the_same_awaited(names: list[str], seed: int, mode: Any) -> None:
    asyncio.run(same_on_both(["observe", "extend", *names], seed, mode))


# what only async code can do


def run(body: Callable[[GuardedEngine], Coroutine[Any, Any, None]]) -> None:
    """Run ``body`` in an event loop, from whose thread neither engine nor store may be called; no lease, window or error that
    nobody retrieved may be left."""
    stray: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
        with GuardedEngine(threading.get_ident()) as engine:
            try:
                await body(engine)
            finally:
                engine.go.set()
            assert not open_windows(engine.store)
            assert engine.store.stats().leased == 0
        gc.collect()

    asyncio.run(main())
    assert not stray


async def reached(engine: GuardedEngine) -> None:
    """Wait until a call stands at the gate, then turn the event loop a thousand times."""
    assert await asyncio.to_thread(engine.entered.wait, 300)
    for _ in range(1000):
        await asyncio.sleep(0)


@pytest.mark.parametrize("gate", ["encode_system_prompt", "encode", "put", "generate", "token", "release"])
def test_the_event_loop_turns_while_a_call_stands_still(gate: str) -> None:
    async def body(engine: GuardedEngine) -> None:
        async def use() -> str:
            async with AsyncWindow(engine, "hd") as window:
                await window.append(Chunk.text("aa"))
                return "".join([text async for text in window.stream("q", 3)])

        engine.gate = gate
        using = asyncio.ensure_future(use())
        await reached(engine)
        assert not using.done()
        engine.go.set()
        assert await using

    run(body)


def test_calls_of_a_window_keep_their_order() -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            calls = [window.append(Chunk.text(f"{i}")) if i % 3 else window.ask("q", 3) for i in range(1, 20)]
            done = await asyncio.gather(*calls)
            assert [one for one in done if isinstance(one, str)] == list(window.ids)
            sizes = [one.usage.prompt_tokens for one in done if isinstance(one, Answer)]
            assert sizes == sorted(sizes) and len(set(sizes)) == 6

    run(body)


def test_windows_and_forks_answer_beside_each_other() -> None:
    """Each answer waits until all have reached the engine."""
    together = threading.Barrier(3)

    class Meeting(FakeEngine):
        def generate(self, *args: Any, **options: Any) -> Any:
            together.wait(300)
            return super().generate(*args, **options)

    async def main() -> None:
        with Meeting() as engine:
            async with AsyncWindow(engine, "hd") as window, window.fork() as branch, AsyncWindow(engine, "x") as other:
                await asyncio.gather(*(w.ask("q", 3) for w in (window, branch, other)))

    asyncio.run(main())


def test_one_window_in_two_event_loops() -> None:
    with FakeEngine() as engine:
        window = asyncio.run(_opened(engine))
        ids: dict[int, list[str]] = {}

        def use(which: int) -> None:
            async def appended() -> list[str]:
                return await asyncio.gather(*(window.append(Chunk.text(f"{which} {i}")) for i in range(20)))

            ids[which] = asyncio.run(appended())

        threads = [threading.Thread(target=use, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted([*ids[0], *ids[1]]) == sorted(window.ids)
        assert all([i for i in window.ids if i in own] == own for own in ids.values())
        asyncio.run(window.close())


async def _opened(engine: FakeEngine) -> AsyncWindow:
    return await AsyncWindow(engine, "hd", eviction=OldestFirst())


def test_an_unopened_window_says_how_it_is_opened() -> None:
    async def body(engine: GuardedEngine) -> None:
        window = AsyncWindow(engine, "hd")
        with pytest.raises(ReadOnlyWindow, match="await it, or enter it"):
            await window.append(Chunk.text("a"))
        with pytest.raises(ReadOnlyWindow, match="await it, or enter it"):
            _ = window.ids
        await window.close()
        with pytest.raises(ValueError, match="budget must be"):
            await AsyncWindow(engine, "hd", -1)

    run(body)


# cancellation


async def cancelled(engine: GuardedEngine, call: Coroutine[Any, Any, Any]) -> None:
    """Cancel ``call`` once it stands at the gate; it ends when the gate opens, and not before."""
    task = asyncio.ensure_future(call)
    await reached(engine)
    task.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done(), "what has begun is waited for"
    engine.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _streamed(window: AsyncWindow) -> None:
    async for _ in window.stream("q", 3, remember=True):
        pass


@pytest.mark.parametrize("gate", ["encode_query", "generate", "token"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancelled_answer_is_stopped_and_changes_nothing(gate: str, streamed: bool) -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            await window.append(Chunk.text("aa"))
            expected = await window.ask("q", 3)
            before, tokens, leased = await window.snapshot(), engine.tokens, engine.store.stats().leased
            engine.gate = gate
            await cancelled(engine, _streamed(window) if streamed else window.ask("q", 3, remember=True))
            assert await window.snapshot() == before and engine.store.stats().leased == leased
            assert engine.tokens - tokens < len(expected.token_ids), "the engine was stopped"
            assert (await window.ask("q", 3)).token_ids == expected.token_ids

    run(body)


def test_an_exchange_that_was_committed_before_the_cancellation_is_taken_back() -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            a = await window.append(Chunk.text("aa"))
            engine.gate = "committed"
            await window.observe(lambda event: engine.enter("committed") if event.op == "ask" else None)
            asked = asyncio.ensure_future(window.ask("q", 3, remember=True))
            behind = asyncio.ensure_future(_appended(window, "bb"))
            await reached(engine)
            assert len(window.ids) == 2
            asked.cancel()
            await asyncio.sleep(0)
            engine.go.set()
            with pytest.raises(asyncio.CancelledError):
                await asked
            b = await behind
            assert window.ids == (a, b)

    run(body)


async def _appended(window: AsyncWindow, text: str) -> str:
    return await window.append(Chunk.text(text))


def test_a_cancelled_edit_takes_effect_whole_or_not_at_all() -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            engine.gate = "encode"
            begun = asyncio.ensure_future(_appended(window, "aa"))
            await reached(engine)
            waiting = [asyncio.ensure_future(call) for call in (_appended(window, "bb"), window.ask("q", 3))]
            await asyncio.sleep(0)
            for task in (begun, *waiting):
                task.cancel()
            done, _ = await asyncio.wait(waiting)
            assert len(done) == 2 and not begun.done(), "what has not begun is dropped at once"
            engine.go.set()
            with pytest.raises(asyncio.CancelledError):
                await begun
            assert [(await window.chunk(i)).id for i in window.ids] == [Chunk.text("aa").id]
            assert engine.asked == 0

    run(body)


@pytest.mark.parametrize("fork", [False, True])
def test_a_window_whose_opening_was_cancelled_is_closed(fork: bool) -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            engine.gate = "encode_system_prompt"
            opening = window.fork("other") if fork else AsyncWindow(engine, "other")
            await cancelled(engine, opening.__aenter__())
            assert open_windows(engine.store) == [window.window.core]

    run(body)


# streams


def test_a_stream_that_is_closed_early_stops_the_engine() -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            await window.append(Chunk.text("aa"))
            expected = await window.ask("q", 3)
            before, tokens = await window.snapshot(), engine.tokens
            engine.gate = "token"
            async with aclosing(window.stream("q", 3, remember=True)) as texts:
                async for text in texts:
                    assert expected.text.startswith(text)
                    asyncio.get_running_loop().call_soon(engine.go.set)  # once the stream is being closed
                    break
            assert texts.answer is None and engine.tokens == tokens + 2
            assert [text async for text in texts] == []
            assert await window.snapshot() == before
            engine.entered.clear()
            engine.go.clear()
            engine.gate = "token"
            async for _ in window.stream("q", 3):
                break  # dropped, not closed: the next call waits for its turn
            asyncio.get_running_loop().call_soon(engine.go.set)
            assert (await window.ask("q", 3)).token_ids == expected.token_ids
            never = window.stream("q", 3)
            await never.aclose()
            assert [text async for text in never] == [] and engine.tokens == tokens + 4 + len(expected.token_ids)

    run(body)


def test_a_stream_has_the_answer_at_its_end() -> None:
    async def body(engine: GuardedEngine) -> None:
        async with AsyncWindow(engine, "hd") as window:
            expected = await window.ask("q", 3)
            texts = window.stream("q", 3, remember=True)
            assert texts.answer is None
            assert "".join([text async for text in texts]) == expected.text
            assert texts.answer is not None and texts.answer.remembered == window.ids[-1]
            with pytest.raises(ValueError, match="max_tokens"):
                async for _ in window.stream("q", 0):
                    pass
            engine.fail = RuntimeError("no more")
            with pytest.raises(RuntimeError, match="no more"):
                async for _ in window.stream("q", 3):
                    pass

    run(body)


# closing


@pytest.mark.parametrize("streamed", [False, True])
def test_closing_stops_an_answer_and_comes_before_what_waits(streamed: bool) -> None:
    async def body(engine: GuardedEngine) -> None:
        window = await AsyncWindow(engine, "hd")
        engine.gate = "generate"
        asked = asyncio.ensure_future(_streamed(window) if streamed else window.ask("q", 3))
        await reached(engine)
        waiting = [asyncio.ensure_future(call) for call in (_appended(window, "aa"), window.ask("r", 3))]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(window.close())
        await asyncio.sleep(0)
        engine.go.set()
        await closing
        with pytest.raises(AnswerStopped):
            await asked
        for task in waiting:
            with pytest.raises(ReadOnlyWindow):
                await task
        assert window.ids == () and engine.asked == 1
        await window.close()

    run(body)


def test_a_cancelled_close_closes() -> None:
    async def body(engine: GuardedEngine) -> None:
        window = await AsyncWindow(engine, "hd")
        await window.append(Chunk.text("aa"))
        await window.ask("q", 3)
        engine.gate = "release"
        closing = asyncio.ensure_future(window.close())
        await reached(engine)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        engine.go.set()
        await window.close()

    run(body)
