"""Opening stores by name, tenants, tiers, faults and observation."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ctxwin.store import Store, open_store, parse_bytes
from ctxwin.store.disk import DiskStore
from ctxwin.store.memory import MemoryStore
from ctxwin.store.tiered import TieredStore
from store.wrapped import FaultStore, LoggingStore


@pytest.mark.parametrize(
    ("size", "want"),
    [
        (7, 7),
        ("7", 7),
        ("7B", 7),
        ("50GB", 50 * 10**9),
        ("50 gb", 50 * 10**9),
        ("1.5KB", 1500),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(size: int | str, want: int) -> None:
    assert parse_bytes(size) == want


@pytest.mark.parametrize("size", [0, -1, "0", "-1GB", "GB", "", "1 PB", "1e3", True, 1.5, None])
def test_bad_sizes(size: object) -> None:
    with pytest.raises(ValueError, match="size must be"):
        parse_bytes(size)  # type: ignore[arg-type]


def test_a_folder_of_a_user_that_is_not_there() -> None:
    for url in ("disk:~no-such-user/kv", "tiered:memory:,disk:~no-such-user"):
        with pytest.raises(ValueError, match="must be of a user that this machine has, got '~no-such-user"):
            open_store(url)


def test_kinds(tmp_path: Path) -> None:
    memory = open_store("memory:", max_bytes="1MB", ttl=5.0)
    assert isinstance(memory, MemoryStore)
    assert (memory.max_bytes, memory.ttl) == (10**6, 5.0)
    folder = open_store(f"disk:{tmp_path}/a, b:c", max_bytes="1MB")
    assert isinstance(folder, DiskStore)
    assert folder.path.parent == tmp_path / "a, b:c"
    tiered = open_store(f"tiered:memory:,disk:{tmp_path}/x,y", max_bytes="3GB")
    assert isinstance(tiered, TieredStore)
    assert [type(tier) for tier in tiered.tiers] == [MemoryStore, DiskStore]
    assert [tier.max_bytes for tier in tiered.tiers] == [2 << 30, 3 * 10**9]  # type: ignore[attr-defined]
    small = open_store(f"tiered:memory:,disk:{tmp_path}/x,y", max_bytes="1MB")
    assert [tier.max_bytes for tier in small.tiers] == [10**6, 10**6]  # type: ignore[attr-defined]


def test_defaults(tmp_path: Path) -> None:
    sizes = [open_store(url).max_bytes for url in ("memory:", f"disk:{tmp_path}")]  # type: ignore[attr-defined]
    assert sizes == [2 << 30, 50 * 10**9]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "memory:x",
        "disk",
        "disk:",
        "s3://bucket",
        "./kv",
        "redis:localhost",
        "tiered:",
        "tiered:memory:",
        "tiered:tiered:",
    ],
)
def test_unknown_kinds_say_what_is_supported(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be .*disk:PATH.*got"):
        open_store(url)


def test_another_distributions_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its entry point, alone and as a tier, with the tenant and the secret that seals its records."""
    (tmp_path / "shelf.py").write_text(
        "from ctxwin.store.memory import MemoryStore\n"
        "class Shelf(MemoryStore):\n"
        "    def __init__(self, url, max_bytes, ttl, tenant, *, secret):\n"
        "        super().__init__(max_bytes, ttl)\n"
        "        self.opened = url, tenant, secret\n"
    )
    installed = tmp_path / "shelf-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[ctxwin.stores]\nshelf = shelf:Shelf\n")
    with pytest.raises(ValueError, match=r"distribution adds, got 'shelf:one'"):
        open_store("shelf:one")
    monkeypatch.syspath_prepend(tmp_path)
    store = open_store("shelf:one", max_bytes="1MB", ttl=5.0, tenant="alice", key="k" * 16)
    url, tenant, secret = store.opened  # type: ignore[attr-defined]
    assert (url, tenant, store.limit(), store.ttl) == ("shelf:one", "alice", 10**6, 5.0)  # type: ignore[attr-defined]
    assert len(secret) == 32
    tiered = open_store("tiered:memory:,shelf:one")
    assert tiered.tiers[1].opened == ("shelf:one", "", None)  # type: ignore[attr-defined]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_store("disk:~/kv").put("span/a", b"x")
    assert (tmp_path / "kv").is_dir()


@pytest.mark.parametrize("url", ["disk:{}", "tiered:memory:,disk:{}"])
def test_tenants_never_meet(tmp_path: Path, url: str) -> None:
    names = ["", "alice", "bob", "../alice", "alice/"]
    stores: dict[str, Store] = {name: open_store(url.format(tmp_path), tenant=name, max_bytes=9000) for name in names}
    for name, store in stores.items():
        assert store.get("span/a") is None
        assert list(store.list()) == []
        assert store.put("span/a", name.encode())
        assert not store.contains(f"span/{name}")
    for name, store in stores.items():
        assert store.get("span/a") == name.encode()
        assert list(store.list()) == ["span/a"]
        assert store.stats().items == 1
    for i in range(50):
        stores["bob"].put(f"span/{i}", bytes(1000))
    assert stores["alice"].get("span/a") == b"alice", "one tenant's writes do not evict another's"
    stores["bob"].delete("span/a")
    assert stores[""].get("span/a") == b""
    for store in stores.values():
        store.close()
    again = open_store(url.format(tmp_path), tenant="alice")
    assert list(again.list()) == ["span/a"]


class TestTiers:
    def test_reading_promotes(self, tmp_path: Path) -> None:
        fast, slow = MemoryStore(), DiskStore(tmp_path)
        slow.put("span/a", b"value")
        tiered = TieredStore([fast, slow])
        assert tiered.get("span/a") == b"value"
        assert fast.get("span/a") == b"value"
        before = slow.stats().hits
        tiered.get("span/a")
        assert slow.stats().hits == before

    @pytest.mark.parametrize("read", ["get", "prefetch"])
    @pytest.mark.parametrize("held_below", [False, True])
    def test_what_is_deleted_while_it_is_read_does_not_come_back(self, read: str, held_below: bool) -> None:
        """Of a slow disk, or a server far away: the read is under way when the deletion begins, or has ended."""
        fast, slow = MemoryStore(), MemoryStore()
        reached, may_go_on = threading.Event(), threading.Event()
        below = slow.get

        def take_long(key: str) -> bytes | None:
            value = below(key)
            reached.set()
            assert may_go_on.wait(60)
            return value

        slow.put("span/a", b"secret")
        slow.get = take_long  # type: ignore[method-assign]
        with closing(TieredStore([fast, slow])) as tiered, ThreadPoolExecutor(1) as threads:
            if read == "get":
                threads.submit(tiered.get, "span/a")
            else:
                tiered.prefetch(["span/a"])
            assert reached.wait(60)
            tiered.delete("span/other" if held_below else "span/a")
            may_go_on.set()
            threads.shutdown()
            tiered._fetcher.shutdown()
            slow.get = below  # type: ignore[method-assign]
            assert tiered.contains("span/a") == slow.contains("span/a") == held_below
            assert fast.contains("span/a") == held_below

    def test_a_read_that_begins_within_a_deletion_brings_nothing_back(self) -> None:
        fast, slow = MemoryStore(), MemoryStore()
        reached, may_go_on = threading.Event(), threading.Event()
        at_last = slow.delete

        def take_long(key: str) -> bool:
            reached.set()
            assert may_go_on.wait(60)
            return at_last(key)

        slow.put("span/a", b"secret")
        slow.delete = take_long  # type: ignore[method-assign]
        with closing(TieredStore([fast, slow])) as tiered, ThreadPoolExecutor(1) as threads:
            deleting = threads.submit(tiered.delete, "span/a")
            assert reached.wait(60)
            assert tiered.get("span/a") == b"secret"  # it is not deleted yet
            may_go_on.set()
            assert deleting.result(60) and not tiered.contains("span/a")

    def test_a_copy_that_is_made_within_a_deletion_is_taken_back(self) -> None:
        """The deletion has passed the fast tier when the copy arrives there."""
        fast, slow = MemoryStore(), MemoryStore()
        slow.put("span/a", b"secret")
        with closing(TieredStore([fast, slow])) as tiered:
            put = fast.put

            def put_late(key: str, value: bytes) -> bool:
                tiered.delete("span/a")
                return put(key, value)

            fast.put = put_late  # type: ignore[method-assign]
            assert tiered.get("span/a") == b"secret"
            assert not tiered.contains("span/a")

    def test_what_leaves_the_fast_tier_is_still_below(self, tmp_path: Path) -> None:
        tiered = TieredStore([MemoryStore(2500), DiskStore(tmp_path)])
        for i in range(6):
            assert tiered.put(f"span/{i}", b"%d" % i * 1000)
        assert tiered.tiers[0].stats().items == 2
        assert [tiered.get(f"span/{i}") for i in range(6)] == [b"%d" % i * 1000 for i in range(6)]
        assert tiered.stats().items == 6

    def test_too_large_for_the_fast_tier(self, tmp_path: Path) -> None:
        tiered = TieredStore([MemoryStore(100), DiskStore(tmp_path)])
        assert tiered.put("span/a", b"small")
        assert tiered.put("span/a", bytes(1000))
        assert tiered.get("span/a") == bytes(1000), "the fast tier must not keep the older value"

    def test_a_corrupt_slow_tier_is_a_miss(self, tmp_path: Path) -> None:
        slow = DiskStore(tmp_path)
        slow.put("span/a", b"value")
        next(p for p in (tmp_path / "blobs").rglob("*.blob")).write_bytes(b"junk")
        tiered = TieredStore([MemoryStore(), slow])
        assert tiered.get("span/a") is None
        assert tiered.stats().corrupt == 1
        assert not tiered.tiers[0].contains("span/a")

    def test_leases_pair_up_after_a_promotion(self, tmp_path: Path) -> None:
        fast, slow = MemoryStore(), DiskStore(tmp_path)
        slow.put("span/a", b"value")
        tiered = TieredStore([fast, slow])
        assert tiered.lease("span/a")
        tiered.get("span/a")
        assert tiered.lease("span/a")
        tiered.release("span/a")
        tiered.release("span/a")
        tiered.release("span/a")
        assert (fast.stats().leased, slow.stats().leased, tiered.stats().leased) == (0, 0, 0)

    def test_needs_a_tier(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            TieredStore([])


class TestFaults:
    def run(self, seed: int) -> tuple[list[bytes | None], dict[str, int]]:
        store = FaultStore(MemoryStore(), seed=seed, miss=0.2, corrupt=0.2, refuse=0.2)
        for i in range(100):
            store.put(f"span/{i}", b"value %d" % i)
        return [store.get(f"span/{i}") for i in range(100)], dict(store.faults)

    def test_the_same_seed_gives_the_same_faults(self) -> None:
        assert self.run(1) == self.run(1)
        assert self.run(1) != self.run(2)

    def test_every_kind_happens_and_is_counted(self) -> None:
        got, faults = self.run(3)
        whole = sum(value == b"value %d" % i for i, value in enumerate(got))
        assert whole + got.count(None) == 100, "what is damaged is a miss"
        assert got.count(None) <= sum(faults.values())
        assert min(faults.values()) > 5
        assert whole > 30

    def test_latency(self) -> None:
        waits: list[float] = []
        store = FaultStore(MemoryStore(), latency_s=0.5, sleep=waits.append)
        store.put("span/a", b"x")
        store.get("span/a")
        assert waits == [0.5, 0.5]

    @pytest.mark.parametrize("bad", [{"miss": 1.1}, {"corrupt": -0.1}, {"refuse": 2.0}, {"latency_s": -1.0}])
    def test_bad_arguments(self, bad: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="must be"):
            FaultStore(MemoryStore(), **bad)  # type: ignore[arg-type]


def test_logging_counts_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    store = LoggingStore(MemoryStore())
    with caplog.at_level(logging.DEBUG, logger="store.wrapped"):
        store.put("span/a", b"value")
        store.get("span/a")
        store.get("span/b")
        store.contains("span/a")
        store.delete("span/a")
    assert store.calls == {"put": 1, "get": 2, "contains": 1, "delete": 1}
    assert (store.bytes_read, store.bytes_written) == (5, 5)
    assert "get span/b -> miss" in caplog.text


def test_memory_expires_by_its_clock() -> None:
    now = [0.0]
    store = MemoryStore(ttl=10.0, clock=lambda: now[0])
    store.put("span/a", b"x")
    now[0] = 9.0
    assert store.get("span/a") == b"x"
    store.put("span/a", b"x")
    now[0] = 18.0
    assert store.get("span/a") == b"x"
    now[0] = 19.0
    assert store.get("span/a") is None
    assert store.stats().bytes == 0


def test_memory_makes_no_copy() -> None:
    store, value = MemoryStore(), bytes(1000)
    store.put("span/a", value)
    assert store.get("span/a") is value


KEY = "a key that all machines share"


def test_a_key_seals_what_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"tiered:memory:,disk:{tmp_path}"
    with closing(open_store(url, key=KEY)) as store:
        assert store.put("span/a", b"right")
    for foreign in ({}, {"key": "somebody else's key"}):
        with closing(open_store(url, **foreign)) as store:  # type: ignore[arg-type]
            assert store.get("span/a") is None
            assert store.put("span/a", b"forged")
        with closing(open_store(url, key=KEY)) as store:
            assert store.get("span/a") is None
            assert store.put("span/a", b"right")
    monkeypatch.setenv("CTXWIN_STORE_KEY", KEY)
    with closing(open_store(url)) as store:
        assert store.get("span/a") == b"right"
    with pytest.raises(ValueError, match="at least 16 bytes, got 5"):
        open_store(url, key=b"short")
    with pytest.raises(TypeError, match="a store key must be a str or bytes, got int"):
        open_store(url, key=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tenant must be a str, got int"):
        open_store(url, tenant=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ttl must be positive seconds or None, got '5'"):
        open_store(url, ttl="5")  # type: ignore[arg-type]


def test_another_tenants_records_are_foreign(tmp_path: Path) -> None:
    """Copied over by somebody who can write to both folders."""
    stores = {name: open_store(f"disk:{tmp_path}", tenant=name, key=KEY) for name in ("alice", "bob")}
    folders = {name: store.path for name, store in stores.items() if isinstance(store, DiskStore)}
    stores["bob"].put("span/a", b"forged")
    for store in stores.values():
        store.close()
    shutil.rmtree(folders["alice"])
    shutil.copytree(folders["bob"], folders["alice"])
    assert open_store(f"disk:{tmp_path}", tenant="alice", key=KEY).get("span/a") is None
    assert open_store(f"disk:{tmp_path}", tenant="bob", key=KEY).get("span/a") == b"forged"


def test_what_will_be_read_is_brought_up_meanwhile(tmp_path: Path) -> None:
    fast, slow = MemoryStore(), DiskStore(tmp_path)
    tiered = TieredStore([fast, slow])
    for i in range(5):
        slow.put(f"span/{i}", bytes([i]))
    tiered.prefetch([f"span/{i}" for i in range(5)] + ["span/gone"])
    until = time.monotonic() + 10
    while not all(fast.contains(f"span/{i}") for i in range(5)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert tiered.get("span/3") == b"\3"
    tiered.prefetch(["span/1"] * 3000)
    tiered.close()
    tiered.prefetch(["span/1"])
