"""Redis servers that run out of memory, are killed, hang, or want a login."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.store import Store, open_store
from ctxwin.store.redis import RedisStore
from store.redis_server import Server
from store.redis_stores import LARGE
from window.fake import FakeEngine

redis = pytest.importorskip("redis", reason="redis-py is not installed; run pip install 'ctxwin[redis]'")


def test_a_server_without_memory_refuses_puts_and_still_reads(mortal: Server) -> None:
    with closing(open_store(mortal.url)) as store, closing(redis.Redis(port=mortal.port)) as client:
        assert store.put("span/a", b"x")
        client.config_set("maxmemory", "1")
        assert not store.put("span/b", bytes(1000))
        assert store.failures == 1  # type: ignore[attr-defined]
        client.config_set("maxmemory", "0")
        assert store.get("span/a") == b"x"
        assert store.put("span/b", bytes(1000))
        assert sorted(store.list()) == ["span/a", "span/b"]


def every_call(store: Store) -> list[Any]:
    found = [store.get("span/a"), store.put("span/b", b"x"), store.contains("span/a"), store.lease("span/a")]
    return [*found, store.delete("span/a"), list(store.list()), store.stats().items, store.verify()]


def test_a_killed_server_gives_misses_and_is_found_again(mortal: Server, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with closing(RedisStore(mortal.url, LARGE, clock=lambda: now[0])) as store:
        store.put("span/a", b"x")
        store.lease("span/a")
        mortal.kill()
        with caplog.at_level(logging.WARNING, logger="ctxwin.store"):
            assert every_call(store) == [None, False, False, False, False, [], 0, (0, 0)]
        assert store.failures == 8
        assert len(caplog.records) == 1, "asked once, then left alone"
        assert "could not read span/a" in caplog.text
        now[0] = 0.4
        assert store.get("span/a") is None
        assert len(caplog.records) == 1
        mortal.start()
        assert not store.put("span/a", b"y"), "still left alone"
        now[0] = 0.6
        assert store.put("span/a", b"y")
        assert store.get("span/a") == b"y"
        assert store.stats().leased == 1, "leases are this process's"
        store.release("span/a")
        assert store.stats().leased == 0


def test_the_pauses_grow_to_a_bound(mortal: Server) -> None:
    now = [0.0]
    with closing(RedisStore(mortal.url, LARGE, clock=lambda: now[0])) as store:
        mortal.kill()
        pauses = []
        for _ in range(9):
            now[0] = store._wake
            store.get("span/a")
            pauses.append(store._wake - now[0])
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_restart_between_two_calls_costs_no_miss(mortal: Server) -> None:
    with closing(RedisStore(mortal.url, LARGE)) as store:
        store.put("span/a", b"x")
        mortal.kill()
        mortal.start()
        assert store.put("span/a", b"y"), "the stale connection is opened again"
        assert store.get("span/a") == b"y"
        assert store.failures == 0


def test_a_server_that_hangs_gives_misses(mortal: Server) -> None:
    with closing(RedisStore(mortal.url, LARGE, timeout=0.2)) as store:
        store.put("span/a", b"x")
        assert mortal.process is not None
        mortal.process.send_signal(signal.SIGSTOP)
        try:
            assert every_call(store) == [None, False, False, False, False, [], 0, (0, 0)]
        finally:
            mortal.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("kind", ["{}", "tiered:memory:,{}"])
def test_a_window_answers_right_through_a_dying_server(mortal: Server, kind: str) -> None:
    def run(engine: FakeEngine, *, dying: bool) -> Iterator[tuple[int, ...]]:
        with Window(engine, "hd", budget=60, fidelity=Fidelity("exact")) as window:
            ids = window.extend([Chunk.text(t * 3) for t in "abcd"])
            yield window.ask("q", max_tokens=3).token_ids
            if dying:
                mortal.kill()
            yield window.ask("q", max_tokens=3).token_ids
            window.evict(ids[1])
            yield window.ask("q", max_tokens=3).token_ids
            window.recall(ids[1], at=0)
            window.append(Chunk.text("ee"))
            yield window.ask("q", max_tokens=3).token_ids
            if dying:
                mortal.start()
                engine.store._wake = 0.0  # type: ignore[attr-defined]  # of the plain store: no waiting here
            yield window.ask("q", max_tokens=3).token_ids
            window.check()

    with closing(FakeEngine(open_store(kind.format(mortal.url)))) as engine, closing(FakeEngine()) as sound:
        assert list(run(engine, dying=True)) == list(run(sound, dying=False))


def test_opening_says_that_the_server_is_not_there(mortal: Server) -> None:
    mortal.kill()
    with pytest.raises(OSError, match=rf"redis://127.0.0.1:{mortal.port}/0 cannot be reached .*start the server"):
        open_store(mortal.url)


def test_a_login_is_used_and_never_shown(mortal: Server, caplog: pytest.LogCaptureFixture) -> None:
    with closing(redis.Redis(port=mortal.port)) as client:
        client.config_set("requirepass", "s3cret")
    login = mortal.url.replace("redis://", "redis://:s3cret@")
    with closing(open_store(login)) as store:
        assert store.put("span/a", b"x")
        mortal.kill()
        store.get("span/a")
    mortal.start()
    with pytest.raises(OSError, match="check its address and login") as refused:
        wrong = login.replace("s3cret", "s3cret-wrong")
        with closing(redis.Redis(port=mortal.port)) as client:
            client.config_set("requirepass", "s3cret")
        open_store(wrong)
    assert "s3cret" not in caplog.text + str(refused.value)
    with pytest.raises(ValueError, match="number as db") as refused_name:
        open_store(login.replace("/0", "/zero"))
    assert "s3cret" not in str(refused_name.value)
