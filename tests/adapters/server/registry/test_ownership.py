"""One owner a window among servers that share a store: hand-over, stale owners, retries, a store that does not answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from adapters.server.calls import call
from adapters.server.serving import Server, serving
from ctxwin import Chunk, Window
from ctxwin.errors import StaleOwner, StoreUnavailable
from ctxwin.store import STORE_KEY
from ctxwin_client import RemoteWindow
from ctxwin_client.errors import UnknownWindow
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.registry.windows import OpenWindows, WindowRegistry
from store.redis_server import Server as Redis
from store.test_memory import steps
from window.fake import FakeEngine

CHUNKS = [Chunk.text(f"The door of room {i} is open. ") for i in range(6)]
QUESTION = "Which door is open?"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with Redis(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture(scope="module", params=["redis", "disk"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, as two machines would run them, or two processes of one."""
    is_disk = request.param == "disk"
    url = f"disk:{tmp_path_factory.mktemp('kv')}" if is_disk else request.getfixturevalue("redis").url
    with ExitStack() as stack:
        yield [stack.enter_context(serving(store=f"tiered:memory:,{url}")) for _ in range(2)]


def on(server: Server, window: RemoteWindow) -> RemoteWindow:
    return RemoteWindow.attach(server.client(max_retries=0), window.id)


def registry(server: Server) -> Any:
    return server.service.tenant_state("").windows


def test_whoever_is_asked_last_owns_a_window(servers: list[Server]) -> None:
    """Every edit is seen by the next server that is asked, however requests are spread."""
    first, second = servers
    window = RemoteWindow(first.client(max_retries=0), "h", 900)
    ids: list[str] = []
    for i, chunk in enumerate(CHUNKS):
        ids += on(servers[i % 2], window).extend([chunk])
        assert on(servers[(i + 1) % 2], window).ids == tuple(ids)
    assert on(first, window).ask(QUESTION, 4).text == on(second, window).ask(QUESTION, 4).text
    on(second, window).check()
    assert registry(first).fenced_off == 0, "an owner that was succeeded notices before it works"
    on(second, window).close()
    for server in servers:
        with pytest.raises(UnknownWindow):
            on(server, window)


def test_a_stale_owner_cannot_write(servers: list[Server]) -> None:
    """It is overtaken while it works: its version is refused, and its client is told so."""
    first, second = servers
    window = RemoteWindow(first.client(max_retries=0), "h", 900)
    ids = window.extend(CHUNKS[:3])
    with pytest.raises(StaleOwner, match="send the request again"), registry(first).using(window.id) as held:
        held.evict(ids[0])
        on(second, window).append(CHUNKS[3])
    assert len(on(second, window).ids) == 4 and on(first, window).ids == on(second, window).ids
    with pytest.raises(StaleOwner), registry(first).using(window.id) as held:
        held.evict(ids[0])
        on(second, window).close()
    with pytest.raises(UnknownWindow):
        on(first, window)


def test_a_retry_at_another_server_is_not_done_twice(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends between the version and its answer, so the client asks the next one with the same key."""
    monkeypatch.setattr(
        "ctxwin_server.registry.windows._mac", lambda *_: uuid.uuid4().hex
    )  # each process has a secret of its own
    window = RemoteWindow(servers[0].client(), "h", 900)
    path, body = f"/v1/windows/{window.id}/append", {"chunk": {"type": "text", "text": "once. "}}
    for key, count in (("a", 1), ("b", 2)):
        status, answer = call(servers[0], path, body, idempotency_key=key)
        assert status == 200 and len(answer["window"]["ids"]) == count
        assert call(servers[1], path, body, idempotency_key=key) == (200, answer)
    assert call(servers[1], path, body, idempotency_key="c")[1] != answer
    assert len(on(servers[0], window).ids) == 3


def test_clocks_that_differ_do_not_matter(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    window = RemoteWindow(servers[0].client(max_retries=0), "h", 900)
    ids = []
    now, now_ns = time.time, time.time_ns
    for i, hours in enumerate((0, -5, 7, -30)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda hours=hours: now() + 3600 * hours)
            patch.setattr(time, "time_ns", lambda hours=hours: now_ns() + 3600 * 10**9 * hours)
            ids += on(servers[i % 2], window).extend([CHUNKS[i]])
        assert on(servers[(i + 1) % 2], window).ids == tuple(ids)


def test_nothing_is_acknowledged_that_a_shared_store_has_not_taken(tmp_path: Path) -> None:
    with Redis(tmp_path) as redis, serving(store=redis.url) as server:
        window = RemoteWindow(server.client(max_retries=0), "h", 900)
        ids = window.extend(CHUNKS[:3])
        with registry(server).using(window.id) as held:
            version = held.version
        records = registry(server).records
        with pytest.raises(StoreUnavailable), registry(server).using(window.id) as held:
            held.evict(ids[0])
            redis.kill()
        assert held.ids == tuple(ids) and held.version == version, "it is taken back"
        with pytest.raises(StoreUnavailable, match="did not"):
            window.evict(ids[0])
        with pytest.raises(StoreUnavailable):
            RemoteWindow(server.client(max_retries=0), "another", 900)
        redis.start()  # it has lost everything
        records._wake = 0.0
        assert window.append(CHUNKS[3]) and len(window.ids) == 4
        assert records.token(f"window/{window.id}") == 1, "the owner writes it again"


@pytest.mark.parametrize("key", ["", "a key that all servers hold"])
def test_a_version_of_a_server_with_the_same_key_is_taken_as_it_is(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Otherwise every chunk of it is encoded again, as of a client's snapshot."""
    monkeypatch.setenv(STORE_KEY, key)
    with serving(store=redis.url.replace("/0", "/1" if key else "/2")) as first:
        window = RemoteWindow(first.client(), "h", 900)
        window.extend(CHUNKS)
        with serving(store=redis.url.replace("/0", "/1" if key else "/2")) as second:
            encoded: list[Any] = []
            encode = second.engines[""].encode
            monkeypatch.setattr("ctxwin_server.registry.windows._SECRET", b"of another process")
            monkeypatch.setattr(second.engines[""], "encode", lambda chunk: encoded.append(chunk) or encode(chunk))
            assert on(second, window).ids == window.ids
            assert bool(encoded) == (not key)


def test_a_version_of_a_stranger_is_checked(redis: Redis, servers: list[Server]) -> None:
    window = RemoteWindow(servers[0].client(), "h", 900)
    window.extend(CHUNKS[:2])
    records = registry(servers[0]).records
    token, raw = records.claim(f"window/{window.id}")
    record = json.loads(raw)
    record["state"]["placed"][0]["advance"] = -50
    assert records.commit(f"window/{window.id}", json.dumps(record).encode(), token)
    with pytest.raises(UnknownWindow):
        on(servers[1], window)


def test_opening_one_more_window_costs_the_same_however_many_are_open() -> None:
    def cost(most: int) -> int:
        with closing(FakeEngine()) as engine:
            registry = WindowRegistry(engine, most, Limits(), OpenWindows(2 * most))
            for _ in range(most):
                registry.add(Window(engine, "h", 100))
            more = [Window(engine, "h", 100) for _ in range(2)]
            registry.add(more[0])
            assert len(registry) == most
            return steps(lambda: registry.add(more[1]))

    assert cost(200) == pytest.approx(cost(20), rel=0.02)


def test_a_window_that_evicted_much_comes_back_with_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record names pages, which go with it; one that the store has lost costs its chunks and no other."""
    monkeypatch.setenv(STORE_KEY, "a key of the servers")
    with closing(FakeEngine()) as engine:

        def opened() -> WindowRegistry:
            return WindowRegistry(engine, 4, Limits(), OpenWindows(4))

        store, first = engine.repo.store, opened()
        window = first.add(Window(engine, "h", 4000))
        with first.using(window.id):
            placed = window.extend([Chunk.text(f"c{i}") for i in range(150)])
            for placement in placed[:-1]:
                window.evict(placement)
        keys = set(store.list("evicted/"))
        assert len(keys) == 2 and json.loads(store.read(f"window/{window.id}") or b"")["pages"]
        state = window.snapshot()
        first.close()
        second = opened()
        with second.using(window.id) as again:
            assert again.snapshot() == state
            again.recall(placed[0])
            again.undo()
        assert set(store.list("evicted/")) == keys, "what came back as it was is not written again"
        fork = second.add(again.fork())
        second.close()
        store.delete(min(keys))
        third = opened()
        with third.using(window.id) as poorer, third.using(fork.id) as whole:
            assert len(poorer.evicted) == 149 - 64 and len(whole.evicted) == 149
        for gone in (window, fork):
            third.remove(gone.id)
        assert not list(store.list("evicted/")) and not list(store.list("window/"))
