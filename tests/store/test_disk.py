"""The disk store by itself: reopening, rights, upkeep."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ctxwin.store.disk import DiskStore
from store.disk_files import blobs, sql


def test_survives_reopening(tmp_path: Path) -> None:
    with_value = DiskStore(tmp_path)
    with_value.put("span/a", b"value")
    with_value.close()
    again = DiskStore(tmp_path)
    assert again.get("span/a") == b"value"
    assert again.stats().items == 1


def test_the_same_value_is_not_written_twice(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put("span/a", b"value")
    before = blobs(tmp_path)
    store.put("span/a", b"value")
    assert blobs(tmp_path) == before
    store.put("span/a", b"other")
    assert len(blobs(tmp_path)) == 1
    assert blobs(tmp_path) != before


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "store")
        store.put("span/a", b"value")
    finally:
        os.umask(before)
    paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    (tmp_path / "store").chmod(0o755)
    DiskStore(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


class TestUpkeep:
    def test_gc_removes_orphans_and_nothing_else(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value")
        (tmp_path / "blobs" / "00").mkdir(exist_ok=True)
        orphan = tmp_path / "blobs" / "00" / ("0" * 32 + ".blob")
        orphan.write_bytes(b"x" * 10)
        (tmp_path / "tmp" / "dead.tmp").write_bytes(b"y" * 5)
        (tmp_path / "README").write_text("somebody's note")
        assert store.gc() == (0, 0), "young files may be a put in progress"
        assert store.gc(0) == (2, 15)
        assert store.get("span/a") == b"value"
        assert (tmp_path / "README").exists()

    def test_gc_without_a_readable_index_removes_no_record(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value")
        sql(tmp_path, "ALTER TABLE Cache RENAME TO Gone")
        store.gc(0)
        assert len(blobs(tmp_path)) == 1
        assert store.get("span/a") == b"value"

    def test_opening_clears_old_temporary_files(self, tmp_path: Path) -> None:
        DiskStore(tmp_path).close()
        for name, age in (("old.tmp", 7200), ("new.tmp", 0)):
            (tmp_path / "tmp" / name).write_bytes(b"x")
            os.utime(tmp_path / "tmp" / name, (time.time() - age,) * 2)
        (tmp_path / "tmp" / "tmp1").mkdir()  # an index that a killed process has not finished
        (tmp_path / "tmp" / "tmp1" / "cache.db").touch()
        DiskStore(tmp_path)
        assert [p.name for p in (tmp_path / "tmp").iterdir()] == ["new.tmp"]

    def test_a_deleted_record_does_not_come_back_with_the_clock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, now = DiskStore(tmp_path, ttl=60), time.time
        assert store.put("span/a", b"value")
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        assert store.get("span/a") is None and store.delete("span/a") is False
        monkeypatch.setattr(time, "time", now)
        assert store.get("span/a") is None and not blobs(tmp_path)

    def test_expired_values_free_their_files(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path, ttl=0.05)
        store.put("span/a", b"value")
        time.sleep(0.1)
        store.gc(0)
        assert blobs(tmp_path) == []
        assert store.stats().items == 0

    @pytest.mark.parametrize("reopened", [False, True])
    def test_recency_survives_a_clock_that_is_set_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: bool
    ) -> None:
        store, now = DiskStore(tmp_path, max_bytes=3500), time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
        for name in "abc":
            store.put(f"span/{name}", name.encode() * 1000)
            store.get(f"span/{name}")
        monkeypatch.setattr(time, "time_ns", now)
        if reopened:
            store.close()
            store = DiskStore(tmp_path, max_bytes=3500)
        for name in "de":
            store.put(f"span/{name}", name.encode() * 1000)
        assert list(store.list()) == ["span/c", "span/d", "span/e"]

    def test_recency_survives_reopening(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path, max_bytes=3500)
        for name in "abc":
            store.put(f"span/{name}", name.encode() * 1000)
        store.get("span/a")
        store.close()
        again = DiskStore(tmp_path, max_bytes=3500)
        again.put("span/d", b"d" * 1000)
        assert list(again.list()) == ["span/a", "span/c", "span/d"]

    def test_what_is_released_leaves_before_what_was_used_later(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path, max_bytes=3500)
        for name in "abc":
            store.put(f"span/{name}", name.encode() * 1000)
        assert store.lease("span/a")
        for name in "def":
            assert store.put(f"span/{name}", name.encode() * 1000)
        assert list(store.list()) == ["span/a", "span/e", "span/f"]
        store.release("span/a")
        assert store.put("span/g", b"g" * 1000)
        assert list(store.list()) == ["span/e", "span/f", "span/g"]

    def test_a_smaller_limit_applies_at_the_next_put(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        for i in range(10):
            store.put(f"span/{i}", bytes(1000))
        store.close()
        again = DiskStore(tmp_path, max_bytes=3500)
        assert again.put("span/x", bytes(1000))
        assert again.stats().bytes <= 3500
        assert len(blobs(tmp_path)) == again.stats().items == 3

    def test_a_record_of_another_version_is_a_miss_that_stays(self, tmp_path: Path) -> None:
        """It may be a library's only copy of a file, written by an older or a newer ctxwin."""
        DiskStore(tmp_path).put("file/a", b"value")
        (blob,) = blobs(tmp_path)
        raw = blob.read_bytes()
        blob.write_bytes(raw[:8] + bytes(byte + 1 if byte else 0 for byte in raw[8:10]) + raw[10:])
        store = DiskStore(tmp_path)
        assert store.get("file/a") is None and store.verify() == (0, 0)
        assert (store.stats().foreign, store.stats().corrupt) == (2, 0)
        blob.write_bytes(raw)
        assert store.get("file/a") == b"value", "it is found by the version that wrote it"
        assert store.put("file/a", b"other") and store.get("file/a") == b"other"
