"""Answers of `ChatCtxwin` as they are generated: streamed, dropped, cancelled, closed meanwhile."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk

from adapters.langchain.watching import Watch
from ctxwin.engines.base import Engine
from engines.scripted import ScriptedEngine
from langchain_ctxwin.chat import ChatCtxwin


def test_streams_tell_the_same_and_the_cost_at_the_end(tiny: Engine, exact: ChatCtxwin) -> None:
    watch = Watch(tiny)
    messages = watch.messages([0, 1], watch.question([0, 1]))
    whole = exact.invoke(messages, stream=False)
    chunks = list(exact.stream(messages))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    assert isinstance(merged, AIMessageChunk)
    assert merged.content == whole.content
    assert [bool(c.usage_metadata) for c in chunks].count(True) == 1
    for message in (merged, whole):
        assert message.response_metadata["model_provider"] == "ctxwin"
        assert message.response_metadata["finish_reason"] == "stop"
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == len(tiny.text_ids(str(whole.content)))

    async def both() -> tuple[Any, list[Any]]:
        return await exact.ainvoke(messages), [c async for c in exact.astream(messages)]

    answer, pieces = asyncio.run(both())
    assert answer.content == whole.content == "".join(c.content for c in pieces)


class Slow(ScriptedEngine):
    """Waits at each token until it is let go on; ``stopped`` is set when the answer was given up."""

    def __init__(self, inner: Any, script: Any) -> None:
        super().__init__(inner, script)
        self.steps, self.asked, self.ended = threading.Semaphore(0), threading.Event(), threading.Event()

    def generate(self, layout: Any, query: Any, sampling: Any, *, on_token: Any = None, **kwargs: Any) -> Any:
        def slow(token: int, text: str) -> bool:
            self.asked.set()
            self.steps.acquire(timeout=10)
            return bool(on_token(token, text))

        made = super().generate(layout, query, sampling, on_token=slow, **kwargs)
        if not made.finished:
            self.ended.set()
        return made


def test_a_stream_that_is_dropped_stops_the_engine(caller: Engine) -> None:
    engine = Slow(caller, ["one two three four five six"])
    with ChatCtxwin(engine=engine) as chat:
        engine.steps.release(3)
        stream = chat.stream("q")
        next(stream)
        engine.steps.release(1)
        stream.close()  # type: ignore[attr-defined]
        assert engine.ended.is_set()
        assert not any(map(len, chat.opened.pools.values()))
    assert not [t for t in threading.enumerate() if t.name == "ctxwin-answer"]


def test_cancelling_stops_the_engine(caller: Engine) -> None:
    engine = Slow(caller, ["one two three", "one two three"])

    async def cancelled(run: Any) -> None:
        task = asyncio.ensure_future(run)
        await asyncio.to_thread(engine.asked.wait, 10)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)  # it arrives
        engine.steps.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.ended.is_set()
        engine.asked.clear()
        engine.ended.clear()

    async def streamed(chat: ChatCtxwin) -> None:
        async for _ in chat.astream("q"):
            pass

    with ChatCtxwin(engine=engine) as chat:
        asyncio.run(cancelled(chat.ainvoke("q")))
        asyncio.run(cancelled(streamed(chat)))


def held(engine: Engine) -> dict[str, int]:
    gc.collect()
    engine.repo.leased("span/none")  # what collected windows left is released at the next call
    return dict(engine.repo._leases)


def test_closing_while_a_call_is_in_flight_leaves_nothing_behind(caller: Engine) -> None:
    engine = Slow(caller, ["one two three"])
    chat = ChatCtxwin(engine=engine)
    with ThreadPoolExecutor(1) as threads:
        before = held(caller)
        answer = threads.submit(chat.invoke, "q")
        assert engine.asked.wait(60)
        chat.close()
        chat.close()
        engine.steps.release(20)
        assert answer.result(60).content == "one two three"
    assert not chat.opened.pools  # not opened again
    assert held(caller) == before
