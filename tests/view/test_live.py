"""The live page: new lines arrive, nothing else is served, and it ends when told."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ctxwin.view.server import ViewServer, messages
from ctxwin.view.trace import Trace
from view.recorded import frame, watched
from window.fake import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def serve() -> Iterator[Callable[[Path], ViewServer]]:
    started: list[tuple[ViewServer, threading.Thread]] = []

    def serving(path: Path) -> ViewServer:
        server = ViewServer(path, port=0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        started.append((server, thread))
        return server

    yield serving
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


def get(server: ViewServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


@pytest.mark.browser
def test_new_steps_appear_by_themselves(
    engine: FakeEngine, tmp_path: Path, serve: Callable[[Path], ViewServer], open_page: Callable[..., Page]
) -> None:
    from playwright.sync_api import expect

    path = tmp_path / "run.jsonl"
    with watched(engine, path) as (trace, window):
        server = serve(path)
        page = open_page(server.url)
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#empty")).to_be_visible()
        window.append(frame(0))
        window.ask("first?", max_tokens=1)
        expect(page.locator(".step")).to_have_count(1)
        expect(page.locator(".step .pic").first).to_have_css("background-image", re.compile("data:image/jpeg"))
        expect(page.locator("#details-title")).to_have_text("Step 1 of 1: the window")
        page.locator(".head").first.focus()
        window.append(frame(1))
        window.ask("second?", max_tokens=1)
        trace.note({"prefix cache": 77})
        expect(page.locator(".step")).to_have_count(2)
        expect(page.locator("#totals")).to_contain_text("77")
        # It follows the newest step until told not to.
        expect(page.locator("#details-title")).to_have_text("Step 2 of 2: the window")
        page.get_by_label("follow the newest step").uncheck()
        page.locator(".head").first.click()
        window.append(frame(2))
        expect(page.locator(".step")).to_have_count(3)
        expect(page.locator("#details-title")).to_have_text("Step 1 of 3: the window")
        expect(page.locator(".head").first).to_be_focused()
    # A new run under the same name: the page begins anew.
    with watched(engine, path) as (_, window):
        window.append(frame(5))
        expect(page.locator(".tile .name")).to_have_text(["+ t=5 s"])


def test_only_the_page_and_its_events_are_served(run: Path, serve: Callable[[Path], ViewServer]) -> None:
    server = serve(run)
    run.with_name("secret.txt").write_text("secret")
    status, headers, body = get(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert body.startswith("<!doctype html>")
    for path in (
        "/secret.txt",
        "/run.jsonl",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        f"/{run}",
        "//etc/passwd",
        "/events/..",
    ):
        assert get(server, path)[0] == 404
        assert "secret" not in get(server, path)[2]
    assert get(server, "/", "HEAD")[::2] == (200, "")
    for method in ("POST", "PUT", "DELETE"):
        assert get(server, "/", method)[0] == 501
    for offset in ("", "x", "-1", "1e3", "%D9%A1"):
        assert get(server, f"/events?from={offset}")[0] == 400


def test_a_name_that_was_pointed_here_gets_nothing(run: Path, serve: Callable[[Path], ViewServer]) -> None:
    server = serve(run)
    port = server.server_address[1]
    assert server.loopback
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost"):
        assert get(server, "/", Host=host)[0] == 200
    for host in (f"evil.example:{port}", "10.0.0.1", "localhost.evil.example", ""):
        assert get(server, "/", Host=host)[0] == 421


def test_a_trace_that_went_bad_is_said_to_be_so(run: Path, serve: Callable[[Path], ViewServer]) -> None:
    server = serve(run)
    run.write_text("no trace\n")
    status, _, body = get(server, "/")
    assert status == 503
    assert "must be a trace" in body
    run.unlink()
    assert get(server, "/")[0] == 503
    assert get(server, "/events?from=0")[0] == 503


def test_what_is_no_trace_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(ValueError, match="must be a trace"):
        ViewServer(tmp_path / "notes.txt", port=0)
    with pytest.raises(FileNotFoundError):
        ViewServer(tmp_path / "absent.jsonl", port=0)


def told(path: Path, offset: int, until: int) -> list[bytes]:
    """The first ``until`` messages behind the greeting."""
    stopping = threading.Event()
    out: list[bytes] = []
    for message in messages(path, offset, stopping):
        if not message.startswith(b":"):
            out.append(message)
        if len(out) == until:
            stopping.set()
    return out


def test_messages_are_whole_lines_with_the_place_to_go_on_from(run: Path) -> None:
    whole = run.read_bytes()
    lines = whole.splitlines(keepends=True)
    run.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    first = told(run, len(lines[0]), 4)
    assert [json.loads(m.split(b"data: ")[1]) for m in first] == [json.loads(line) for line in lines[1:5]]
    at = int(re.findall(rb"id: (\d+)", first[-1])[0])
    assert at == sum(map(len, lines[:5]))
    run.write_bytes(whole)
    assert len(told(run, at, len(lines) - 5)) == len(lines) - 5


def test_a_shorter_file_or_another_run_resets_the_page(run: Path) -> None:
    assert told(run, run.stat().st_size + 1, 1)[0].startswith(b"event: reset")
    stopping = threading.Event()
    stream = messages(run, run.stat().st_size, stopping)
    assert next(stream).startswith(b":")
    later = run.read_bytes() + b'{"kind":"note","of":1}\n'
    Trace(run).close()
    run.write_bytes(run.read_bytes() + later[later.index(b"\n") + 1 :])
    assert next(stream).startswith(b"event: reset")
    assert list(stream) == []


def test_a_browser_that_connects_again_misses_nothing(run: Path, serve: Callable[[Path], ViewServer]) -> None:
    server = serve(run)
    lines = run.read_bytes().splitlines(keepends=True)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as connection:
        at = sum(map(len, lines[:-2]))
        connection.sendall(f"GET /events?from=0 HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: {at}\r\n\r\n".encode())
        got = b""
        while got.count(b"event: line") < 2:
            got += connection.recv(65536)
    assert b"text/event-stream" in got
    assert got.count(b"event: line") == 2
    assert lines[-1].strip() in got


def test_ctrl_c_ends_the_command(run: Path) -> None:
    command = [sys.executable, "-m", "ctxwin", "view", str(run), "--serve", "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background may ignore Ctrl-C
    ) as process:  # fmt: skip
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        port = int(url.rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as follower:
            follower.sendall(b"GET /events?from=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert follower.recv(4096).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors == ""


def test_closed_pages_give_their_place_back(
    run: Path, serve: Callable[[Path], ViewServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxwin.view.server._KEEPALIVE_S", 0.05)
    monkeypatch.setattr("ctxwin.view.server.POLL_S", 0.02)
    server = serve(run)
    size = run.stat().st_size
    address = ("127.0.0.1", server.server_address[1])
    request = f"GET /events?from={size} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    open_ones = [socket.create_connection(address, timeout=10) for _ in range(32)]
    for one in open_ones:
        one.sendall(request)
        assert one.recv(12) == b"HTTP/1.1 200"
    assert get(server, f"/events?from={size}")[0] == 503
    for one in open_ones:
        one.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.create_connection(address, timeout=10) as again:
            again.sendall(request)
            if again.recv(12) == b"HTTP/1.1 200":
                return
        time.sleep(0.05)
    raise AssertionError("no place was given back")
