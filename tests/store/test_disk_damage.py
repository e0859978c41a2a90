"""The disk store on records and indexes that are damaged, forged or swapped."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from ctxwin.store.disk import DiskStore
from store.disk_files import blobs, sql

SECRET = b"a secret of the store"


class TestCorruption:
    def test_a_flipped_bit_is_a_miss_counted_and_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value" * 100)
        whole = blobs(tmp_path)[0].read_bytes()
        for at in (0, 9, 14, 20, 40, 63, 70, len(whole) - 1):
            store.put("span/a", b"value" * 100)
            blob = blobs(tmp_path)[0]
            blob.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            assert store.get("span/a") is None, at
            assert not blob.exists()
        assert store.stats().corrupt == 8
        assert caplog.text.count("is corrupt and was deleted") == 8

    def test_verify_finds_and_removes(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        for i in range(4):
            store.put(f"span/{i}", b"%d" % i * 100)
        bad = blobs(tmp_path)[1]
        bad.write_bytes(bad.read_bytes()[:-1] + b"?")
        assert store.verify() == (3, 1)
        assert store.verify() == (3, 0)

    def test_another_keys_blob_is_a_miss(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value of a")
        store.put("span/b", b"value of b")
        ((file, sum_),) = sql(tmp_path, "SELECT filename, value FROM Cache WHERE key = 'span/a'")
        sql(tmp_path, "UPDATE Cache SET filename = ?, value = ? WHERE key = 'span/b'", file, sum_)
        assert store.get("span/b") is None
        assert store.stats().corrupt == 1

    def test_an_older_value_put_back_is_a_miss(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"older")
        older = blobs(tmp_path)[0].read_bytes()
        store.put("span/a", b"newer")
        blobs(tmp_path)[0].write_bytes(older)
        assert store.get("span/a") is None

    @pytest.mark.parametrize("how", ["garbage", "empty", "gone", "no tables", "torn"])
    def test_a_damaged_index_is_made_again(self, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
        store = DiskStore(tmp_path)
        for i in range(50):
            store.put(f"span/{i}", b"value %d" % i)
        store.put("span/1", b"another value")
        store.delete("span/2")
        store.close()
        for tail in ("-wal", "-shm"):
            (tmp_path / f"cache.db{tail}").unlink(missing_ok=True)
        index = tmp_path / "cache.db"
        if how == "gone":
            index.unlink()
        elif how == "no tables":
            sql(tmp_path, "DROP TABLE Cache")
        else:
            whole = index.read_bytes()
            torn = whole[:8192] + bytes(len(whole) - 8192)
            index.write_bytes({"garbage": b"this is no database" * 100, "empty": b"", "torn": torn}[how])
        again = DiskStore(tmp_path)
        assert again.get("span/0") == b"value 0"
        assert again.get("span/1") == b"another value"
        assert again.get("span/2") is None
        assert again.verify() == (49, 0)
        assert (how == "gone") or "is damaged" in caplog.text
        assert again.put("span/2", b"value")
        again.gc(0)
        assert len(blobs(tmp_path)) == 50
        assert not list(tmp_path.glob("*.damaged-*"))

    def test_an_index_that_breaks_while_it_is_open_is_made_again(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        for i in range(200):
            store.put(f"span/{i}", b"value %d" % i)
        other = DiskStore(tmp_path)
        other.close()
        index = tmp_path / "cache.db"
        with index.open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(index.stat().st_size - 4096))
        (tmp_path / "cache.db-wal").write_bytes(b"")
        found = [store.get(f"span/{i}") for i in range(200)]
        assert all(value in (None, b"value %d" % i) for i, value in enumerate(found))
        assert [store.get(f"span/{i}") for i in range(200)] == [b"value %d" % i for i in range(200)]

    @pytest.mark.parametrize("what", ["pipe", "folder", "link", "device"])
    def test_what_is_no_file_is_a_miss_and_nobody_waits_for_it(self, tmp_path: Path, what: str) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value")
        (blob,) = blobs(tmp_path)
        kept = blob.rename(tmp_path / "kept")
        make = {
            "pipe": lambda: os.mkfifo(blob),
            "folder": blob.mkdir,
            "link": lambda: blob.symlink_to(kept),
            "device": lambda: blob.symlink_to("/dev/zero"),
        }[what]
        make()
        began = time.monotonic()
        assert not store.contains("span/a")
        assert store.get("span/a") is None
        assert store.put("span/a", b"value")
        assert store.get("span/a") == b"value"
        assert time.monotonic() - began < 5
        assert DiskStore(tmp_path).verify() == (1, 0)
        assert kept.exists()

    def test_time_to_live_outlasts_the_index(self, tmp_path: Path) -> None:
        with contextlib.closing(DiskStore(tmp_path)) as store:
            store.put("span/a", b"value")
        (blob,) = blobs(tmp_path)
        blob.rename(blob.with_name(f"{time.time_ns() - 50 * 10**9:016x}{blob.name[16:]}"))
        (tmp_path / "cache.db").unlink()
        with contextlib.closing(DiskStore(tmp_path, ttl=60.0)) as store:
            left = store._cache.get("span/a", expire_time=True)[1] - time.time()
            assert store.get("span/a") == b"value" and 5 < left <= 10
        (tmp_path / "cache.db").unlink()
        with contextlib.closing(DiskStore(tmp_path, ttl=40.0)) as store:
            assert store.get("span/a") is None

    def test_orphans_go_when_the_store_is_opened_or_verified(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value")
        (blob,) = blobs(tmp_path)

        def orphan() -> Path:
            made = blob.with_name("0" * 32 + ".blob")
            made.write_bytes(b"left by a crash")
            os.utime(made, (time.time() - 3600,) * 2)
            return made

        left = orphan()
        again = DiskStore(tmp_path)
        assert not left.exists()
        left = orphan()
        assert again.verify() == (1, 0)
        assert not left.exists()
        young = blob.with_name("1" * 32 + ".blob")
        young.write_bytes(b"a put under way")
        assert DiskStore(tmp_path).get("span/a") == b"value"
        assert young.exists()


class TestSeal:
    def test_a_writer_without_the_key_causes_misses_only(self, tmp_path: Path) -> None:
        ours = DiskStore(tmp_path, secret=SECRET)
        ours.put("span/a", b"right")
        for secret in (None, b"somebody else's secret"):
            theirs = DiskStore(tmp_path, secret=secret)
            assert theirs.put("span/b", b"forged")
            assert ours.get("span/b") is None
            assert theirs.put("span/a", b"forged")
            assert ours.get("span/a") is None
            assert ours.put("span/a", b"right")
            assert ours.get("span/a") == b"right"
            assert theirs.get("span/a") is None
            assert ours.put("span/a", b"right")

    @pytest.mark.parametrize("secret", [None, b"somebody else's secret"])
    def test_what_cannot_be_checked_is_left_and_reported(self, tmp_path: Path, secret: bytes | None) -> None:
        ours = DiskStore(tmp_path, secret=SECRET)
        for i in range(4):
            ours.put(f"span/{i}", b"value")
        damaged = blobs(tmp_path)[0]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        theirs = DiskStore(tmp_path, secret=secret)
        assert theirs.verify() == (0, 1), "damage shows without the key"
        assert (theirs.stats().foreign, theirs.stats().corrupt) == (3, 1)
        assert [theirs.get(f"span/{i}") for i in range(4)] == [None] * 4
        assert ours.verify() == (3, 0)

    def test_a_forged_file_under_a_forged_row_is_a_miss(self, tmp_path: Path) -> None:
        """Whoever writes to the folder may write rows, too, but not the code over them."""
        ours = DiskStore(tmp_path / "ours", secret=SECRET)
        theirs = DiskStore(tmp_path / "theirs", secret=b"somebody else's secret")
        for store, value in ((ours, b"right"), (theirs, b"forged")):
            store.put("span/a", value)
        (blob,), (forged,) = blobs(tmp_path / "ours"), blobs(tmp_path / "theirs")
        blob.write_bytes(forged.read_bytes())
        ((code,),) = sql(tmp_path / "theirs", "SELECT value FROM Cache")
        sql(tmp_path / "ours", "UPDATE Cache SET value = ?", code)
        assert ours.get("span/a") is None
