"""What only async code can do: an event loop that goes on, calls in order, cancellation, streams, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from ctxwin import AsyncWindow, Chunk
from ctxwin.errors import AnswerStopped, ReadOnlyWindow
from ctxwin.policies import OldestFirst
from ctxwin.window.answer import Answer
from ctxwin.window.core import open_windows
from ctxwin.window.stream import in_thread
from forks import refusals
from window.fake import FakeEngine
from window.guarded import GuardedEngine


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


async def open_later(engine: GuardedEngine) -> None:
    """Let a call pass the gate some turns of the event loop later: in them a stream that was closed or dropped stops it."""
    for _ in range(20):
        await asyncio.sleep(0)
    engine.go.set()


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


def test_a_forked_process_has_threads_of_its_own() -> None:
    in_thread(int).result()
    assert refusals([lambda: in_thread(int).result()]) == [""]


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
                    opening = asyncio.create_task(open_later(engine))
                    break
            await opening
            assert texts.answer is None and engine.tokens == tokens + 2
            assert [text async for text in texts] == []
            assert await window.snapshot() == before
            engine.entered.clear()
            engine.go.clear()
            engine.gate = "token"
            async for _ in window.stream("q", 3):
                break  # dropped, not closed: the next call waits for its turn
            opening = asyncio.create_task(open_later(engine))
            assert (await window.ask("q", 3)).token_ids == expected.token_ids
            await opening
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
