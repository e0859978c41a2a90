"""Clients that close their connection before the answer."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from typing import Any

import pytest

from adapters.server.calls import call, open_window, wait_for
from adapters.server.serving import Server
from ctxwin import Window


def test_a_client_that_leaves_in_its_body_is_no_fault_of_the_server(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall(b"POST /v1/chunks HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        wait_for(lambda: bool(server.service.requests._by_tenant))
    wait_for(lambda: not server.service.requests._by_tenant)
    assert "failed" not in caplog.text


def test_a_client_that_leaves_before_the_first_token_stops_its_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the answer, so nothing may come of it: a client that timed out asks again."""
    window = open_window(server, budget=4000)
    windows, ask = server.service.tenant_state("").windows, Window.answer
    inside, go = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        inside.set()
        assert go.wait(30)
        return ask(*args, **options)

    monkeypatch.setattr(Window, "answer", slow)
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    body = {"query": "go on", "max_tokens": 3000, "remember": True, "temperature": 2.0, "seed": 1, "stream": True}
    connection.request("POST", f"/v1/windows/{window}/ask", json.dumps(body))
    assert inside.wait(30)
    connection.close()
    time.sleep(0.3)  # the server hears of it
    go.set()
    wait_for(lambda: windows._entries[window].users == 0)
    assert not call(server, f"/v1/windows/{window}")[1]["ids"]  # an answer of 3000 tokens would have been remembered
