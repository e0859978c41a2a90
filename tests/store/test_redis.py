"""The Redis store against a real server: the conformance suite, corruption, limits, failures, tenants, other processes.

The server runs on a loopback port of its own, without persistence, and ends with this module.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import MissingExtra, StaleOwner, StoreUnavailable
from ctxwin.store import Store, open_store
from ctxwin.store.memory import MemoryStore
from ctxwin.store.redis import RedisStore
from ctxwin.store.testing import StoreConformance
from ctxwin.store.tiered import TieredStore
from store.redis_server import Server
from window.fake import FakeEngine

redis = pytest.importorskip("redis", reason="redis-py is not installed; run pip install 'ctxwin[redis]'")
LARGE = 1 << 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, to be killed."""
    with Server(tmp_path) as made:
        yield made


@pytest.fixture
def store(server: Server) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url, LARGE, tenant=uuid.uuid4().hex)) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """The server itself, past the store."""
    with closing(redis.Redis(port=server.port)) as made:
        yield made


def twin(store: RedisStore, server: Server, **options: Any) -> RedisStore:
    """A second store on the same keys, as another process would open it."""
    other = RedisStore(server.url, options.pop("max_bytes", store.max_bytes), **options)
    other._enter(store._values.removesuffix("value:"))
    return other


class TestRedis(StoreConformance):
    examples = 12

    @pytest.fixture(autouse=True)
    def on(self, server: Server) -> None:
        self.url = server.url

    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        return open_store(self.url, max_bytes=max_bytes or LARGE, ttl=ttl, tenant=uuid.uuid4().hex)


class TestBehindMemory(StoreConformance):
    copies = 2
    examples = 8

    @pytest.fixture(autouse=True)
    def on(self, server: Server) -> None:
        self.url = server.url

    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        url = f"tiered:memory:,{self.url}"
        return open_store(url, max_bytes=max_bytes or LARGE, ttl=ttl, tenant=uuid.uuid4().hex)


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: blob[:-1],
        lambda blob: blob + b"x",
        lambda blob: blob[:20],
        lambda blob: b"",
        lambda blob: b"junk",
        lambda blob: b"CTXWBLOB" + bytes(200),
        lambda blob: blob[: len(blob) // 2] + bytes([blob[len(blob) // 2] ^ 1]) + blob[len(blob) // 2 + 1 :],
        lambda blob: blob[:-5] + bytes([blob[-5] ^ 1]) + blob[-4:],
    ],
)
def test_a_damaged_value_is_a_miss_and_deleted(
    store: RedisStore, client: Any, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("span/a", bytes(range(200)))
    store.put("span/b", b"other")
    name = store._values + "span/a"
    client.set(name, damage(client.get(name)))
    with caplog.at_level(logging.WARNING, logger="ctxwin.store"):
        assert store.get("span/a") is None
    assert "span/a in redis://127.0.0.1" in caplog.text
    assert "corrupt and was deleted" in caplog.text
    assert not client.exists(name)
    assert store.stats().corrupt == 1
    assert list(store.list()) == ["span/b"]
    assert store.get("span/b") == b"other"
    assert store.stats().bytes == client.strlen(store._values + "span/b")


def test_a_blob_under_another_key_is_a_miss(store: RedisStore, client: Any) -> None:
    store.put("span/a", b"mine")
    client.copy(store._values + "span/a", store._values + "span/b")
    assert store.get("span/b") is None
    assert (store.get("span/a"), store.stats().corrupt) == (b"mine", 1)


def test_another_type_under_a_key_is_a_miss(store: RedisStore, client: Any) -> None:
    client.rpush(store._values + "span/a", "x")
    assert not store.contains("span/a")
    assert store.get("span/a") is None
    assert not client.exists(store._values + "span/a")
    assert store.put("span/a", b"x")
    assert store.get("span/a") == b"x"


def test_what_was_replaced_meanwhile_is_not_deleted(store: RedisStore, server: Server, client: Any) -> None:
    """Between reading a damaged value and deleting it, another process puts a good one."""
    store.put("span/a", b"old")
    client.set(store._values + "span/a", b"junk")
    with closing(twin(store, server)) as other:
        real = store._eval

        def late(at: Any, script: str, *arguments: Any) -> Any:
            if at is store._client:  # the deletion; reading goes through a pipeline
                other.put("span/a", b"good")
            return real(at, script, *arguments)

        store._eval = late  # type: ignore[method-assign]
        assert store.get("span/a") is None
        store._eval = real  # type: ignore[method-assign]
        assert store.get("span/a") == b"good"


def test_verify_finds_damage_and_what_is_gone(store: RedisStore, client: Any) -> None:
    for name in "abcd":
        store.put(f"span/{name}", name.encode() * 100)
    client.set(store._values + "span/a", b"junk")
    client.delete(store._values + "span/b")
    assert store.verify() == (2, 2)
    assert store.verify() == (2, 0)
    assert list(store.list()) == ["span/c", "span/d"]


def test_the_index_mends_itself(store: RedisStore, client: Any) -> None:
    for name in "ab":
        store.put(f"span/{name}", bytes(100))
    client.delete(store._values + "span/a")  # the server's own eviction
    assert not store.contains("span/a")
    assert store.stats().items == 1
    client.delete(*store._index)
    assert store.stats().items == 0
    assert store.get("span/b") == bytes(100)
    assert (store.stats().items, store.stats().bytes) == (1, client.strlen(store._values + "span/b"))
    client.flushdb()
    assert (store.get("span/b"), store.stats().items, store.stats().bytes) == (None, 0, 0)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_put_that_cannot_be_indexed_leaves_nothing_for_ever(store: RedisStore, client: Any, index: int) -> None:
    client.set(store._index[index], "of another type")
    assert not store.put("span/a", b"value")
    assert store.failures
    left = client.keys(store._passing + "*") + client.keys(store._values + "*")
    assert all(0 < client.pttl(name) <= 60_000 for name in left), "what no index knows goes by itself"
    client.delete(store._index[index])
    assert store.put("span/b", b"value")
    assert client.pttl(store._values + "span/b") == -1, "what is stored stays"
    assert store.put("span/b", b"another")
    assert client.pttl(store._values + "span/b") == -1


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


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis:///0",
        "redis://localhost/x",
        "redis://localhost:99999",
        "redis://localhost:x",
        "redis://localhost/0?decode_responses=true",
        "redis://localhost/-1",
    ],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="must be redis://"):
        open_store(url)


@pytest.mark.parametrize("bad", [{"max_bytes": 0}, {"ttl": 0.0}, {"ttl": -1.0}])
def test_bad_limits(server: Server, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RedisStore(server.url, **bad)


def test_opening_by_name(server: Server) -> None:
    with closing(open_store(server.url, max_bytes="1MB", ttl=5.0)) as plain:
        assert isinstance(plain, RedisStore)
        assert (plain.max_bytes, plain.ttl) == (10**6, 5.0)
    with closing(open_store(f"tiered:memory:,{server.url}", max_bytes="3GB")) as tiered:
        assert isinstance(tiered, TieredStore)
        assert [type(tier) for tier in tiered.tiers] == [MemoryStore, RedisStore]
        assert [tier.max_bytes for tier in tiered.tiers] == [2 << 30, 3 * 10**9]  # type: ignore[attr-defined]
    with closing(open_store(server.url)) as default:
        assert default.max_bytes == 2 << 30  # type: ignore[attr-defined]


def test_databases_and_tenants_never_meet(server: Server) -> None:
    one = server.url.removesuffix("0") + "1"
    places = [(server.url, ""), (server.url, "a"), (server.url, "a:"), (server.url, "}a"), (one, ""), (one, "a")]
    stores = [open_store(url, tenant=tenant, max_bytes=9000) for url, tenant in places]
    for store in stores:
        for key in list(store.list()):
            store.delete(key)
    for i, store in enumerate(stores):
        assert store.get("span/a") is None
        assert store.put("span/a", b"%d" % i)
    for i in range(40):
        stores[1].put(f"span/{i}", bytes(1000))
    for i, store in enumerate(stores):
        if i != 1:
            assert (store.get("span/a"), list(store.list())) == (b"%d" % i, ["span/a"])
        store.close()


def test_two_processes_share_a_store(server: Server) -> None:
    tenant = uuid.uuid4().hex
    code = (
        "import sys; from ctxwin.store import open_store\n"
        "store = open_store(sys.argv[1], tenant=sys.argv[2])\n"
        "assert store.get('span/here') == bytes(range(256)) * 100\n"
        "assert store.put('span/there', b'from the other process')\n"
        "assert store.lease('span/there')\n"
        "assert store.delete('span/gone')\n"
        "print(sorted(store.list()))\n"
    )
    with closing(open_store(server.url, tenant=tenant)) as store:
        store.put("span/here", bytes(range(256)) * 100)
        store.put("span/gone", b"x")
        command = [sys.executable, "-c", code, server.url, tenant]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()})
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "['span/here', 'span/there']"
        assert store.get("span/there") == b"from the other process"
        assert store.stats().leased == 0
        assert not store.contains("span/gone")


def test_a_window_moves_to_another_process_through_redis(server: Server) -> None:
    """What one engine stored, another one that shares nothing but the server serves without computing."""
    tenant = uuid.uuid4().hex
    with closing(FakeEngine(open_store(server.url, tenant=tenant))) as first:
        window = Window(first, "hd", fidelity=Fidelity("exact"))
        window.extend([Chunk.text(t * 3) for t in "abc"])
        answer = window.ask("q", max_tokens=3)
        state = window.snapshot().model_dump_json()
    with closing(FakeEngine(open_store(server.url, tenant=tenant))) as second:
        again = Window.restore(second, state).ask("q", max_tokens=3)
        assert again.token_ids == answer.token_ids
        assert again.usage.computed_tokens == again.usage.prompt_tokens - 12  # header and chunks were held


def _path() -> str:
    """Where this process finds its modules, for a child."""
    return os.pathsep.join(p for p in sys.path if p)


def test_redis_py_is_loaded_only_when_opened_and_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, ctxwin, ctxwin.store.redis; assert 'redis' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": _path()}
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setitem(sys.modules, "redis", None)  # Python's own mark for "not installed"
    with pytest.raises(MissingExtra, match=r"redis is not installed; run pip install 'ctxwin\[redis\]'"):
        open_store("redis://localhost")


def test_a_writer_without_the_key_causes_misses_only(server: Server, store: RedisStore) -> None:
    ours = twin(store, server, secret=b"a secret of the store")
    assert ours.put("span/a", b"right")
    for secret in (None, b"somebody else's secret"):
        theirs = twin(store, server, secret=secret)
        assert theirs.put("span/a", b"forged")
        assert ours.get("span/a") is None
        assert ours.put("span/a", b"right")
        assert ours.get("span/a") == b"right"
