"""The disk store: what a crash, another process, or a hostile folder can and cannot do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxwin.store.disk import DiskStore
from ctxwin.store.disk_index import Index
from store.disk_files import blobs, sql


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A second process, as a user's would be: fresh interpreter, same folder."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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


class TestProcesses:
    def test_a_second_process_finds_the_first_ones_chunks(self, tmp_path: Path) -> None:
        wrote = run(
            "import sys; from ctxwin.store.disk import DiskStore\n"
            "s = DiskStore(sys.argv[1])\n"
            "for i in range(5): assert s.put(f'span/{i}', b'%d' % i * 1000)\n",
            tmp_path,
        )
        assert wrote.returncode == 0, wrote.stderr
        store = DiskStore(tmp_path)
        assert list(store.list()) == [f"span/{i}" for i in range(5)]
        assert store.get("span/3") == b"3" * 1000

    def test_both_see_each_others_writes_and_deletes(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/mine", b"mine")
        other = run(
            "import sys; from ctxwin.store.disk import DiskStore\n"
            "s = DiskStore(sys.argv[1])\n"
            "assert s.get('span/mine') == b'mine' and s.delete('span/mine') and s.put('span/theirs', b'theirs')\n",
            tmp_path,
        )
        assert other.returncode == 0, other.stderr
        assert store.get("span/mine") is None
        assert store.get("span/theirs") == b"theirs"

    def test_writers_at_once_within_one_limit(self, tmp_path: Path) -> None:
        code = (
            "import sys; from ctxwin.store.disk import DiskStore\n"
            "s = DiskStore(sys.argv[1], max_bytes=200_000)\n"
            "for i in range(60):\n"
            "    k = f'span/{i % 20}'; v = k.encode() * 1500\n"
            "    s.put(k, v); got = s.get(k); assert got in (None, v)\n"
            "assert s.stats().corrupt == 0 and s.failures == 0, (s.stats(), s.failures)\n"
        )
        running = [
            subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        for process in running:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
        store = DiskStore(tmp_path, max_bytes=200_000)
        assert store.stats().bytes <= 200_000
        assert store.verify() == (store.stats().items, 0)
        store.gc(0)
        assert len(blobs(tmp_path)) == store.stats().items

    def test_room_that_another_one_made_among_leased_records_is_found(self, tmp_path: Path) -> None:
        """Leases bind their own process only: what they hold is summed again once anybody has written."""
        store, other = DiskStore(tmp_path), DiskStore(tmp_path)
        for name in "abc":
            assert store.put(f"span/{name}", name.encode() * 1000) and store.lease(f"span/{name}")
        store.max_bytes = store.stats().bytes
        assert not any(store.put("span/new", b"n" * 1000) for _ in range(2))
        assert other.delete("span/a") and other.put("span/x", b"x" * 1000)
        assert store.put("span/new", b"n" * 998), "as long a record, in place of the one that nobody leased"
        assert list(store.list()) == ["span/b", "span/c", "span/new"]

    def test_puts_beside_many_leases_cost_as_beside_few(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import ctxwin.store.records as records

        def cost(leased: int) -> tuple[int, int]:
            store = DiskStore(tmp_path / str(leased))
            for i in range(leased + 2):
                assert store.put(f"span/{i}", b"v" * 1000) and (i < 2 or store.lease(f"span/{i}"))
            store.max_bytes = store.stats().bytes
            assert all(store.put(f"span/x{i}", b"x" * 999) for i in range(3)) and not store.put(
                "span/large", b"x" * 5000
            )
            counts = Counter[str]()
            for name, spied in (("walk", records.walk), ("describe_record", records.describe_record)):
                monkeypatch.setattr(records, name, lambda *a, n=name, f=spied: counts.update([n]) or f(*a))
            monkeypatch.setattr(store, "_size", lambda row: counts.update(["size"]) or DiskStore._size(store, row))
            for i in range(20):
                store.release("span/5")
                assert store.lease("span/5") and not store.put("span/large", b"x" * 5000)
                assert store.put(f"span/y{i}", b"y" * 999) and store.get(f"span/y{i}")
            assert store.stats().evictions == 23 and store.contains("span/5") and not store.contains("span/y17")
            monkeypatch.undo()
            return counts["walk"], counts["size"] + counts["describe_record"]

        assert cost(10) == cost(60) and cost(11)[0] == 0

    def test_importing_the_package_does_not_import_torch(self) -> None:
        code = (
            "import sys, ctxwin.store.disk, ctxwin.store.memory, ctxwin.store.spans, ctxwin.store.codec\n"
            "assert not {'torch', 'pytest', 'hypothesis'} & set(sys.modules)"
        )
        assert run(code).returncode == 0


SECRET = b"a secret of the store"
STEPS = ["open", "fsync", "replace", "sync_folder", "set"]


class TestInterrupts:
    @pytest.mark.parametrize(("statement", "after"), [("BEGIN IMMEDIATE", True), ("COMMIT", False)])
    def test_leave_no_transaction_open(
        self, tmp_path: Path, statement: str, after: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C between a statement and what diskcache notes of it: the index stays locked for every process otherwise."""
        store, other = DiskStore(tmp_path, timeout=0.2), DiskStore(tmp_path, timeout=0.2)

        def interrupted(cache: Index) -> Callable[..., Any]:
            execute = cache._con.execute

            def run(text: str, *arguments: Any) -> Any:
                if text != statement:
                    return execute(text, *arguments)
                if after:
                    execute(text, *arguments)
                raise KeyboardInterrupt

            return run

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Index, "_sql", property(interrupted))
            store.put("span/a", b"one")
        assert other.put("span/b", b"two") and store.put("span/a", b"one")
        assert [*store.list()] == [*other.list()] == ["span/a", "span/b"]

    @pytest.mark.parametrize("committed", [True, False])
    def test_keep_the_old_value_or_the_new_one(
        self, tmp_path: Path, committed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C on either side of the commit of the row."""
        store, transact = DiskStore(tmp_path), Index._transact
        store.put("span/a", b"old")

        @contextlib.contextmanager
        def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
            with transact(*arguments, **options) as work:
                yield work
                if not committed:
                    raise KeyboardInterrupt
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Index, "_transact", interrupted)
            store.put("span/a", b"new")
        assert store.get("span/a") == (b"new" if committed else b"old")
        assert store.verify() == (1, 0) and len(blobs(tmp_path)) == 1


class TestCrash:
    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_a_kill_at_any_step_leaves_a_miss_or_the_value(self, tmp_path: Path, step: str, after: bool) -> None:
        """A process dies, without any cleanup, on either side of each step of a put that replaces a value."""
        store = DiskStore(tmp_path)
        store.put("span/old", b"old" * 1000)
        store.put("span/both", b"first" * 1000)
        store.close()
        code = (
            "import sys, os\n"
            "from ctxwin import files\n"
            "from ctxwin.store import disk\n"
            "path, step, after = sys.argv[1], sys.argv[2], sys.argv[3] == 'True'\n"
            "s = disk.DiskStore(path)\n"
            "where = {'open': (os, 'fdopen'), 'fsync': (os, 'fsync'), 'replace': (os, 'replace'),\n"
            "         'sync_folder': (files, 'sync_folder'), 'set': (s._cache, 'set')}[step]\n"
            "real = getattr(*where)\n"
            "def die(*a, **k):\n"
            "    if after: real(*a, **k)\n"
            "    os._exit(9)\n"
            "setattr(*where, die)\n"
            "s.put('span/both', b'second' * 1000)\n"
        )
        assert run(code, tmp_path, step, after).returncode == 9
        again = DiskStore(tmp_path)
        assert again.get("span/old") == b"old" * 1000
        done = step == "set" and after
        assert again.get("span/both") == (b"second" if done else b"first") * 1000
        assert again.stats().corrupt == 0
        again.gc(0)
        assert len(blobs(tmp_path)) == 2
        assert list((tmp_path / "tmp").iterdir()) == []
        assert again.put("span/both", b"second" * 1000)
        assert again.get("span/both") == b"second" * 1000

    def test_a_row_whose_file_is_gone_is_a_miss(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value")
        blobs(tmp_path)[0].unlink()
        assert not store.contains("span/a")
        assert store.get("span/a") is None
        assert store.stats().items == 0
        assert store.put("span/a", b"value")
        assert store.get("span/a") == b"value"

    def test_a_torn_file_is_a_miss(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for cut in (0, 10, 100, -1):
            store = DiskStore(tmp_path / str(cut))
            store.put("span/a", b"value" * 100)
            blob = blobs(tmp_path / str(cut))[0]
            blob.write_bytes(blob.read_bytes()[:cut])
            assert store.get("span/a") is None
            assert store.stats().corrupt == 1
            assert blobs(tmp_path / str(cut)) == []
        assert f"span/a in {store.path} is corrupt" in caplog.text


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
