"""Live streams: frames pushed over a socket or by HTTP, against the same edits of a window in process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import connect

from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin import Chunk, Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import BadMedia, BudgetExceeded, CtxwinError, EngineFailed, UnknownChunk
from ctxwin.media import png
from ctxwin.tiny import world
from ctxwin_client import AsyncLiveStream, LiveStream, RemoteWindow
from ctxwin_client.errors import TooLarge, TooManyRequests, UnknownWindow
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.protocol.limits import Limits

FRAMES = world.make_stream(seed=11, n_frames=12)
PIXELS = [np.asarray(world.render(frame)) for frame in FRAMES]
BUDGET, RESERVE = 420, 40


def question(i: int) -> str:
    return f"color of {FRAMES[i].marks[0]:02d}?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_upload_bytes=200_000, max_windows=4)) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine("tiny:hf") as opened:
        yield opened


@pytest.fixture
def window(server: Server) -> Iterator[RemoteWindow]:
    with RemoteWindow(server.client(), "You watch a camera.", BUDGET) as made:
        yield made


def socket_of(server: Server, window: RemoteWindow, **options: int) -> Any:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return connect(f"ws{server.url[4:]}/v1/windows/{window.id}/live?{query}")


def hear(socket: Any) -> dict[str, Any]:
    return dict(json.loads(socket.recv(timeout=60)))


def test_a_stream_is_the_window_that_slides_in_process(server: Server, window: RemoteWindow, engine: Engine) -> None:
    client = server.client()
    with (
        Window(engine, "You watch a camera.", BUDGET) as held,
        LiveStream(client, window.id, reserve_tokens=RESERVE) as live,
    ):
        live.tell("Name the color.")
        prompt = held.append(Chunk.text("Name the color.", pin=True))
        for i, pixels in enumerate(PIXELS):
            assert live.push(pixels, f"t={i} s", time=i / 2) == i + 2
            held.append(Chunk.image(pixels, text=f"t={i} s"))
            held.slide(reserve_tokens=RESERVE)
            held.maintenance.prefill()
            if i % 3 == 2:  # an answer is over all that was pushed before it
                ours, theirs = live.ask(question(i), 4), held.ask(question(i), 4)
                assert ours.token_ids == theirs.token_ids
                assert ours.usage.reused_tokens == theirs.usage.reused_tokens
                assert ours.usage.computed_tokens == ours.usage.prompt_tokens - held.tokens  # the question alone
        told = live.state.placed[-1]
        assert told["number"] == 13 and told["tokens"] == held.tokens and len(told["computed"]) == 1
        assert len(window.ids) == len(held.ids) and window.snapshot().placed[0].chunk_id == held.chunk(prompt).id
        # Looked back at: by time, then by id. Both make room, as `Window.look_back` does.
        back = live.recall(time=0.6)
        assert window.chunk(back).label == "t=0.5" and back in window.ids
        held.look_back(held.evicted[1], reserve_tokens=RESERVE)
        assert live.ask(question(1), 4).token_ids == held.ask(question(1), 4).token_ids
        gone = window.evicted[0]
        assert live.recall(gone) == gone and gone in window.ids
        assert "".join(live.stream(question(0), 4)) == live.ask(question(0), 4).text
        assert not live.state.failures and live.state.dropped == 0
        window.check()


def test_what_is_wrong_is_told_and_the_session_lives_on(server: Server, window: RemoteWindow) -> None:
    with LiveStream(server.client(), window.id) as live:
        live.push(b"no picture")
        live.push(PIXELS[0][:, :, 0:0].tobytes() + b"GIF89a")
        live.push(b"\x89PNG" * 60_000)
        live.push(PIXELS[0], "fine")
        live.settle()
        kinds = {number: type(error) for number, error in live.state.failures}  # in whichever order they are found
        assert kinds == {1: BadMedia, 2: BadMedia, 3: TooLarge}
        assert [told["number"] for told in live.state.placed] == [4]
        with pytest.raises(UnknownChunk, match="time"):
            live.recall(time=3.0)
        with pytest.raises(UnknownChunk):
            live.recall("none")
        with pytest.raises(ValueError, match="or a time"):
            live.recall()
        with pytest.raises(BudgetExceeded):
            live.ask("what?", 5000)
        for wrong, said in (
            ({"temprature": 1}, "temprature"),
            ({"max_tokens": "two"}, "max_tokens"),
            ({"query": "\ud800"}, "Unicode"),
        ):
            with pytest.raises(ValueError, match=said):  # a message that cannot be read is answered to its id
                live.ask(**{"query": "what?", "max_tokens": 2, **wrong})
        assert live.ask("what?", 2).text
    with socket_of(server, window) as socket:
        assert hear(socket)["type"] == "open"
        for sent, said in [
            ("{", "JSON"), ("[]", "malformed"), ("{}", "malformed: type must be given"), ('{"type": "ask"}', "query"),
            ('{"type": "jump"}', "type must be one of 'push', 'recall', 'ask', 'stop', got 'jump'"),
            (b"{x\npicture", "JSON"), (b'{"txt": "a"}\npicture', "txt must be left out"), (b"", "0 bytes"), ("", "malformed"),
            ('{"type": "push", "chunk": {"type": "image", "image": "http://x/y.png"}}', "URL"),
            ('{"type": "push", "chunk": {"type": "text", "text": "x"}, "time": "later"}', "number"),
        ]:  # fmt: skip
            socket.send(sent)
            assert said in hear(socket)["error"]["message"], sent
        for sent in ('{"type": "ask", "id": "q-7", "query": 3}', '{"id":"q-7","type":"recall","time":"noon"}'):
            socket.send(sent)
            assert hear(socket)["id"] == "q-7"
        socket.send('{"type": "push", "chunk": 3}')
        assert hear(socket)["number"] == 6  # four of the others were frames
        socket.send('{"type": "stop"}')  # of nothing
        socket.send(json.dumps({"type": "ask", "query": "what?", "max_tokens": 2}))
        assert hear(socket)["type"] == "text"


def test_a_frame_that_cannot_fit_leaves_the_window_as_it_was(server: Server, window: RemoteWindow) -> None:
    with LiveStream(server.client(), window.id, reserve_tokens=380) as live:
        live.tell("stays")
        live.push(PIXELS[0])
        live.settle()
        assert [type(error) for _, error in live.state.failures] == [BudgetExceeded]
        assert len(window.ids) == 1


def test_the_oldest_frame_that_waits_is_dropped_and_told(server: Server, window: RemoteWindow) -> None:
    with socket_of(server, window, waiting=2) as socket:
        assert hear(socket)["options"]["waiting"] == 2
        stream_turn = server.service.tenant_state("").streams.turn(window.id)
        with stream_turn:  # nothing can be placed meanwhile
            for i in range(6):
                head = {"text": f"{i}", "pin": i == 2}
                socket.send(json.dumps(head).encode() + b"\n" + png(PIXELS[i]))
                time.sleep(0.1)
            dropped = [hear(socket) for _ in range(3)]
        assert [(d["type"], d["number"], d["dropped"]) for d in dropped] == [
            ("dropped", 2, 1), ("dropped", 4, 2), ("dropped", 5, 3)
        ]  # fmt: skip
        placed = [hear(socket) for _ in range(3)]  # the first was being placed, the third is pinned
        assert [p["number"] for p in placed] == [1, 3, 6] and placed[-1]["dropped"] == 3
    metrics = server.service.metrics
    assert metrics.with_labels(metrics.live_frames, "", "dropped")._value.get() >= 3


def test_frames_are_placed_while_an_answer_is_given(
    server: Server, window: RemoteWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, go_on = server.engines[""], threading.Event()
    generate = engine.generate

    def slow(*args: Any, **options: Any) -> Any:  # an engine that batches: others run meanwhile
        while options["on_token"](1, "so far") and not go_on.wait(0.02):
            pass
        return generate(*args, **options)

    with socket_of(server, window) as socket:
        hear(socket)
        socket.send(png(PIXELS[0]))
        assert hear(socket)["type"] == "placed"
        monkeypatch.setattr(engine, "generate", slow)
        socket.send(json.dumps({"type": "ask", "id": "long", "query": question(0), "max_tokens": 4}))
        assert hear(socket) == {"type": "text", "id": "long", "text": "so far"}
        socket.send(png(PIXELS[1]))
        assert hear(socket)["type"] == "placed"
        socket.send(json.dumps({"type": "ask", "id": "long", "query": "again?"}))
        assert hear(socket)["error"]["code"] == "too_many_requests"
        socket.send(json.dumps({"type": "stop", "id": "long"}))
        assert hear(socket)["error"]["code"] == "engine_failed"
        assert len(window.ids) == 2  # a stopped answer leaves nothing behind
        socket.send(json.dumps({"type": "ask", "id": "other", "query": question(0), "max_tokens": 4}))
        hear(socket)
        go_on.set()
        while (told := hear(socket))["type"] == "text":
            pass
        assert told["answer"]["token_ids"] == list(window.ask(question(0), 4).token_ids)


def test_frames_by_http_and_plain_requests_beside_them(server: Server, window: RemoteWindow) -> None:
    path = f"/v1/windows/{window.id}/live?reserve_tokens={RESERVE}&history=2"
    for i, pixels in enumerate(PIXELS[:8]):
        spec = {"type": "push", "chunk": {"type": "text", "text": f"t={i}"}, "time": i}
        status, told = call(
            server, path, spec if i % 2 else png(pixels), content_type="application/json" if i % 2 else "image/png"
        )
        assert (status, told["type"]) == (200, "placed")
    assert len(window.evicted) <= 2  # history
    assert window.ask("what?", 2).text
    status, told = call(server, path, {"type": "recall", "time": 7.2})
    assert (status, told["time"]) == (200, 7.0)
    assert call(server, path, b"x", content_type="image/png")[1]["error"]["code"] == "bad_media"
    assert call(server, path, {"type": "ask", "query": "x"})[0] == 400
    assert call(server, path + "&waiting=0", {"type": "recall", "time": 1})[0] == 400
    assert call(server, "/v1/windows/none/live", png(PIXELS[0]), content_type="image/png")[0] == 404


def test_use_outside_of_the_with_block_says_so(server: Server, window: RemoteWindow) -> None:
    live = LiveStream(server.client(), window.id)
    texts: Any = iter(())

    def refused() -> None:
        for call_it in (lambda: live.push(png(PIXELS[0])), lambda: live.tell("x"), lambda: live.ask("q"), live.settle):
            with pytest.raises(EngineFailed, match="must be used within its with block"):
                call_it()
        with pytest.raises(EngineFailed, match="must be used within its with block"):
            next(live.stream("q"))

    refused()
    with live:
        with pytest.raises(TypeError, match="picture must be an encoded picture in bytes or an array, got NoneType"):
            live.push(None)  # type: ignore[arg-type]
        assert live.push(bytearray(png(PIXELS[0]))) == 1
        live.settle()
        texts = live.stream(question(0), 200, temperature=2.0, seed=1)
        next(texts)
    texts.close()
    refused()

    async def outside() -> None:
        stream = AsyncLiveStream(server.client(), window.id)
        for _ in range(2):
            with pytest.raises(EngineFailed, match=r"must be used within its with block|has ended"):
                await stream.push(png(PIXELS[0]))
            with (
                contextlib.nullcontext() if not stream.pushed else pytest.raises(EngineFailed, match="before 1 frames")
            ):
                await asyncio.wait_for(stream.settle(), 30)
            async with stream:
                pass

    asyncio.run(outside())


def test_frames_of_a_connection_that_broke_are_not_settled(server: Server, window: RemoteWindow) -> None:
    async def broken() -> None:
        async with AsyncLiveStream(server.client(), window.id) as live:
            await live.push(png(PIXELS[0]))
            await live.settle()
            with server.service.tenant_state("").streams.turn(window.id):  # nothing can be placed meanwhile
                await live.push(png(PIXELS[1]))
                assert live._socket is not None
                live._socket.transport.abort()
                with pytest.raises(EngineFailed, match="ended before 1 frames were settled"):
                    await asyncio.wait_for(live.settle(), 30)

    asyncio.run(broken())


def test_a_frame_that_no_server_takes_is_refused_and_the_stream_goes_on(server: Server, window: RemoteWindow) -> None:
    with LiveStream(server.client(), window.id) as live:
        with pytest.raises(TooLarge, match=r"at most 16777216 bytes, got 1677\d+; send it as JPEG"):
            live.push(bytes(16 << 20))
        with pytest.raises(BadMedia, match=r"must not be empty, got an array of shape \(0, 4, 3\)"):
            live.push(np.zeros((0, 4, 3), dtype=np.uint8))
        live.push(PIXELS[0], time=np.float32(1.5))  # type: ignore[arg-type]
        live.push(PIXELS[1], time=np.int64(2), label="door")  # type: ignore[arg-type]
        live.settle()
        assert [told["number"] for told in live.state.placed] == [1, 2]
        assert [window.chunk(live.recall(time=at)).label for at in (1.9, 1.6)] == ["t=2.0 door", "t=1.5"]


def test_a_stream_is_opened_for_a_window_of_ones_own(server: Server, window: RemoteWindow) -> None:
    client = server.client()
    with pytest.raises(UnknownWindow), LiveStream(client, "none"):
        pass
    with pytest.raises(ValueError, match="waiting"), LiveStream(client, window.id, waiting=1000):
        pass
    with pytest.raises(TooManyRequests, match="live connections"):
        lives = [LiveStream(client, window.id) for _ in range(5)]
        try:
            for live in lives:
                live.__enter__()
        finally:
            for live in lives:
                live.__exit__()
    assert not server.service.tenant_state("").streams._known


def test_tenants_have_streams_of_their_own() -> None:
    tenants = [Tenant(name=name, keys=[f"key-{name}"], max_windows=1) for name in ("acme", "bolt")]
    with serving(Limits(), tenants) as server, RemoteWindow(server.client("key-acme"), budget=400) as window:
        with LiveStream(server.client("key-acme"), window.id) as live:
            live.push(PIXELS[0])
            live.settle()
            assert len(live.state.placed) == 1
            with pytest.raises(UnknownWindow), LiveStream(server.client("key-bolt"), window.id):
                pass
        with pytest.raises(CtxwinError, match="API key must be one"), LiveStream(server.client("key-none"), window.id):
            pass
        assert server.service.body_bytes._held.total() == 0


def test_async_code_streams_and_leaves_early(server: Server, window: RemoteWindow) -> None:
    async def watch() -> str:
        async with AsyncLiveStream(server.client(), window.id) as live:
            for i in range(3):
                await live.push(png(PIXELS[i]), f"t={i} s", time=i)
            text = await live.ask(question(2), 4)
            stream = live.stream("what?", 150)
            async for _ in stream:
                break
            await stream.aclose()
            await live.settle()
            assert len(live.placed) == 3
            again = await live.ask(question(2), 4)
            assert again.token_ids == text.token_ids
        return text.text

    assert asyncio.run(watch()) == window.ask(question(2), 4).text


def test_a_client_that_leaves_gives_everything_back(server: Server, window: RemoteWindow) -> None:
    for _ in range(3):
        with socket_of(server, window) as socket:
            hear(socket)
            for pixels in PIXELS[:4]:
                socket.send(png(pixels))
            socket.send(json.dumps({"type": "ask", "query": "what?", "max_tokens": 150}))
    until = time.monotonic() + 20
    while server.service.body_bytes._held.total() or server.service.tenant_state("").streams._known:
        assert time.monotonic() < until
        time.sleep(0.02)
    window.check()
    assert window.ask("what?", 2).text
