"""Requests that are sent again: done once, whatever happened to the first answer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adapters.server.calls import call, open_window
from adapters.server.serving import Server
from ctxwin import Chunk
from ctxwin_server.registry.idempotency import IdempotencyCache


def test_a_request_that_is_sent_again_while_it_runs_waits_for_its_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official client does so after a timeout; the first one may end in the meantime, or fail."""
    window = open_window(server)
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
    path = f"/v1/windows/{open_window(server)}/append"
    bodies = [{"chunk": {"type": "text", "text": text}} for text in ("a", "b")]
    assert call(server, path, bodies[0], idempotency_key="one")[0] == 200
    status, answer = call(server, path, bodies[1], idempotency_key="one")
    assert status == 400 and "another body" in answer["error"]["message"]


def test_results_are_bounded_whatever_the_keys() -> None:
    """An answer may have two bytes, and its key as many as a system prompt takes."""
    results = IdempotencyCache(most=100_000)
    for i in range(1000):
        results.run_once("/p", f"{i}" * 1000, b"", lambda: b"{}")
    kept = results._kept.items()
    assert len(kept) < 1000 and not results._turns
    assert sum(len(name) + len(asked) + len(raw) for name, (asked, raw) in kept) < 100_000
    with pytest.raises(ZeroDivisionError):
        results.run_once("/p", "failed", b"", lambda: b"%d" % (1 // 0))
    assert results.run_once("/p", "failed", b"", lambda: b"done") == b"done"
    assert results.run_once("/p", "failed", b"", lambda: b"done again") == b"done"
