"""The Redis store against a real server: the conformance suite, corruption, limits, failures, tenants, other processes.

The server runs on a loopback port of its own, without persistence, and ends with this module.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.errors import MissingExtra
from ctxwin.store import Store, open_store
from ctxwin.store.memory import MemoryStore
from ctxwin.store.redis import RedisStore
from ctxwin.store.testing import StoreConformance
from ctxwin.store.tiered import TieredStore
from store.redis_server import Server
from store.redis_stores import LARGE, twin
from window.fake import FakeEngine

redis = pytest.importorskip("redis", reason="redis-py is not installed; run pip install 'ctxwin[redis]'")


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
