"""`AsyncWindow`: the methods of `Window`, awaited; encoding, decoding and answers run off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from functools import partial, wraps
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, cast

from ctxwin.engines.base import Engine
from ctxwin.errors import ReadOnlyWindow
from ctxwin.fidelity import Fidelity
from ctxwin.window.answer import Answer, PlanEntry
from ctxwin.window.ask import AskOptions, OnToken, Question, not_stopped
from ctxwin.window.idle import PrefillCounts
from ctxwin.window.maintenance import Maintenance
from ctxwin.window.protocols import Eviction, Retrieval
from ctxwin.window.state import State
from ctxwin.window.stream import AsyncTokenStream, SerialExecutor, aask, result_of
from ctxwin.window.window import Window

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound="AsyncWindow")


def to_async(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return ``method`` as a coroutine function of a class whose ``_call`` runs a method of that name; the signature stays."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        return cast("T", await self._call(method.__name__, *args, **options))

    return call


class Attribute(Generic[T]):
    """An attribute of the window below an `AsyncWindow`, read and set at once."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: AsyncWindow | None, owner: type) -> T:
        return cast("T", self if instance is None else getattr(instance.window, self._name))

    def __set__(self, instance: AsyncWindow, value: T) -> None:
        setattr(instance.window, self._name, value)


class AsyncWindow:
    """A `Window` for async code: its methods are awaited, its properties are plain.

    It takes the arguments of `Window`, opens when it is awaited or entered, and closes with its block::

        async with AsyncWindow(engine, system_prompt="You watch a camera.", budget=600) as window:
            await window.append(await window.run(Chunk.image, "frame-000.png"))
            async for text in window.stream("Which car left first?"):
                print(text, end="")
            async with window.fork() as branch:
                answer = await branch.ask("And without the last frame?")

    `fork`, `at` and `restore` return windows that open in the same way, `chunks` is a method, and `stream` is the async iterator
    of `ask`. Arguments, results, errors and costs are those of `Window`.

    Nothing of it runs on the event loop; a chunk decodes its media where it is made, which `run` does off the loop. Calls of one
    window run one at a time, in the order in which they were made, from whichever tasks and event loops; several windows, forks
    among them, run beside each other, at most 512 at once.

    Cancelling drops a call that has not begun. One that has is waited for: an answer is stopped and leaves the window as it was,
    anything else takes effect as a whole. `close` stops an answer in the same way and comes before calls that wait.

    Attributes:
        window: the window below, for code that takes a `Window`. It has one writer, as ever.
    """

    def __init__(
        self,
        engine: Engine,
        system_prompt: str = "",
        budget: int | None = None,
        fidelity: Fidelity | None = None,
        *,
        budget_bytes: int | str | None = None,
        low_water: float | Literal["auto"] | None = None,
        prefill: Literal["idle"] | None = None,
        eviction: Eviction | None = None,
        retrieval: Retrieval | None = None,
    ) -> None:
        options: Any = {"budget_bytes": budget_bytes, "low_water": low_water, "prefill": prefill}
        options |= {"eviction": eviction, "retrieval": retrieval}
        self._bind(partial(Window, engine, system_prompt, budget, fidelity, **options))

    def _bind(self, make: Callable[[], Window], opener: SerialExecutor | None = None) -> None:
        self._executor = SerialExecutor()
        self._make: Callable[[], Window] | None = make
        self._opener = opener or self._executor
        self._window: Window | None = None
        self._closing = threading.Event()

    @classmethod
    def opening(cls, make: Callable[P, Window], *args: P.args, **options: P.kwargs) -> Self:
        """An async window over the one that ``make`` returns, which is called when the async window opens."""
        window = cls.__new__(cls)
        window._bind(partial(make, *args, **options))
        return window

    @classmethod
    def restore(
        cls,
        engine: Engine,
        state: State | dict[str, Any] | str,
        *,
        eviction: Eviction | None = None,
        retrieval: Retrieval | None = None,
        seed: str | None = None,
    ) -> Self:
        """`Window.restore`, once it is awaited or entered."""
        return cls.opening(Window.restore, engine, state, eviction=eviction, retrieval=retrieval, seed=seed)

    @property
    def window(self) -> Window:
        if self._window is None:
            raise ReadOnlyWindow("an AsyncWindow must be open to be used; await it, or enter it with `async with`")
        return self._window

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        def open() -> None:
            if self._make is not None:
                self._window, self._make = self._make(), None

        try:
            await result_of(self._opener.submit(open))
        except asyncio.CancelledError:
            await self.close()  # nobody else has it
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """`Window.close`. An answer that runs is stopped: it raises AnswerStopped; calls that wait find the window closed."""
        self._closing.set()
        if self._window is not None:
            closed = self._executor.submit(self._window.close, first=True)
            await asyncio.shield(asyncio.wrap_future(closed))  # cancelled or not, it closes

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a function in the window's turn, off the event loop: one that decodes (`Chunk.video`), or edits `window`."""
        return await result_of(self._executor.submit(partial(call, *args, **options)))

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        windows = [arg.window if isinstance(arg, AsyncWindow) else arg for arg in args]
        return await self.run(getattr(self.window, name), *windows, **options)

    engine = Attribute[Engine]()
    id = Attribute[str]()
    parent = Attribute[str | None]()
    system_prompt = Attribute[str]()
    budget = Attribute[int]()
    low_water = Attribute[int | None]()
    fidelity = Attribute[Fidelity]()
    eviction = Attribute[Eviction]()
    retrieval = Attribute[Retrieval]()
    tokens = Attribute[int]()
    bytes = Attribute[int]()
    version = Attribute[int]()
    ids = Attribute[tuple[str, ...]]()
    pending = Attribute[tuple[str, ...]]()
    evicted = Attribute[tuple[str, ...]]()

    @property
    def maintenance(self) -> AsyncMaintenance:
        """`Window.maintenance`, awaited."""
        return AsyncMaintenance(self)

    append = to_async(Window.append)
    extend = to_async(Window.extend)
    insert = to_async(Window.insert)
    remember = to_async(Window.remember)
    evict = to_async(Window.evict)
    slide = to_async(Window.slide)
    recall = to_async(Window.recall)
    look_back = to_async(Window.look_back)
    retrieve = to_async(Window.retrieve)
    reorder = to_async(Window.reorder)
    toggle = to_async(Window.toggle)
    pin = to_async(Window.pin)
    undo = to_async(Window.undo)
    chunk = to_async(Window.chunk)
    plan = to_async(Window.plan)
    disposable = to_async(Window.disposable)
    snapshot = to_async(Window.snapshot)
    check = to_async(Window.check)
    observe = to_async(Window.observe)

    async def chunks(self) -> tuple[PlanEntry, ...]:
        """`Window.chunks`, which costs a plan."""
        return (await self.plan()).entries

    def at(self, version: int) -> AsyncWindow:
        """`Window.at`, once it is awaited or entered."""
        return self._branch(AsyncWindow, lambda: self.window.at(version))

    def fork(self, system_prompt: str | None = None) -> Self:
        """`Window.fork`, once it is awaited or entered: behind the calls of this window that were made before."""
        return self._branch(type(self), lambda: self.window.fork(system_prompt))

    def _branch(self, kind: type[W], make: Callable[[], Window]) -> W:
        branch = kind.__new__(kind)
        branch._bind(make, self._executor)
        return branch

    async def adopt(self, branch: AsyncWindow, *, force: bool = False) -> None:
        """`Window.adopt`."""
        await self._call("adopt", branch, force=force)

    async def ask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """`Window.ask`; cancelling it stops the engine and leaves the window as it was."""
        return await self.answer(Question.of(query, max_tokens, **options))

    def stream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> AsyncTokenStream:
        """`ask`, yielding text as it is made; ``answer`` is there at the end. It asks when the first text is awaited."""
        question = Question.of(query, max_tokens, **options)
        return AsyncTokenStream(partial(self._answer, question, not_stopped), self._executor.submit)

    async def answer(
        self, question: Question, *, on_token: OnToken | None = None, stopped: Callable[[], bool] = not_stopped
    ) -> Answer:
        """`Window.answer`; ``on_token`` and ``stopped`` are called in the thread that answers."""
        call = partial(self._answer, question, stopped, on_token=on_token)
        return await aask(self.window.core, call, self._executor.submit)

    def _answer(
        self,
        question: Question,
        callers: Callable[[], bool],
        *,
        on_token: OnToken | None = None,
        stopped: Callable[[], bool],
    ) -> Answer:
        ends = (stopped, callers, self._closing.is_set)
        return self.window.answer(question, on_token=on_token, stopped=lambda: any(end() for end in ends))

    def __repr__(self) -> str:
        return f"<AsyncWindow of {self._window!r}>"


class AsyncMaintenance:
    """The methods of `Maintenance`, awaited: `AsyncWindow.maintenance`."""

    def __init__(self, window: AsyncWindow) -> None:
        self._window = window

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        return await self._window.run(getattr(self._window.window.maintenance, name), *args, **options)

    @property
    def prefill_counts(self) -> PrefillCounts | None:
        """`Maintenance.prefill_counts`."""
        return self._window.window.maintenance.prefill_counts

    check = to_async(Maintenance.check)
    dependents = to_async(Maintenance.dependents)
    touch = to_async(Maintenance.touch)
    forget_beyond = to_async(Maintenance.forget_beyond)
    prefill = to_async(Maintenance.prefill)
    plan_orbit = to_async(Maintenance.plan_orbit)
    prepare_orbit = to_async(Maintenance.prepare_orbit)
    apply_pending = to_async(Maintenance.apply_pending)
    refresh = to_async(Maintenance.refresh)
    compress = to_async(Maintenance.compress)
    merge = to_async(Maintenance.merge)
