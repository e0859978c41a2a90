"""Streamed and awaited answers: a thread asks while its caller reads text or waits without blocking an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from ctxwin.errors import AnswerStopped
from ctxwin.window.answer import Answer
from ctxwin.window.ask import OnToken
from ctxwin.window.core import WindowCore

T = TypeVar("T")


class AnswerCall(Protocol):
    """`Window.answer` bound to its question."""

    def __call__(self, *, on_token: OnToken | None = None, stopped: Callable[[], bool]) -> Answer: ...


class Submit(Protocol):
    """Runs a call in a thread: `in_thread`, or in the turn of a window."""

    def __call__(self, call: Callable[[], T], /) -> Future[T]: ...


def in_thread(call: Callable[[], T], /) -> Future[T]:
    """Run ``call`` on the threads that all windows share, in a copy of the caller's context."""
    return _threads(os.getpid()).submit(contextvars.copy_context().run, call)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads on which coroutines of this process wait for windows; asyncio's are fewer than an engine can batch."""
    return ThreadPoolExecutor(512, "ctxwin-ask")


class SerialExecutor:
    """Runs calls one at a time, in their order, on the threads that all windows share; it takes one only while there are calls.

    The order holds whichever event loops and tasks the calls come from.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock, self._running = threading.Lock(), False

    def submit(self, call: Callable[[], T], /, *, first: bool = False) -> Future[T]:
        """Run ``call`` behind those that wait, or ``first`` before them, in a copy of the caller's context."""
        future: Future[T] = Future()
        with self._lock:
            add = self._calls.appendleft if first else self._calls.append
            add((future, partial(contextvars.copy_context().run, call)))
            if not self._running:
                in_thread(self._run)
                self._running = True
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                self._running = bool(self._calls)
                if not self._running:
                    return
                future, call = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # raised where it is awaited
                    future.set_exception(error)
                else:
                    future.set_result(result)


async def result_of(future: Future[T], stop: Callable[[], None] = lambda: None) -> T:
    """Wait for a call in a thread without blocking the event loop; return its result.

    Cancelling drops a call that has not begun. One that has is told to ``stop`` and waited for, so that its window is free when
    the caller goes on.
    """
    waiter = asyncio.wrap_future(future)
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to retrieve it
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not future.cancel():
            stop()
            await asyncio.wait([waiter])
        raise


class TextDelta:
    """Difference of successive texts of a growing answer."""

    def __init__(self) -> None:
        self._length = 0

    def feed(self, whole: str, *, last: bool = False) -> str:
        """Return the new text in ``whole``; half a character waits for the next token."""
        new = (whole if last else whole.rstrip("\ufffd"))[self._length :]
        self._length += len(new)
        return new


class TokenStream(Iterator[str], AbstractContextManager["TokenStream"]):
    """The text of an answer as it is generated. ``answer`` is None until the stream is exhausted.

    Dropping it stops the engine, as `close` does. A context manager closes it also where an error's traceback keeps it alive.
    """

    def __init__(self, call: AnswerCall) -> None:
        self.answer: Answer | None = None
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._stop = stop = threading.Event()
        # The thread holds no reference to the stream: one that is dropped (a ``break``, the end of the process) must stop.
        run = partial(contextvars.copy_context().run, _answer, self._items.put, stop, call)
        thread = threading.Thread(target=run, name="ctxwin-answer", daemon=True)

        def end() -> None:
            stop.set()
            if thread.is_alive() and thread is not threading.current_thread():  # which may find the garbage
                thread.join()  # so that the window is free for whoever dropped the stream

        self._end = end
        weakref.finalize(self, end)
        thread.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __next__(self) -> str:
        try:
            while not self._stop.is_set():
                item = self._items.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None or isinstance(item, Answer):
                    self.answer = item
                    self.close()
                elif item:
                    return item
        except BaseException:  # Ctrl-C, too
            item = None  # its traceback refers to this frame: other streams of its caller would stay open
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Stop the engine if it is still answering, and wait for it; the window is then unchanged."""
        self._end()


class AsyncTextStream(AsyncIterator[str]):
    """The text of an answer as it is generated, for async code. ``answer`` is None until the stream is exhausted.

    Asks when the first text is awaited. Cancelling that, closing the stream (also from another task) or dropping it stops the
    engine; the window is then unchanged. Raises AnswerStopped where the window is closed before the answer ends, EngineFailed
    where a server ends before it.

    Args:
        ask: passes pieces of text, then the answer, to its argument.
    """

    def __init__(self, ask: Callable[[Callable[[_Item], None]], Coroutine[Any, Any, None]]) -> None:
        self.answer: Answer | None = None
        self._ask, self._closed = ask, False
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._asking: asyncio.Task[None] | None = None  # holds no reference to the stream, see `__del__`

    async def __anext__(self) -> str:
        if self._asking is None and not self._closed:
            put = self._items.put_nowait
            self._asking = asyncio.create_task(self._ask(put))
            self._asking.add_done_callback(lambda asked: put(None if asked.cancelled() else asked.exception()))
        try:
            while not self._closed:
                item = await self._items.get()
                if isinstance(item, Answer) and self._asking is not None:
                    self.answer, self._closed = item, True
                    await asyncio.wait([self._asking])
                elif isinstance(item, BaseException):
                    raise item
                elif item is None and not self._closed:
                    raise AnswerStopped("the answer was stopped before its end: its window was closed")
                elif isinstance(item, str) and item:
                    return item
        except BaseException:
            item = None  # see `TokenStream`
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop the engine if it is still answering, and wait for it; the window is then unchanged."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    def __del__(self) -> None:
        if self._asking is not None and not self._asking.get_loop().is_closed():
            self._asking.get_loop().call_soon_threadsafe(self._asking.cancel)


class AsyncTokenStream(AsyncTextStream):
    """An `AsyncTextStream` of a window in this process: ``submit`` runs ``call`` in a thread."""

    def __init__(self, call: AnswerCall, submit: Submit = in_thread) -> None:
        async def ask(put: Callable[[_Item], None]) -> None:
            loop, stop = asyncio.get_running_loop(), threading.Event()
            run = partial(_answer, lambda item: loop.call_soon_threadsafe(put, item), stop, call)
            await result_of(submit(run), stop.set)

        super().__init__(ask)


_Item = str | Answer | BaseException | None
"""A piece of text, the answer behind the last one, an error, or None where the answer was stopped."""


def _answer(put: Callable[[_Item], object], stop: threading.Event, call: AnswerCall) -> None:
    delta = TextDelta()

    def on_token(_: int, text: str) -> bool:
        put(delta.feed(text))
        return True

    try:
        answer = call(on_token=on_token, stopped=stop.is_set)
        put(delta.feed(answer.text, last=True))
        put(answer)
    except AnswerStopped:
        put(None)
    except BaseException as error:  # handed to the caller's thread, which raises it
        put(error)


async def aask(core: WindowCore | None, call: AnswerCall, submit: Submit = in_thread) -> Answer:
    """Run a question in a thread; cancelling stops the engine and leaves the window of ``core``, if given, unchanged."""
    stop = threading.Event()

    def take_back(answer: Answer) -> None:  # it was committed just before the cancellation arrived
        if core is not None and answer.remembered and not core.closed:
            core.take_back(answer.remembered)

    def run() -> Answer:
        answer = call(stopped=stop.is_set)
        if stop.is_set():
            take_back(answer)
            raise AnswerStopped("the answer was stopped at its end")
        return answer

    future = submit(run)
    try:
        return await result_of(future, stop.set)
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:
            await result_of(submit(partial(take_back, future.result())))
        raise
