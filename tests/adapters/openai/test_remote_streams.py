"""Streams of a `RemoteWindow` that end early, and arguments that a window on a server refuses before it asks one."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import APIConnectionError, AsyncOpenAI, DefaultHttpxClient, OpenAI

from adapters.server.serving import Server
from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin_client import LiveStream, RemoteWindow, transport
from ctxwin_client.errors import UnknownWindow
from ctxwin_server.http import routes

QUESTION = "color of 02?"


@pytest.fixture
def window(client: OpenAI) -> Iterator[RemoteWindow]:
    with RemoteWindow(client, "You watch a camera.", 900, Fidelity("exact")) as made:
        made.extend([Chunk.text("t=0 s a frame"), Chunk.text("t=1 s a frame")])
        yield made


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Answers of one text that go on until they are stopped; set once one has."""
    stopped_once = threading.Event()

    def answer(self: Window, question: Any, *, on_token: Callable[..., Any], stopped: Callable[[], bool]) -> Any:
        on_token(1, "one")
        while not stopped():
            time.sleep(0.01)
        stopped_once.set()
        raise AnswerStopped("stopped")

    monkeypatch.setattr(Window, "answer", answer)
    return stopped_once


def test_an_awaited_stream_has_the_answer_at_its_end(window: RemoteWindow) -> None:
    whole = window.ask(QUESTION, 4)

    async def use() -> None:
        stream = window.astream(QUESTION, 4)
        assert stream.answer is None
        assert "".join([text async for text in stream]) == whole.text
        assert stream.answer is not None and stream.answer.token_ids == whole.token_ids
        assert [text async for text in stream] == []
        await stream.aclose()

    asyncio.run(use())


def test_a_key_that_changes_reaches_async_code_and_live_streams(server: Server, window: RemoteWindow) -> None:
    keys = [f"key {i}" for i in range(9)]
    client = OpenAI(base_url=f"{server.url}/v1", api_key=lambda: keys.pop(0), max_retries=0)
    mine = RemoteWindow.attach(client, window.id)
    assert asyncio.run(mine.aask(QUESTION, 2)).text == window.ask(QUESTION, 2).text and client.api_key == "key 1"
    with LiveStream(client, window.id):
        assert client.api_key == "key 2"
    proxied = OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=DefaultHttpxClient(trust_env=False))
    with pytest.raises(ValueError, match="async_client must be given beside a client with its own http_client"):
        asyncio.run(RemoteWindow.attach(proxied, window.id).aask(QUESTION, 2))


def test_a_stream_that_is_left_at_the_end_of_its_loop_leaves_without_a_word(
    window: RemoteWindow, endless: threading.Event, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> str:
        async for text in window.astream(QUESTION, 400):
            return text
        return ""

    assert asyncio.run(use()) == "one" and endless.wait(20)
    assert (capfd.readouterr().err, caplog.text) == ("", "")


def test_a_stream_without_an_answer_is_no_whole_one(window: RemoteWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(_: bytes) -> list[bytes]:
        return []

    stream_events = routes.stream_events
    monkeypatch.setattr(routes, "stream_events", lambda work, request, _: stream_events(work, request, none))
    texts, stream = [], window.stream(QUESTION, 4)
    with pytest.raises(EngineFailed, match="ended the answer before its end; ask again"):
        texts += stream
    assert stream.answer is None

    async def use() -> None:
        with pytest.raises(EngineFailed, match="ended the answer before its end; ask again"):
            async for text in window.astream(QUESTION, 4):
                texts.append(text)
        with pytest.raises(EngineFailed, match="ended the answer before its end; ask again"):
            await window.aask(QUESTION, 4)

    asyncio.run(use())
    assert len(texts) % 2 == 0 and texts[: len(texts) // 2] == texts[len(texts) // 2 :]


def test_a_thread_may_close_a_stream_that_another_reads(window: RemoteWindow, endless: threading.Event) -> None:
    stream, version = window.stream(QUESTION, 400), window.version
    assert next(stream) == "one"
    threading.Timer(0.2, stream.close).start()
    assert list(itertools.islice(stream, 5)) == [] and stream.answer is None
    assert next(stream, None) is None
    assert endless.wait(20)
    window.maintenance.touch(window.ids[0])  # waits for the writer
    assert window.version == version + 1


@pytest.mark.parametrize("live", [False, True])
def test_a_task_may_close_a_stream_that_another_awaits(
    client: OpenAI, window: RemoteWindow, endless: threading.Event, live: bool
) -> None:
    async def use(stream: Any) -> None:
        assert await anext(stream) == "one"
        reading = asyncio.ensure_future(anext(stream, "the end"))
        await asyncio.sleep(0.1)
        await stream.aclose()
        assert await reading == "the end" and stream.answer is None
        assert [text async for text in stream] == []
        assert await asyncio.to_thread(endless.wait, 20)

    async def use_live() -> None:
        async with LiveStream(client, window.id).state as frames:
            await use(frames.stream(QUESTION, 400, now=True))

    asyncio.run(use_live() if live else use(window.astream(QUESTION, 400)))


def test_closing_is_tried_again_where_the_server_was_not_reached(
    client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = RemoteWindow(client, "You watch a camera.")
    with monkeypatch.context() as patch:
        patch.setattr(client, "base_url", "http://127.0.0.1:9/v1")
        with pytest.raises(APIConnectionError):
            window.close()
    window.close()
    with pytest.raises(UnknownWindow):
        RemoteWindow.attach(server.client(), window.id)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda w, c: RemoteWindow(AsyncOpenAI(base_url=c.base_url, api_key="x")),
            TypeError,
            "client must be an openai.O",
        ),
        (lambda w, c: RemoteWindow(str(c.base_url)), TypeError, r"client must be an openai.OpenAI, got str; make one"),
        (
            lambda w, c: RemoteWindow.attach(str(c.base_url), w.id),
            TypeError,
            "client must be an openai.OpenAI, got str",
        ),
        (
            lambda w, c: RemoteWindow.restore(None, w.snapshot()),
            TypeError,
            "client must be an openai.OpenAI, got NoneT",
        ),
        (lambda w, c: RemoteWindow(c, "h", 900, "exact"), TypeError, r"as Fidelity\('exact'\), got 'exact'"),
        (lambda w, c: RemoteWindow(c, "caf\udce9"), ValueError, "text must be Unicode, got half of a surrogate pair"),
        (lambda w, c: w.ask("caf\udce9"), ValueError, "text must be Unicode, got half of a surrogate pair"),
        (
            lambda w, c: w.extend(Chunk.text("x")),
            TypeError,
            "chunks must be a list, got Chunk; pass a list, with a Chunk",
        ),
        (lambda w, c: w.ask("x", libraries="manuals"), TypeError, "libraries must be a list, got str; pass a list"),
    ],
)
def test_what_no_window_takes_is_refused_by_name(
    client: OpenAI,
    window: RemoteWindow,
    act: Callable[[RemoteWindow, OpenAI], Any],
    error: type[Exception],
    message: str,
) -> None:
    version = window.version
    with pytest.raises(error, match=message):
        act(window, client)
    assert window.version == version and transport.uploaded_by(client)
