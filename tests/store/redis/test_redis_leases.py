"""Limits, leases and records of Redis stores that share a server."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from ctxwin import Library
from ctxwin.errors import StaleOwner, StoreUnavailable
from ctxwin.store.redis import RedisStore
from store.redis_server import Server
from store.redis_stores import LARGE, twin

pytest.importorskip("redis", reason="redis-py is not installed; run pip install 'ctxwin[redis]'")


def test_stores_that_share_a_tenant_keep_one_limit(store: RedisStore, server: Server, client: Any) -> None:
    limit = 20_000
    stores = [twin(store, server, max_bytes=limit) for _ in range(3)]
    over: list[int] = []

    def work(mine: RedisStore, name: int) -> None:
        for i in range(40):
            assert mine.put(f"span/{name}-{i % 15}", bytes([name]) * (500 + 97 * i))
            if (held := mine.stats().bytes) > limit:
                over.append(held)

    threads = [threading.Thread(target=work, args=(s, n)) for n, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == []
    held = {key: client.strlen(store._values + key) for key in store.list()}
    assert store.stats().bytes == sum(held.values()) <= limit
    assert store.stats().items == len(held) == len(client.keys(store._values.replace("{", "\\{") + "*"))
    assert min(s.stats().evictions for s in stores) > 0
    assert not client.keys(store._passing + "*"), "no passing value is left behind"
    for each in stores:
        each.close()


def fill(store: RedisStore, name: str) -> None:
    """More than a small store has room for."""
    for i in range(9):
        store.put(f"span/{name}{i}", bytes(1000))


def test_a_lease_holds_for_all_who_share_the_store(store: RedisStore, server: Server) -> None:
    with closing(twin(store, server, max_bytes=5000)) as other:
        mine = twin(store, server, max_bytes=5000)
        mine.put("span/a", bytes(1000))
        assert mine.lease("span/a") and other.lease("span/a")
        fill(mine, "x")
        other.release("span/a")
        fill(other, "y")
        assert mine.contains("span/a"), "one of two leases is left"
        mine.release("span/a")
        fill(mine, "z")
        assert not other.contains("span/a")
        mine.put("span/a", bytes(1000))
        assert mine.lease("span/a")
        mine.close()
        fill(other, "w")
        assert not other.contains("span/a"), "closing gives leases back"


def test_leases_of_a_killed_process_end_and_those_of_an_idle_one_do_not(store: RedisStore, server: Server) -> None:
    with closing(twin(store, server, max_bytes=5000)) as other, closing(twin(store, server, lease_s=0.6)) as idle:
        killed = twin(store, server, lease_s=0.6)
        killed.renew = lambda: None  # type: ignore[method-assign]
        for name, holder in (("killed", killed), ("idle", idle)):
            holder.put(f"span/{name}", bytes(1000))
            assert holder.lease(f"span/{name}")
        fill(other, "x")
        assert other.contains("span/killed") and other.contains("span/idle")
        time.sleep(1.2)
        fill(other, "y")
        assert not other.contains("span/killed") and other.contains("span/idle")
        killed.close()


def commands(client: Any, call: Callable[[], Any]) -> int:
    """Count the commands that the server runs for a call, those of scripts among them."""

    def total() -> int:
        return sum(row["calls"] for row in client.info("commandstats").values())

    before = total()
    call()
    return total() - before


def test_a_put_into_a_full_store_costs_the_same_however_much_is_leased(server: Server, client: Any) -> None:
    costs = []
    for leased in (3, 300):
        with closing(RedisStore(server.url, 1000 * (leased + 10), tenant=uuid.uuid4().hex)) as store:
            for i in range(leased):
                assert store.put(f"span/leased{i}", bytes(500)) and store.lease(f"span/leased{i}")
            for i in range(2 * leased + 20):
                assert store.put(f"span/{i}", bytes(500))
            assert store.stats().evictions > 0
            evictions = store.stats().evictions
            costs.append(commands(client, lambda store=store: store.put("span/new", bytes(500))))
            assert store.stats().evictions == evictions + 1
            assert all(store.contains(f"span/leased{i}") for i in range(leased))
    assert costs[0] == costs[1]


def test_renewing_leases_costs_the_same_however_many_there_are(store: RedisStore, client: Any) -> None:
    costs = []
    for i in range(200):
        store.put(f"span/{i}", b"x")
        store.lease(f"span/{i}")
        if i in (2, 199):
            costs.append(commands(client, store.renew))
    assert costs[0] == costs[1]


def test_leases_that_the_server_lost_are_restored(store: RedisStore, server: Server, client: Any) -> None:
    with closing(twin(store, server, max_bytes=5000)) as other, closing(twin(store, server, max_bytes=5000)) as mine:
        mine.put("span/a", bytes(1000))
        mine.put("span/b", bytes(1000))
        assert mine.lease("span/a") and mine.lease("span/b")
        mine.release("span/b")
        client.flushdb()
        other.put("span/a", bytes(1000))
        other.put("span/b", bytes(1000))
        mine.renew()
        fill(other, "x")
        assert other.contains("span/a") and not other.contains("span/b")


def test_a_record_that_was_retired_is_not_brought_back(store: RedisStore) -> None:
    assert store.commit("window/a", b"one", 1)
    assert store.retire("window/a") and not store.retire("window/a")
    with pytest.raises(StaleOwner, match="must be written by its owner"):
        store.commit("window/a", b"two", 1)
    assert store.claim("window/a") is None and store.token("window/a") > 1


def test_a_library_that_was_deleted_can_be_created_again(store: RedisStore) -> None:
    for text in (b"A red car.", b"A blue bus."):
        library = Library(store, "cars")
        library.add(text, "car.txt")
        library.delete()


def test_fenced_records_say_where_the_server_does_not_answer(mortal: Server) -> None:
    with closing(RedisStore(mortal.url, LARGE)) as store:
        assert store.commit("window/a", b"one", 1)
        mortal.kill()
        for call in (store.claim, store.token, store.retire, lambda key: store.commit(key, b"two", 1)):
            with pytest.raises(StoreUnavailable, match="must answer"):
                call("window/a")


def test_values_end_on_the_server_itself(server: Server, client: Any) -> None:
    with closing(RedisStore(server.url, LARGE, ttl=0.05, tenant=uuid.uuid4().hex)) as store:
        store.put("span/a", b"x")
        assert 0 < client.pttl(store._values + "span/a") <= 50
        time.sleep(0.1)
        assert not client.exists(store._values + "span/a")
        assert (store.stats().items, store.stats().bytes) == (0, 0)
    with closing(RedisStore(server.url, LARGE, ttl=60.0, tenant=uuid.uuid4().hex)) as store:
        store.put("span/a", b"x")
        with closing(twin(store, server)) as forever:
            forever.put("span/a", b"y")
        assert client.pttl(store._values + "span/a") == -1, "the last put counts"
        assert store.get("span/a") == b"y"
