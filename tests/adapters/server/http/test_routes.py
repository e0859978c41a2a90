"""The routes over plain HTTP: uploads, limits, retries, chats, metrics; and windows that are put aside and come back."""

from __future__ import annotations

import base64
import http.client
import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from openai import ConflictError, OpenAI
from PIL import Image

from adapters.server.calls import call, png, read_metrics, wait_for
from adapters.server.serving import Server, serving
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.errors import ChunkUnavailable, ReadOnlyWindow, StaleOwner, WindowBusy
from ctxwin.tiny import world
from ctxwin.window.ask import until_stop
from ctxwin.window.stream import TextDelta
from ctxwin_client import RemoteWindow, chunk_part, upload
from ctxwin_client.errors import Quarantined, TooManyWindows, UnknownWindow
from ctxwin_server.protocol.limits import Limits

FRAMES = world.make_stream(seed=9, n_frames=6)
CHUNKS = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(FRAMES)]
QUESTION = f"color of {FRAMES[2].marks[0]:02d}?"
PIXELS = np.arange(36 * 48 * 3, dtype=np.uint8).reshape(36, 48, 3)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_upload_bytes=200_000, max_pixels=100_000, max_windows=3, window_ttl_s=1000)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client(max_retries=0)


def multipart(**parts: bytes) -> tuple[bytes, str]:
    rows = []
    for name, value in parts.items():
        kind = f'; filename="{name}"\r\nContent-Type: image/png' if value[:4] == b"\x89PNG" else ""
        rows.append(
            b'--edge\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
            % (name.encode(), kind.encode(), value)
        )
    return b"".join(rows) + b"--edge--\r\n", "multipart/form-data; boundary=edge"


def test_what_passes_may_be_sent_again(server: Server, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official client repeats a conflict unless it is told not to."""
    windows = server.service.tenant_state("").windows
    with RemoteWindow(client, "You watch a camera.") as window:
        for error, said in ((WindowBusy, None), (StaleOwner, None), (ReadOnlyWindow, "false")):
            monkeypatch.setattr(windows, "run_once", Mock(side_effect=error("not now")))
            with pytest.raises(error) as raised:
                window.append(Chunk.text("x"))
            response = raised.value.__cause__.response  # type: ignore[union-attr]
            assert response.status_code == 409 and response.headers.get("x-should-retry") == said
        monkeypatch.undo()
        window.append(Chunk.text("x"))
    quarantined = Mock(side_effect=Quarantined("it ended the engine"))  # as the middleware says for a plain chat
    monkeypatch.setattr(server.service.quarantine, "running_async", quarantined)
    with pytest.raises(ConflictError) as refused:
        client.chat.completions.create(model="tiny", messages=[])
    assert refused.value.response.headers.get("x-should-retry") == "false"


def test_a_count_says_what_its_edits_save(server: Server) -> None:
    turns: list[Any] = [{"role": "user", "content": "look"}]
    turns += [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}]
    turns += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "long " * 100}]}]
    body = {
        "model": "tiny",
        "messages": [*turns, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}],
    }
    none_kept = {"trigger": {"type": "tool_uses", "value": 0}, "keep": {"type": "tool_uses", "value": 0}}
    edits = {"edits": [{"type": "clear_tool_uses_20250919", **none_kept}]}
    _, whole = call(server, "/v1/messages/count_tokens", body)
    assert whole["context_management"]["original_input_tokens"] == whole["input_tokens"]
    status, edited = call(server, "/v1/messages/count_tokens", {**body, "context_management": edits})
    assert status == 200 and edited["input_tokens"] < whole["input_tokens"] - 300
    cleared = edited["context_management"]["original_input_tokens"] - edited["input_tokens"]
    assert cleared == pytest.approx(len(server.engines[""].text_ids("long " * 100)), rel=0.1)  # by the model's tokens


def test_an_upload_is_idempotent_by_content(server: Server) -> None:
    data = base64.b64encode(png(PIXELS)).decode()
    first = call(server, "/v1/chunks", {"type": "image", "image": data, "text": "a"})
    url = f"data:image/png;base64,{data}"
    second = call(server, "/v1/chunks", {"type": "image", "image": url, "text": "a", "label": "again"})
    assert (first[0], second[0]) == (201, 200)
    assert first[1]["id"] == second[1]["id"] == Chunk.image(PIXELS, text="a").id
    assert call(server, f"/v1/chunks/{first[1]['id']}")[1] == first[1]
    assert call(server, f"/v1/chunks/{first[1]['id']}", method="DELETE")[1]["deleted"]
    assert call(server, f"/v1/chunks/{first[1]['id']}")[0] == 404
    content = Chunk.image(PIXELS).media[0].content
    assert not any(content in key for key in server.engines[""].store.list("source/"))
    assert not list(server.engines[""].store.list("embed/"))


def test_a_picture_comes_as_a_form_too(server: Server) -> None:
    body, kind = multipart(file=png(PIXELS), text=b"b")
    assert call(server, "/v1/chunks", body, content_type=kind)[1]["id"] == Chunk.image(PIXELS, text="b").id
    fields = {"priority": b"3", "pin": b"true", "keep_source": b"false", "as_frames": b"false", "label": b"7"}
    body, kind = multipart(file=png(PIXELS), text=b"5", **fields)  # fields of a form are text
    status, made = call(server, "/v1/chunks", body, content_type=kind)
    assert (status, made["id"]) == (201, Chunk.image(PIXELS, text="5").id)
    for name, value, reason in (("priority", b"x", "valid integer"), ("prioritee", b"3", "prioritee")):
        body, kind = multipart(file=png(PIXELS), **{name: value})
        status, made = call(server, "/v1/chunks", body, content_type=kind)
        assert status == 400 and reason in made["error"]["message"]
    spec = {"type": "video", "frames": [{"file": "x"}, {"file": "y"}], "fps": 1.5}
    body, kind = multipart(chunk=json.dumps(spec).encode(), x=png(PIXELS), y=png(PIXELS[::-1]))
    made = call(server, "/v1/chunks", body, content_type=kind)
    assert made[1]["id"] == Chunk.video([PIXELS, PIXELS[::-1]], fps=1.5).id


def test_deleting_one_upload_leaves_pixels_that_another_shows(server: Server, client: OpenAI) -> None:
    pixels = PIXELS[:, ::-1].copy()
    one, other = upload(client, Chunk.image(pixels)), upload(client, Chunk.image(pixels, text="other"))
    call(server, f"/v1/chunks/{one}", method="DELETE")
    assert call(server, f"/v1/chunks/{other}")[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"type": "image", "image": "/etc/passwd"}, 400, "bad_media"),
        ({"type": "image", "image": "http://10.0.0.1/x.png"}, 400, "bad_media"),
        ({"type": "image", "image": ""}, 400, "bad_media"),
        ({"type": "image", "image": base64.b64encode(b"no picture").decode()}, 400, "bad_media"),
        ({"type": "image", "image": {"file": "none"}}, 400, "invalid_value"),
        ({"type": "image", "image": base64.b64encode(png(np.zeros((400, 400, 3), np.uint8))).decode()}, 413, "too_large"),
        ({"type": "text", "text": ""}, 400, "invalid_value"),
        ({"type": "text", "text": "x", "id": "0" * 64}, 400, "invalid_value"),
        ({"type": "text", "text": "x", "source": "/etc/passwd"}, 400, "invalid_value"),
        ({"type": "tokens", "ids": [-1]}, 400, "invalid_value"),
        ({"type": "song"}, 400, "invalid_value"),
        ({"type": "ctxwin_chunk", "chunk": "../../x"}, 404, "unknown_upload"),
        ([], 400, "invalid_value"),
        (b"{", 400, "invalid_value"),
        (b" " * 300_000, 413, "too_large"),
    ],
)  # fmt: skip
def test_bad_uploads_are_refused_with_their_reason(server: Server, body: Any, status: int, code: str) -> None:
    got, answer = call(server, "/v1/chunks", body)
    assert (got, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"] and "Traceback" not in answer["error"]["message"]


def test_a_request_that_is_sent_again_is_done_once(server: Server) -> None:
    made = [call(server, "/v1/windows", {"system_prompt": "h"}, idempotency_key="open-1")[1]["id"] for _ in range(2)]
    assert made[0] == made[1]
    path, body = f"/v1/windows/{made[0]}/append", {"chunk": {"type": "text", "text": "once"}}
    first, again = (call(server, path, body, idempotency_key="k1")[1]["placement"] for _ in range(2))
    other = call(server, path, body, idempotency_key="k2")[1]["placement"]
    assert first == again != other
    assert call(server, f"/v1/windows/{made[0]}")[1]["ids"] == [first, other]
    asked = {"query": "what?", "max_tokens": 2, "remember": True}
    twice = [call(server, f"/v1/windows/{made[0]}/ask", asked, idempotency_key="k3")[1]["remembered"] for _ in range(2)]
    assert twice[0] == twice[1] is not None
    call(server, f"/v1/windows/{made[0]}", method="DELETE")


def test_an_answer_carries_its_audit_to_who_waits_for_it(client: OpenAI, server: Server) -> None:
    asked = {"query": QUESTION, "max_tokens": 2}
    with RemoteWindow(client, "h", 4000, Fidelity("blind", audit=1.0)) as window:
        window.extend(CHUNKS[:3])
        path = f"/v1/windows/{window.id}/ask"
        assert call(server, path, asked)[1]["audit"] is None
        found = call(server, path, {**asked, "audit_within": 30})[1]
        assert found["audit"] > 0 and not found["usage"]["exact"]
        streamed = window.stream(QUESTION, 2, audit_within=30)  # type: ignore[call-arg]
        assert "".join(streamed) == found["text"] and streamed.answer is not None
        assert streamed.answer.audit == pytest.approx(found["audit"])
    with RemoteWindow(client, "h", 4000, Fidelity("exact")) as window:  # nothing is due, so nobody waits
        window.extend(CHUNKS[:1])
        began = time.monotonic()
        assert call(server, f"/v1/windows/{window.id}/ask", {**asked, "audit_within": 30})[1]["audit"] is None
        assert time.monotonic() - began < 25
    status, told = call(server, f"/v1/windows/{window.id}/ask", {**asked, "audit_within": 31})
    assert status == 400 and "audit_within" in told["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_answer(
    client: OpenAI, server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteWindow(client, "h", 4000) as window:
        ids = window.extend(CHUNKS[:2])
        with server.service.tenant_state("").windows.using(window.id) as local:
            engine: Any = local.engine
        plain = engine._checkpoint
        # An answer that goes on for half a minute.
        monkeypatch.setattr(engine, "_checkpoint", replace(plain, eos=frozenset()))
        body = {"query": "go on", "max_tokens": 3500, "remember": True, "temperature": 2.0, "seed": 1, "stream": stream}
        address = server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(address)
        connection.request("POST", f"/v1/windows/{window.id}/ask", json.dumps(body))
        windows = server.service.tenant_state("").windows
        wait_for(lambda: windows._entries[window.id].users == 1)
        connection.close()
        left = time.monotonic()
        wait_for(lambda: windows._entries[window.id].users == 0)
        assert time.monotonic() - left < 10
        monkeypatch.setattr(engine, "_checkpoint", plain)
        assert list(window.ids) == ids and window.ask(QUESTION, 2).text


def test_a_snapshot_cannot_make_the_server_read_files(client: OpenAI, server: Server, tmp_path: Path) -> None:
    Image.fromarray(255 - PIXELS).save(tmp_path / "secret.png")
    with open_engine("tiny:hf") as engine, Window(engine, "h") as local:
        local.append(Chunk.image(tmp_path / "secret.png"))
        state = local.snapshot()
    assert state.placed[0].chunk.source is not None
    with RemoteWindow.restore(client, state) as remote:
        kept = server.service.tenant_state("").windows
        with kept.using(remote.id) as window:
            assert window.snapshot().placed[0].chunk.source is None
        with pytest.raises(ChunkUnavailable):
            remote.ask(QUESTION, 2)


def test_idle_windows_are_put_aside_and_come_back(
    client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = server.service.tenant_state("").windows
    with RemoteWindow(client, "h", 900) as window:
        ids = window.extend(CHUNKS[:3])
        window.evict(ids[0])
        before = window.ask(QUESTION, 3)
        with monkeypatch.context() as patch:
            patch.setattr(windows, "_limits", replace(windows._limits, window_ttl_s=1e-9))
            assert windows.sweep() >= 1 and len(windows) == 0
        assert window.ids == tuple(ids[1:]) and window.evicted == (ids[0],)
        assert window.ask(QUESTION, 3).text == before.text
        assert window.recall(ids[0]) == 0
        window.check()
    with pytest.raises(UnknownWindow):
        RemoteWindow.attach(client, window.id)


def test_the_oldest_idle_window_makes_room(client: OpenAI, server: Server) -> None:
    windows = server.service.tenant_state("").windows
    made = [RemoteWindow(client, f"system prompt {i}") for i in range(5)]
    assert len(windows) == 3
    assert [w.system_prompt for w in map(lambda w: RemoteWindow.attach(client, w.id), made)] == [
        w.system_prompt for w in made
    ]
    with (
        windows.using(made[0].id), windows.using(made[1].id), windows.using(made[2].id),
        pytest.raises(TooManyWindows, match="all 3"),
    ):  # fmt: skip
        RemoteWindow(client, "one more")
    for window in made:
        window.close()
    assert len(windows) == 0 and not list(server.engines[""].store.list("window/"))


@pytest.mark.parametrize("failure", [lambda *_, **__: False, OSError("no space left")])
def test_windows_stay_where_the_store_takes_no_snapshot(
    client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    """A full disk lost the windows that it should have kept."""
    windows = server.service.tenant_state("").windows
    broken = Mock(side_effect=failure)
    monkeypatch.setattr(windows.records, "commit", broken)
    made = [RemoteWindow(client, f"system prompt {i}") for i in range(3)]
    assert broken.call_count >= 3
    monkeypatch.setattr(windows, "_limits", replace(windows._limits, window_ttl_s=1e-9))
    assert windows.sweep() == 0
    with pytest.raises(TooManyWindows, match="no more snapshots"):
        RemoteWindow(server.client(max_retries=0), "one more")
    assert [RemoteWindow.attach(client, w.id).system_prompt for w in made] == [w.system_prompt for w in made]
    monkeypatch.undo()
    for window in made:
        window.close()
    assert len(windows) == 0


def test_closing_gives_every_lease_back() -> None:
    with serving() as server:
        client = server.client()
        window = RemoteWindow(client, "h")
        window.extend(CHUNKS[:2])
        window.ask(QUESTION, 2)
        window.fork().append(CHUNKS[2])
        store = server.service.tenant_state("").engine.repo.store
        assert store.stats().leased > 0
    assert store.stats().leased == 0


def test_windows_outlive_the_server_on_a_durable_store(tmp_path: Path) -> None:
    url = f"disk:{tmp_path / 'kv'}"
    with serving(store=url) as server:
        window = RemoteWindow(server.client(), "h", 900)
        window.extend(CHUNKS[:3])
        before = window.ask(QUESTION, 3)
    with serving(store=url) as server:
        same = RemoteWindow.attach(server.client(), window.id)
        after = same.ask(QUESTION, 3)
        assert after.text == before.text and same.ids
        assert after.usage.computed_tokens < before.usage.computed_tokens / 3
        assert server.engines[""].counters.vision_encodes == 0
        assert upload(server.client(), CHUNKS[0]) == CHUNKS[0].id


@pytest.mark.parametrize(
    "change",
    [
        {"n": 200, "best_of": 2, "response_format": {"type": "text"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"messages": [{"role": "tool", "content": "yes", "tool_call_id": "1"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    ],
)
def test_a_chat_of_chunks_reaches_vllm_with_their_content(
    client: OpenAI, server: Server, change: dict[str, Any]
) -> None:
    image = Image.fromarray(np.full((4, 6, 3), 77, np.uint8))
    ids = [upload(client, Chunk.image(image, text="t=0 s")), upload(client, Chunk.text("a text"))]
    (message,) = [{"role": "user", "content": [*map(chunk_part, ids), {"type": "text", "text": "?"}]}]
    body = {"model": "tiny", **change, "messages": [*change.get("messages", ()), message]}
    assert call(server, "/v1/chat/completions", body) == (200, {"plain": True})
    passed = server.passed.pop()
    first, picture, second, last = passed["messages"][-1]["content"]
    assert [first, second, last] == [{"type": "text", "text": t} for t in ("t=0 s\n", "a text", "?")]
    shown = Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].partition(",")[2])))
    assert np.array_equal(np.asarray(shown), np.asarray(image))
    assert {**passed, "messages": None} == {**body, "messages": None} and passed["messages"][:-1] == body["messages"][
        :-1
    ]


def test_a_chunk_that_no_chat_can_hold_is_named(client: OpenAI, server: Server) -> None:
    video = Chunk.video([PIXELS, PIXELS[::-1]], fps=1.5)
    for chunk, what in [
        (Chunk.tokens([40, 41]), "token ids"), (Chunk.message("user", "hello"), "a message"), (video, "video media"),
    ]:  # fmt: skip
        body = {"model": "tiny", "messages": [{"role": "user", "content": [chunk_part(upload(client, chunk))]}]}
        status, answer = call(server, "/v1/chat/completions", body)
        assert status == 400 and f"got {what}; place it in a window" in answer["error"]["message"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": [chunk_part("1" * 64)]}]}
    status, answer = call(server, "/v1/chat/completions", body)
    assert status == 404 and "upload it first" in answer["error"]["message"]
    assert not server.passed


def test_a_plain_chat_is_passed_on_as_it_came(server: Server) -> None:
    for text in ("hello", 'say "ctxwin_chunk"'):
        body = {"messages": [{"role": "user", "content": text}], "cache_salt": "mine", "anything": 1}
        assert call(server, "/v1/chat/completions", body) == (200, {"plain": True})
        assert server.passed.pop() == body


@pytest.mark.parametrize("stops", [("END",), ("\n\n", "b"), ("aa",), ("x", "xy")])
def test_stops_cut_alike_however_a_text_arrives(stops: tuple[str, ...]) -> None:
    text = "a\nxENb\n\nENDaab"
    whole = text[: min((text.find(s) for s in stops if s in text), default=99)]
    for step in (1, 2, 3):
        delta, heard = TextDelta(), ""
        for end in range(step, len(text) + step, step):
            heard += delta.feed(until_stop(text[:end], stops, last=end >= len(text))[0])
        assert heard == until_stop(text, stops, last=True)[0] == whole


def test_metrics_count_what_happened() -> None:
    with serving() as server:
        client = server.client()
        with RemoteWindow(client, "h", 900) as window:
            ids = window.extend(CHUNKS[:3])
            one = window.ask(QUESTION, 2).usage
            window.evict(ids[0])
            two = window.ask(QUESTION, 2).usage
            found = read_metrics(server)
            with pytest.raises(ValueError, match="count"):
                window.slide(-1)
            _, answer = call(server, f"/v1/windows/{window.id}/slide", {"to": 2.5})
            assert "malformed: to must be < 1 or a valid integer, got 2.5" in answer["error"]["message"]
        assert found["ctxwin_asks_total"] == 2
        assert found["ctxwin_windows_open"] == 1
        assert found["ctxwin_computed_tokens_total"] == one.computed_tokens + two.computed_tokens
        for lane in {*one.reused_tokens, *two.reused_tokens}:
            tokens = one.reused_tokens.get(lane, 0) + two.reused_tokens.get(lane, 0)
            assert found[f'ctxwin_prompt_tokens_total{{lane="{lane}"}}'] == tokens
        assert found["ctxwin_loaded_bytes_total"] == two.bytes_loaded > 0 and found["ctxwin_loads_total"] == 1
        assert found["ctxwin_vision_encodes_total"] == 3
        assert found["ctxwin_vision_encodes_saved_total"] == 3 + 2 - 3
        assert found['ctxwin_store_reads_total{result="hit",tier="0-memory"}'] > 0
        after = read_metrics(server)
        assert after["ctxwin_windows_open"] == 0 and after['ctxwin_errors_total{code="invalid_value"}'] == 2


def test_many_windows_at_once(client: OpenAI, server: Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with serving(Limits(threads=4)) as running:
        shared = running.client()

        def one(i: int) -> str:
            with RemoteWindow(shared, "h", 900) as window:
                window.extend(CHUNKS[i % 3 : i % 3 + 2])
                return window.ask(QUESTION, 2).text

        began = time.monotonic()
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(one, range(12)))
        assert answers[:3] * 4 == answers
        assert time.monotonic() - began < 60


def test_what_the_server_has_lost_is_uploaded_again(server: Server) -> None:
    """A chat names chunks without a window that would notice: `upload` has to ask, whatever it did before."""
    client = server.client(max_retries=0)
    for chunk in (Chunk.text("lost"), Chunk.image(np.full((32, 32, 3), 9, np.uint8))):
        assert upload(client, chunk) == chunk.id
        assert call(server, f"/v1/chunks/{chunk.id}", method="DELETE")[0] == 200
        assert upload(client, chunk) == chunk.id
        assert call(server, f"/v1/chunks/{chunk.id}")[0] == 200
