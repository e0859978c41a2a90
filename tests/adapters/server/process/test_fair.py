"""Fair shares: no tenant waits behind all of another one's requests. Order is held by events, never by time."""

from __future__ import annotations

import http.client
import json
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest

from adapters.server.calls import call, read_metrics, wait_for
from adapters.server.serving import serving
from ctxwin import Chunk
from ctxwin_server.app.tenants import Tenant
from ctxwin_server.process.fair import FairPool
from ctxwin_server.protocol.limits import Limits


class Line:
    """Jobs that say when they begin and end when they are told to."""

    def __init__(self, pool: FairPool) -> None:
        self._pool = pool
        self.begun: list[str] = []
        self._ends: dict[str, threading.Event] = {}
        self.futures: dict[str, Future[str]] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self._ends[name] = threading.Event()
            self.futures[name] = self._pool.submit(name[0], self._work, name)

    def _work(self, name: str) -> str:
        self.begun.append(name)
        assert self._ends[name].wait(30)
        return name

    def end(self, name: str) -> None:
        self._ends[name].set()
        assert self.futures[name].result(30) == name

    def began(self, count: int) -> list[str]:
        wait_for(lambda: len(self.begun) >= count)
        return self.begun[:count]


@pytest.fixture
def pools() -> Iterator[list[FairPool]]:
    made: list[FairPool] = []
    yield made
    for pool in made:
        pool.shutdown()


def test_a_tenant_that_comes_late_gets_the_next_thread(pools: list[FairPool]) -> None:
    pools.append(FairPool(2))
    line = Line(pools[0])
    line.add("a1", "a2")
    line.began(2)  # every thread is the first tenant's
    line.add("a3", "a4", "a5", "b1", "b2", "c1")
    for done, following in (("a1", "b1"), ("a2", "c1"), ("b1", "a3"), ("c1", "b2"), ("a3", "a4"), ("b2", "a5")):
        line.end(done)
        assert line.began(len(line.begun) + (following not in line.begun))[-1] == following
    line.end("a4")
    line.end("a5")


def test_shares_become_equal_however_many_each_asks_for(pools: list[FairPool]) -> None:
    pools.append(FairPool(4))
    line = Line(pools[0])
    line.add(*(f"a{i}" for i in range(8)))
    line.began(4)
    line.add(*(f"b{i}" for i in range(8)))
    for i in range(2):
        line.end(f"a{i}")
        line.began(5 + i)
    assert line.begun[4:] == ["b0", "b1"]
    line.end("b0")  # two and one run: the fewer is next, although the other asked first
    assert line.began(7)[-1] == "b2"
    line.end("a2")
    assert line.began(8)[-1] == "a4"
    for name in ("a3", "a4", "a5", "a6", "a7", *(f"b{i}" for i in range(1, 8))):
        line.end(name)


def test_heavy_work_waits_for_others_and_for_nobody_else(pools: list[FairPool]) -> None:
    """A tenant that computed for long rests while others ask; alone it does not."""
    pools.append(FairPool(4))
    line = Line(pools[0])

    def compute(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    def begins_within(tenant: str, work_of: float) -> float:
        pools[0].submit(tenant, compute, work_of).result(30)
        began = time.monotonic()
        pools[0].submit(tenant, str).result(30)
        return time.monotonic() - began

    rest = 0.3
    assert begins_within("a", 2 * rest) < rest  # nobody else is there
    line.add("b1")
    line.began(1)
    assert begins_within("a", rest / 2) >= 0.9 * rest
    assert begins_within("c", 0.001) < rest  # light work asks for no rest
    line.end("b1")


def test_a_tenant_stays_under_its_cap(pools: list[FairPool]) -> None:
    pools.append(FairPool(3, {"a": 1}))
    line = Line(pools[0])
    line.add("a1", "a2", "b1", "b2")
    assert sorted(line.began(3)) == ["a1", "b1", "b2"]
    line.end("b1")
    line.add("b3")
    assert line.began(4)[-1] == "b3"  # a thread was free, and the second of a did not take it
    line.end("a1")
    assert line.began(5)[-1] == "a2"
    for name in ("a2", "b2", "b3"):
        line.end(name)


def test_what_is_taken_back_or_shut_down_never_begins() -> None:
    pool = FairPool(1)
    line = Line(pool)
    line.add("a1")
    line.began(1)
    line.add("a2", "b1", "b2")
    assert line.futures["b1"].cancel() and pool.waiting("b") == 1 and pool.waiting("a") == 1
    line.end("a1")
    assert line.began(2)[-1] == "b2"  # a was served last
    with ThreadPoolExecutor(1) as other:
        closing = other.submit(pool.shutdown)
        wait_for(line.futures["a2"].cancelled)
        assert not closing.done()  # what runs may end
        line.end("b2")
        closing.result(30)
    assert line.begun == ["a1", "b2"]
    with pytest.raises(RuntimeError, match="shuts down"):
        pool.submit("a", print)
    pool.shutdown()


def test_what_is_taken_back_is_let_go_of_at_once(pools: list[FairPool]) -> None:
    """A client may leave a thousand times while its tenant's one request runs."""
    pools.append(FairPool(1))
    line = Line(pools[0])
    line.add("a1")
    line.began(1)

    class Body: ...

    body = Body()
    held, future = weakref.ref(body), pools[0].submit("a", id, body)
    del body
    line.add("a2")
    assert future.cancel() and held() is None
    assert pools[0].waiting("a") == 1
    line.end("a1")
    line.end("a2")


def test_work_that_ends_wakes_threads_only_where_work_waits(pools: list[FairPool]) -> None:
    pools.append(pool := FairPool(3, {"a": 1}))
    line = Line(pool)
    line.add("a1", "b1", "b2", "a2")
    line.began(3)
    with mock.patch.object(pool._changed, "notify", wraps=pool._changed.notify) as notify:
        for ended, woken in (("b1", 3), ("a1", 3), ("a2", 0), ("b2", 0)):
            line.end(ended)
            wait_for(lambda: notify.called)
            notify.assert_called_once_with(woken)
            notify.reset_mock()
            line.began(4 if ended == "a1" else 3)


def test_an_error_is_its_callers(pools: list[FairPool]) -> None:
    pools.append(FairPool(1))
    with pytest.raises(ZeroDivisionError):
        pools[0].submit("a", lambda: 1 // 0).result(30)
    assert pools[0].submit("a", lambda: 1).result(30) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_line_takes_nobodys_turn(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with serving(Limits(threads=1)) as server, ThreadPoolExecutor() as pool:
        engine, service = server.engines[""], server.service
        window = call(server, "/v1/windows", {"system_prompt": "h"})[1]["id"]
        inside, go, encode = threading.Event(), threading.Event(), engine.encode

        def slow(chunk: Chunk) -> Any:
            inside.set()
            assert go.wait(60)
            return encode(chunk)

        monkeypatch.setattr(engine, "encode", slow)
        first = pool.submit(call, server, "/v1/chunks", {"type": "text", "text": "y"})
        assert inside.wait(30)
        asked = {"query": "?", "max_tokens": 1, "stream": stream}
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("POST", f"/v1/windows/{window}/ask", json.dumps(asked))
        wait_for(lambda: service.pool.waiting("") == 1)
        connection.close()
        wait_for(lambda: service.pool.waiting("") == 0)
        go.set()
        assert first.result(30)[0] == 201
    assert not service.pool._running[""]


def test_one_tenants_requests_do_not_keep_another_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of one tenant's wait when another's comes: it is answered after the first of them ends."""
    tenants = [Tenant(name="acme", keys=["key-a"]), Tenant(name="bolt", keys=["key-b"])]
    body: dict[str, Any] = {"type": "text", "text": "x"}
    with serving(Limits(threads=1), tenants) as server, ThreadPoolExecutor() as pool:
        turn, encode = threading.Semaphore(0), server.engines["acme"].encode
        inside: list[Chunk] = []

        def slow(chunk: Chunk) -> Any:
            inside.append(chunk)
            assert turn.acquire(timeout=60)
            return encode(chunk)

        monkeypatch.setattr(server.engines["acme"], "encode", slow)
        many = [pool.submit(call, server, "/v1/chunks", body, authorization="Bearer key-a") for _ in range(4)]
        wait_for(lambda: len(inside) == 1 and server.service.pool.waiting("acme") == 3)
        assert read_metrics(server)['ctxwin_requests_waiting{tenant="acme"}'] == 3
        other = pool.submit(call, server, "/v1/chunks", body, authorization="Bearer key-b")
        wait_for(lambda: server.service.pool.waiting("bolt") == 1)
        turn.release()
        assert other.result(30)[0] == 201
        assert sum(future.done() for future in many) <= 1
        for _ in range(3):
            turn.release()
        assert {future.result(30)[0] for future in many} <= {200, 201}


def test_a_quarter_of_the_places_stays_free_of_any_one_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long answers of one tenant in every place, another one's small question waited for the end of one."""
    tenants = [Tenant(name="acme", keys=["key-a"]), Tenant(name="bolt", keys=["key-b"])]
    body, go = {"type": "text", "text": "x"}, threading.Event()
    with serving(Limits(threads=4), tenants) as server, ThreadPoolExecutor(8) as pool:
        encode = server.engines["acme"].encode

        def slow(chunk: Chunk) -> Any:
            assert go.wait(60)
            return encode(chunk)

        monkeypatch.setattr(server.engines["acme"], "encode", slow)
        many = [pool.submit(call, server, "/v1/chunks", body, authorization="Bearer key-a") for _ in range(6)]
        try:
            wait_for(lambda: server.service.pool._running["acme"] == 3 and server.service.pool.waiting("acme") == 3)
            assert pool.submit(call, server, "/v1/chunks", body, authorization="Bearer key-b").result(30)[0] == 201
        finally:
            go.set()
            for future in many:
                future.result(30)


def test_plain_requests_that_generate_wait_for_their_tenants_turn_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            short = pool.submit(call, server, "/tokenize", {"messages": []}, **tenant)
            assert short.result(10)[0] == 200
            assert "ctxwin_windows_open" in str(pool.submit(read_metrics, server).result(10))
            assert not plain.done() and server.service.pool.waiting("acme") == 1
        finally:
            go.set()
            busy.result()
        assert plain.result(30)[0] == 200


def test_a_tenants_forks_run_one_at_a_time_and_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of large windows in all threads of one tenant made everybody else's answers 18 times as slow."""
    from ctxwin.window.window import Window

    fork, active, most, gate = Window.fork, [0], [0], threading.Event()
    counting = threading.Lock()

    def forked(window: Window, system_prompt: str | None = None) -> Window:
        if window.system_prompt == "yard":
            return fork(window, system_prompt)
        with counting:
            active[0] += 1
            most[0] = max(most[0], active[0])
        assert gate.wait(60)
        try:
            return fork(window, system_prompt)
        finally:
            with counting:
                active[0] -= 1

    monkeypatch.setattr(Window, "fork", forked)
    names = ("porch", "yard")
    with serving(tenants=[Tenant(name=name, keys=[name]) for name in names]) as server, ThreadPoolExecutor(8) as pool:

        def post(path: str, tenant: str, **body: str) -> tuple[int, dict[str, str]]:
            return call(server, f"/v1/windows{path}", body, authorization=f"Bearer {tenant}")

        windows = {name: post("", name, system_prompt=name)[1]["id"] for name in names}
        try:
            forks = [pool.submit(post, f"/{windows['porch']}/fork", "porch") for _ in range(6)]
            wait_for(lambda: active[0] > 0)
            assert post(f"/{windows['yard']}/fork", "yard")[0] == 200
        finally:
            gate.set()
        assert [future.result(60)[0] for future in forks] == [200] * 6
    assert most[0] == 1
