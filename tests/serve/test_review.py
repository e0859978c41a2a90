"""What a client could do to a server or to itself: bombs, retries that overlap, snapshots that lie, clients that leave."""

from __future__ import annotations

import base64
import http.client
import io
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ctxwin import Chunk
from ctxwin.adapters.openai import upload
from ctxwin.serve.errors import NotAllowed
from ctxwin.serve.gate import _bound_body
from ctxwin.serve.limits import Limits
from ctxwin.serve.service import Results
from ctxwin.serve.tenants import Tenant
from ctxwin.window import ask as asking
from serve.serving import Server, serving
from serve.test_routes import call, png, read_metrics, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_pixels=100_000, max_windows=8, window_ttl_s=1000)) as running:
        yield running


def opened(server: Server, **body: object) -> str:
    return str(call(server, "/v1/windows", {"system_prompt": "h", **body})[1]["id"])


def picture(side: int, shade: int = 0) -> str:
    return base64.b64encode(png(np.full((side, side, 3), shade, np.uint8))).decode()


def test_the_pixels_of_a_request_are_bounded_over_its_chunks(server: Server) -> None:
    """Pictures of one color are small until they are decoded, and all of a request's are held at once."""
    images = [{"type": "image", "image": picture(200, shade)} for shade in range(3)]  # 40 000 pixels each
    window = opened(server)
    status, answer = call(server, f"/v1/windows/{window}/extend", {"chunks": images})
    assert (status, answer["error"]["code"]) == (413, "too_large")
    named = call(server, "/v1/chunks", {"type": "text", "text": "x"})[1]["id"]
    urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{i['image']}"}} for i in images]
    content = [{"type": "ctxwin_chunk", "chunk": named}, *urls, {"type": "text", "text": "?"}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, answer = call(server, "/v1/chat/completions", asked)
    assert (status, answer["error"]["code"]) == (413, "too_large")


def test_a_request_that_is_sent_again_while_it_runs_waits_for_its_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official client does so after a timeout; the first one may end in the meantime, or fail."""
    window = opened(server)
    path, body = f"/v1/windows/{window}/append", {"chunk": {"type": "text", "text": "once"}}
    engine = server.engines[""]
    encode, inside, go = engine.encode, threading.Event(), threading.Event()

    def slow(chunk: Chunk) -> Any:
        inside.set()
        assert go.wait(30)
        return encode(chunk)

    monkeypatch.setattr(engine, "encode", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(call, server, path, body, idempotency_key="k")
        assert inside.wait(30)
        again = pool.submit(call, server, path, body, idempotency_key="k")
        time.sleep(0.3)  # time to be refused, or to do it twice
        go.set()
        assert first.result() == again.result()
        assert first.result()[0] == 200
    assert len(call(server, f"/v1/windows/{window}")[1]["ids"]) == 1


def test_a_key_stands_for_one_body(server: Server) -> None:
    path = f"/v1/windows/{opened(server)}/append"
    bodies = [{"chunk": {"type": "text", "text": text}} for text in ("a", "b")]
    assert call(server, path, bodies[0], idempotency_key="one")[0] == 200
    status, answer = call(server, path, bodies[1], idempotency_key="one")
    assert status == 400 and "another body" in answer["error"]["message"]


def test_results_are_bounded_whatever_the_keys() -> None:
    """An answer may have two bytes, and its key as many as a system prompt takes."""
    results = Results(most=100_000)
    for i in range(1000):
        results.once("/p", f"{i}" * 1000, b"", lambda: b"{}")
    assert len(results._kept) < 1000 and not results._turns
    assert sum(len(name) + len(asked) + len(raw) for name, (asked, raw) in results._kept.items()) < 100_000
    with pytest.raises(ZeroDivisionError):
        results.once("/p", "failed", b"", lambda: b"%d" % (1 // 0))
    assert results.once("/p", "failed", b"", lambda: b"done") == b"done"
    assert results.once("/p", "failed", b"", lambda: b"done again") == b"done"


@pytest.mark.parametrize(
    "lie",
    [
        lambda s: s["placed"][0].update(tokens=-100),  # room for more than the budget
        lambda s: s["placed"][0].update(advance=-50),  # positions below 0 reach the engine
        lambda s: s["placed"][0].update(advance=10**7),
        lambda s: s.update(system_prompt_advance=-(10**6)),
        lambda s: s.update(system_prompt_tokens=-(10**6)),
        lambda s: s.update(placed=s["placed"] * 2),
        lambda s: s["placed"][0].update(chunk_id="0" * 64),
        lambda s: s.update(budget=-5),
        lambda s: s.update(budget=6),
        lambda s: s.update(arrivals=-3),
        lambda s: s["placed"][0]["chunk"].update(parts=[{"kind": "tokens", "ids": [10**8]}]),
    ],
)
def test_a_snapshot_that_lies_is_refused(server: Server, snapshot: str, lie: Callable[[Any], None]) -> None:
    data = json.loads(snapshot)
    lie(data)
    status, answer = call(server, "/v1/windows", {"snapshot": data})
    assert (status, answer.get("error", {}).get("code")) == (400, "invalid_value"), answer


def test_a_snapshot_that_does_not_is_taken(server: Server, snapshot: str) -> None:
    status, answer = call(server, "/v1/windows", {"snapshot": json.loads(snapshot)})
    assert (status, answer["tokens"]) == (200, json.loads(snapshot)["system_prompt_tokens"] + 4)


@pytest.fixture(scope="module")
def snapshot(server: Server) -> str:
    window = opened(server, budget=500)
    call(server, f"/v1/windows/{window}/append", {"chunk": {"type": "text", "text": "hello there"}})
    return json.dumps(call(server, f"/v1/windows/{window}/snapshot")[1])


def test_a_client_that_leaves_before_the_first_token_stops_its_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the answer, so nothing may come of it: a client that timed out asks again."""
    window = opened(server, budget=4000)
    windows, ask = server.service.space("").windows, asking.ask
    inside, go = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        inside.set()
        assert go.wait(30)
        return ask(*args, **options)

    monkeypatch.setattr(asking, "ask", slow)
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    body = {"query": "go on", "max_tokens": 3000, "remember": True, "temperature": 2.0, "seed": 1, "stream": True}
    connection.request("POST", f"/v1/windows/{window}/ask", json.dumps(body))
    assert inside.wait(30)
    connection.close()
    time.sleep(0.3)  # the server hears of it
    go.set()
    wait_for(lambda: windows._held[window].users == 0)
    assert not call(server, f"/v1/windows/{window}")[1]["ids"]  # an answer of 3000 tokens would have been remembered


def test_names_of_requests_and_media_are_a_tenants_own() -> None:
    """vLLM keeps responses by the request id that a client may choose, and media by their uuid, for all tenants."""

    def bound(tenant: str, name: Any) -> tuple[Any, Any]:
        image = {"type": "image_url", "image_url": {"url": "http://host/cat.png"}, "uuid": name}
        body = {"request_id": name, "messages": [{"role": "user", "content": [image]}]}
        made = json.loads(_bound_body(body, tenant, "salt"))
        return made["request_id"], made["messages"][0]["content"][0]["uuid"]

    for name in ("resp_1", "", 5, ["x"]):
        one, other = bound("acme", name), bound("bolt", name)
        assert not {*one} & {*other} and one == bound("acme", name)
    assert bound("", "resp_1") == ("resp_1", "resp_1")


def test_pictures_that_are_decoded_or_run_before_their_size_is_known_are_refused(server: Server) -> None:
    """An icon names a size in front and holds a PNG of any other, which Pillow decodes to open it."""
    inner = png(np.zeros((1000, 1000, 3), np.uint8))
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    for raw in (icon, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"):
        status, answer = call(server, "/v1/chunks", {"type": "image", "image": base64.b64encode(raw).decode()})
        assert (status, answer.get("error", {}).get("code")) == (400, "bad_media"), answer


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_pictures_of_the_usual_formats_are_taken(server: Server, kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(buffer, kind)
    image = base64.b64encode(buffer.getvalue()).decode()
    assert call(server, "/v1/chunks", {"type": "image", "image": image})[0] in (200, 201)


def test_a_body_that_is_nested_without_end_is_malformed(server: Server) -> None:
    body = b"[" * 100_000 + b"]" * 100_000
    assert call(server, "/v1/windows", body)[0] == 400
    named = b'{"messages": [{"content": [{"type": "ctxwin_chunk"}]}], "x": %s}' % body
    status, answer = call(server, "/v1/chat/completions", named)
    assert (status, answer["error"]["code"]) == (400, "invalid_value")


def test_plain_requests_and_metrics_do_not_wait_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go = threading.Event(), threading.Event()
    tenant = {"authorization": "Bearer key-a"}
    with serving(Limits(threads=1), [Tenant(name="acme", keys=["key-a"])]) as server, ThreadPoolExecutor() as pool:

        def slow(_: Chunk) -> Any:
            inside.set()
            assert go.wait(60)

        monkeypatch.setattr(server.engines["acme"], "encode", slow)
        busy = pool.submit(call, server, "/v1/chunks", {"type": "text", "text": "x"}, **tenant)
        try:
            assert inside.wait(30)
            plain = pool.submit(call, server, "/v1/chat/completions", {"messages": []}, **tenant)
            assert plain.result(10)[0] == 200
            assert "ctxwin_windows_open" in str(pool.submit(read_metrics, server).result(10))
        finally:
            go.set()
            busy.result()


def test_what_the_server_has_lost_is_uploaded_again(server: Server) -> None:
    """A chat names chunks without a window that would notice: `upload` has to ask, whatever it did before."""
    client = server.client(max_retries=0)
    for chunk in (Chunk.text("lost"), Chunk.image(np.full((32, 32, 3), 9, np.uint8))):
        assert upload(client, chunk) == chunk.id
        assert call(server, f"/v1/chunks/{chunk.id}", method="DELETE")[0] == 200
        assert upload(client, chunk) == chunk.id
        assert call(server, f"/v1/chunks/{chunk.id}")[0] == 200


def test_a_tenant_without_a_salt_gets_no_shared_blocks() -> None:
    with pytest.raises(NotAllowed):
        _bound_body({"messages": []}, "acme", "")
    assert json.loads(_bound_body({"messages": []}, "", "")) == {"messages": []}
