"""Tenants of ``ctxwin serve`` with vLLM: what one of them does reaches no other, and nothing that is not opened is reached."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

from adapters.server.calls import call
from adapters.server.vllm.processes import Process
from adapters.server.vllm.program import CHUNKS, HEADER, cached, plain_messages, question
from ctxwin import Chunk, Fidelity
from ctxwin_client import RemoteWindow
from ctxwin_client.errors import UnknownWindow
from ctxwin_server.app.endpoints import PLAIN, is_ours


def test_tenants_share_nothing(server: Process) -> None:
    acme, bolt, before = server.client("key-acme"), server.client("key-bolt"), server.metrics()
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    talk: list[Any] = [{"role": "user", "content": "a long story of a long day " * 20}]
    first, second = (acme.chat.completions.create(**asked, messages=talk) for _ in range(2))
    assert cached(first) == 0 and cached(second) > 64
    assert cached(bolt.chat.completions.create(**asked, messages=talk)) == 0
    guessed = {"cache_salt": "acme"}
    assert cached(bolt.chat.completions.create(**asked, messages=talk, extra_body=guessed)) == 0
    with RemoteWindow(acme, HEADER, 1500) as window:
        window.extend(CHUNKS[:3])
        window.ask(question(1), 3)
        for attach in (
            lambda: RemoteWindow.attach(bolt, window.id),
            lambda: RemoteWindow.attach(server.client(), window.id),
        ):
            with pytest.raises(UnknownWindow):
                attach()
    with RemoteWindow(bolt, HEADER, 1500) as other:
        other.extend(CHUNKS[:3])
        usage = other.ask(question(1), 3).usage
        assert usage.computed_tokens == usage.prompt_tokens and usage.cached_tokens == 0
    after = server.metrics()
    for name in (f'ctxwin_vision_encodes_total{{tenant="{tenant}"}}' for tenant in ("acme", "bolt")):
        assert after[name] - before.get(name, 0.0) == 3


def test_a_tenants_pictures_are_seen_on_every_endpoint(server: Process) -> None:
    """Whose they are changes the keys of caches, not the answer."""
    system, user = plain_messages([1, 2], question(2))
    blocks, items = [], []
    for part in user["content"]:
        url = part.get("image_url", {}).get("url", "")
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        blocks.append({"type": "image", "source": source} if url else part)
        items.append({"type": "input_image", "image_url": url} if url else {**part, "type": "input_text"})
    common = {"model": "tiny", "temperature": 0}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [system, user], "max_tokens": 4},
        "/v1/messages": {"system": HEADER, "messages": [{"role": "user", "content": blocks}], "max_tokens": 4},
        "/v1/responses": {
            "instructions": HEADER,
            "input": [{"role": "user", "content": items}],
            "max_output_tokens": 4,
        },
    }

    def told(path: str, key: str) -> str:
        status, answer = call(server, path, common | asked[path], authorization=f"Bearer {key}")
        assert status == 200, answer
        if path == "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        text = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
        return str(text[0]["text"])

    for path in asked:
        assert told(path, "key-own") == told(path, "key-acme") != "", path


def test_exact_windows_share_blocks_with_plain_requests_of_their_tenant(server: Process) -> None:
    client = server.client("key-bolt")
    story = "the rain went on for hours and " * 12
    with RemoteWindow(client, HEADER, 2000, Fidelity("exact")) as window:
        window.append(Chunk.text(story))
        window.ask("why?", 2)
    talk: list[Any] = [{"role": "system", "content": HEADER}, {"role": "user", "content": story + "why?"}]
    plain = client.chat.completions.create(model="tiny", max_tokens=2, temperature=0, messages=talk)
    assert plain.usage is not None and cached(plain) > plain.usage.prompt_tokens - 64


def test_tenants_reach_what_was_opened_and_nothing_else(server: Process) -> None:
    """Whatever vLLM adds is closed until somebody has looked at it."""
    key = {"authorization": "Bearer key-acme"}
    status, described = call(server, "/openapi.json", authorization="Bearer key-own")
    assert status == 200
    tried = 0
    for path, methods in described["paths"].items():
        for method in {"post", "put", "delete", "patch"} & set(methods):
            if is_ours(path):
                continue
            status, answer = call(server, path.replace("{", "").replace("}", ""), {}, method.upper(), **key)
            if method == "post" and path in PLAIN:
                assert status in (200, 400, 404, 422), (path, answer)
            else:
                assert (status, answer["error"]["code"]) == (403, "not_allowed"), path
                tried += 1
            assert call(server, path, {}, method.upper())[0] == 401, path
    assert tried >= 5


def test_connections_are_bounded_and_options_need_a_key(server: Process) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 1000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")
    for path in ("/metrics", "/v1/models", "/health"):
        assert status_of(server, path, "OPTIONS") == 401
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        assert status_of(server, path, "OPTIONS", **preflight) == 401  # other sites' pages are not served by default


def status_of(server: Process, path: str, method: str, **headers: str) -> int:
    request = urllib.request.Request(server.url + path, None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_video_that_nobody_could_have_filmed_harms_nobody(server: Process) -> None:
    """Six frames at 1e-6 a second, appended and asked about, ended vLLM for all tenants."""
    (part,) = [part for part in plain_messages([0], "x")[1]["content"] if "image_url" in part]
    frames = [part["image_url"]["url"]]
    key = {"authorization": "Bearer key-acme"}
    for fps in (1e-6, 0.01, 1000):
        window = call(server, "/v1/windows", {"system_prompt": HEADER}, **key)[1]["id"]
        chunk = {"type": "video", "frames": frames * 6, "fps": fps}
        first = call(server, f"/v1/windows/{window}/append", {"chunk": chunk}, **key)
        asked = call(server, f"/v1/windows/{window}/ask", {"query": "?", "max_tokens": 2}, **key)
        assert first[0] in (200, 400, 422) and asked[0] < 500, (fps, first, asked)
    assert (
        server.client()
        .chat.completions.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "still there?"}])
        .choices
    )
