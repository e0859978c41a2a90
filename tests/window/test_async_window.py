"""`AsyncWindow` does what `Window` does, off the event loop: one suite for both, then what only async code can do."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin import AsyncWindow, Chunk, Fidelity, Window
from ctxwin.errors import ReadOnlyWindow
from ctxwin.window.answer import Answer
from ctxwin.window.ask import Question
from ctxwin.window.async_window import AsyncMaintenance, Attribute
from ctxwin.window.events import Event
from ctxwin.window.maintenance import Maintenance
from window.fake import FakeEngine
from window.guarded import GuardedEngine

ELSEWHERE = {
    "aask",
    "astream",
    "from_core",
}  # awaited they are `ask` and `stream`; `opening` takes a window instead of a core
OPEN = {"at", "fork", "restore"}  # return a window, which is awaited or entered
OWN = {"window", "opening", "run"}


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
    "maintenance.plan_orbit": lambda s, r: s.do("maintenance.plan_orbit", s.window.ids[:2], orders=2),
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
