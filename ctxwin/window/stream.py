"""Streamed and awaited answers: a thread asks while its caller reads text or waits without blocking an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from ctxwin.errors import AnswerStopped
from ctxwin.window.answer import Answer
from ctxwin.window.ask import OnToken, until_stop
from ctxwin.window.core import WindowCore

T = TypeVar("T")
_AT_ONCE = 512
_threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ctxwin-ask")
"""Threads on which coroutines wait for windows. asyncio's own threads are 6 on a machine of 2 cores: as many windows would be in
flight there, however many an engine can batch."""


class AnswerCall(Protocol):
    """`Window.answer` bound to its question."""

    def __call__(self, *, on_token: OnToken | None = None, stopped: Callable[[], bool]) -> Answer: ...


def in_thread(work: Callable[..., T], *args: Any, **options: Any) -> Awaitable[T]:
    """`asyncio.to_thread`, on threads of our own."""
    call = partial(contextvars.copy_context().run, work, *args, **options)
    return asyncio.get_running_loop().run_in_executor(_threads, call)


class TextDelta:
    """Difference of successive texts of a growing answer, up to the first of ``stops``.

    Attributes:
        text: the text returned so far.
        stopped: whether a stop text was found.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = stops
        self.text = ""
        self.stopped = False

    def feed(self, whole: str, *, last: bool = False) -> str:
        """Return the new, final text in ``whole``; half a character or a possible stop text waits for the next token."""
        if self.stopped:
            return ""
        ready, self.stopped = until_stop(whole if last else whole.rstrip("\ufffd"), self._stops, last=last)
        new = ready[len(self.text) :]
        if new:
            self.text = ready
        return new


class TokenStream(Iterator[str]):
    """The text of an answer as it is generated. ``answer`` is None until the stream is exhausted."""

    def __init__(self, call: AnswerCall) -> None:
        self.answer: Answer | None = None
        self._items: queue.SimpleQueue[str | Answer | BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        # The thread holds no reference to the stream: one that is dropped (a ``break``) must stop, see `__del__`.
        run = partial(contextvars.copy_context().run, _answer, self._items, self._stop, call)
        self._thread = threading.Thread(target=run, name="ctxwin-answer", daemon=True)
        self._thread.start()

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> str:
        while True:
            if self._stop.is_set():
                raise StopIteration
            item = self._items.get()
            if item is None or isinstance(item, Answer):
                self.answer = item
                self.close()
                raise StopIteration
            if isinstance(item, BaseException):
                self.close()
                raise item
            if item:
                return item

    def close(self) -> None:
        """Stops the engine if it is still answering, and waits for it; the window is then unchanged."""
        self._stop.set()
        self._thread.join()

    def __del__(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()  # so that the window is free for whoever dropped the stream


def _answer(
    items: queue.SimpleQueue[str | Answer | BaseException | None], stop: threading.Event, call: AnswerCall
) -> None:
    delta = TextDelta()

    def on_token(_: int, text: str) -> bool:
        items.put(delta.feed(text))
        return True

    try:
        answer = call(on_token=on_token, stopped=stop.is_set)
        items.put(delta.feed(answer.text, last=True))
        items.put(answer)
    except AnswerStopped:
        items.put(None)
    except BaseException as error:  # handed to the caller's thread, which raises it
        items.put(error)


async def aask(core: WindowCore | None, call: AnswerCall) -> Answer:
    """Run a question in a thread; cancelling stops the engine and leaves the window of ``core``, if given, unchanged."""
    stop = threading.Event()
    task = asyncio.ensure_future(in_thread(call, stopped=stop.is_set))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        # The engine is given the time to stop, so that the window is free again when the caller goes on.
        await asyncio.wait([task])
        done = not task.cancelled() and task.exception() is None
        if core is not None and done and (late := task.result().remembered):
            core.take_back(late)  # it was committed just before the cancellation arrived
        raise


async def astream(call: AnswerCall) -> AsyncIterator[str]:
    """Yield the text of a `TokenStream` without blocking the event loop."""
    stream = TokenStream(call)
    try:
        while True:
            text: str | None = await in_thread(next, stream, None)
            if text is None:
                return
            yield text
    finally:
        await in_thread(stream.close)
