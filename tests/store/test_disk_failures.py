"""The disk store where the file system refuses: permissions, errors, a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin.errors import StaleOwner, StoreUnavailable
from ctxwin.store import open_store
from ctxwin.store.disk import DiskStore
from ctxwin.store.disk_index import RawDisk
from store.disk_files import blobs
from waiting import wait_until


class TestFailures:
    def test_a_full_disk_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = DiskStore(tmp_path)
        store.put("span/a", b"value")

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            assert store.put("span/b", b"value") is False
        assert store.failures == 1
        assert "No space left" in caplog.text
        assert store.get("span/b") is None
        assert store.get("span/a") == b"value"
        assert list((tmp_path / "tmp").iterdir()) == []
        assert len(blobs(tmp_path)) == 1
        assert store.put("span/b", b"value")

    def test_a_disk_that_stays_full_is_reported_once_a_minute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = 0.0
        monkeypatch.setattr("ctxwin.store.failure_log.time", SimpleNamespace(monotonic=lambda: now))

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        store, other = DiskStore(tmp_path / "one"), DiskStore(tmp_path / "two")
        monkeypatch.setattr("os.fsync", full)
        reports = []
        for second in range(150):
            now = float(second)
            caplog.clear()
            assert store.put(f"span/{second}", b"value") is False
            reports += [(second, record.getMessage()) for record in caplog.records]
        assert [second for second, _ in reports] == [0, 60, 120]
        assert "more like it" not in reports[0][1] and all("(and 59 more like it)" in text for _, text in reports[1:])
        assert store.failures == 150
        caplog.clear()
        assert other.put("span/a", b"value") is False
        assert "two" in caplog.text  # another store's failure is another one

    def test_a_locked_index_refuses_and_leaves_no_file(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path, timeout=0.05)
        store.put("span/a", b"value")
        holder = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        try:
            assert store.put("span/b", b"value") is False
            assert store.get("span/a") == b"value"
        finally:
            holder.execute("ROLLBACK")
            holder.close()
        assert len(blobs(tmp_path)) == 1
        assert store.put("span/b", b"value")

    def test_no_permission_refuses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = DiskStore(tmp_path)

        def denied(*_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", denied)
            assert store.put("span/a", b"value") is False
        assert store.failures == 1
        assert store.put("span/a", b"value")
        with monkeypatch.context() as patch:
            patch.setattr("os.open", denied)
            assert store.get("span/a") is None
        assert store.failures == 2
        assert store.get("span/a") == b"value", "what could not be read is not deleted"

    def test_a_vanished_folder_is_misses_and_refusals(self, tmp_path: Path) -> None:
        import shutil

        store = DiskStore(tmp_path / "store")
        store.put("span/a", b"value")
        shutil.rmtree(tmp_path / "store")
        assert store.get("span/a") is None
        assert store.put("span/b", b"value") is False
        assert store.failures >= 1
        (tmp_path / "store").mkdir()  # somebody makes it again, or mounts it
        assert store.put("span/b", b"value") and store.get("span/b") == b"value" and store.stats().items == 1
        with contextlib.closing(DiskStore(tmp_path / "store")) as other:
            assert [*other.list()] == ["span/b"]

    @pytest.mark.parametrize("how", ["folder", "index"])
    def test_nothing_is_put_into_an_index_that_another_process_replaced(self, tmp_path: Path, how: str) -> None:
        import shutil

        folder = tmp_path / "store"
        store = DiskStore(folder)
        assert store.put("span/a", b"one")
        if how == "folder":
            shutil.rmtree(folder)
        with contextlib.closing(DiskStore(folder)) as other:
            if how == "index":
                other._repair(damaged=True)
            assert other.put("span/b", b"two")
            assert store.put("span/c", b"three") and store.delete("span/c") and store.put("span/d", b"four")
            there = ["span/b", "span/d"] if how == "folder" else ["span/a", "span/b", "span/d"]
            assert [*store.list()] == [*other.list()] == there and other.get("span/d") == b"four"
        store.close()

    def test_a_folder_that_is_read_only_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = DiskStore(tmp_path / "store", max_bytes=3000)
        assert first.put("span/a", b"value") and first.commit("window/a", b"one", 1)
        monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)

        def contents() -> dict[Path, tuple[int, bytes]]:
            files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".blob"]
            return {path: (path.stat().st_ino, path.read_bytes()) for path in files}

        before, folder = contents(), sorted(tmp_path.rglob("*"))
        (tmp_path / "store").chmod(0o500)
        store = DiskStore(tmp_path / "store", max_bytes=3000)
        assert store.read_only and store.stats().items == 2 and list(store.list()) == ["span/a", "window/a"]
        assert store.get("span/a") == b"value" and store.read("window/a") == b"one" and store.lease("span/a")
        assert store.put("span/a", b"value"), "it is there"
        assert not store.put("span/b", b"value") and not store.put("span/c", bytes(2900)) and store.failures == 2
        assert not store.delete("span/a") and not store.commit("window/a", b"two", 1) and store.failures == 4
        assert store.verify() == (2, 0) and store.gc(0) == (0, 0) and "its folder is read only" in caplog.text
        with monkeypatch.context() as writer:
            writer.setattr("os.access", lambda path, mode: True)
            assert first.put("span/a", b"another value") and first.put("span/d", b"new")
            first.get("span/a")
            assert store.get("span/a") == b"another value" and store.get("span/d") == b"new"
            for use in (store.contains, store.get, lambda key: key in [*store.list()]):
                assert first.put("span/later", b"later") and wait_until(lambda use=use: bool(use("span/later")), 5)
                assert first.delete("span/later") and wait_until(lambda: "span/later" not in [*store.list()], 5)
            built = store._cache
            assert store.get("span/none") is None and not store.contains("span/none") and store._cache is built
        assert first.put("span/a", b"value") and first.delete("span/d")
        before, folder = contents(), sorted(tmp_path.rglob("*"))
        index = store._cache.directory
        store.close()
        assert contents() == before and sorted(tmp_path.rglob("*")) == folder and not Path(index).exists()
        assert first.get("span/a") == b"value"

    def test_fences_hold_where_another_process_made_the_index_again(self, tmp_path: Path) -> None:
        store, other = DiskStore(tmp_path), DiskStore(tmp_path)
        assert store.commit("window/a", b"one", 1)
        other._repair(damaged=True)
        assert other.claim("window/a") == (2, b"one") and other.commit("window/a", b"two", 2)
        assert store.token("window/a") == 2 and store.read("window/a") == b"two"
        with pytest.raises(StaleOwner):
            store.commit("window/a", b"late", 1)
        other._repair(damaged=True)
        assert other.put("span/b", b"new") and store.get("span/b") == b"new" and store.contains("span/b")

    def test_a_record_that_was_retired_is_not_brought_back(self, tmp_path: Path) -> None:
        """Nor does a mark stay for what was never there, or longer than an hour."""
        store, other = DiskStore(tmp_path), DiskStore(tmp_path)
        assert store.commit("window/a", b"one", 1)
        assert other.retire("window/a") and not other.retire("window/a") and not other.retire("window/b")
        with pytest.raises(StaleOwner, match="must be written by its owner"):
            store.commit("window/a", b"two", 1)
        assert store.claim("window/a") is None and store.token("window/a") > 1 and store.token("window/b") == 0
        (mark,) = (tmp_path / "tmp").iterdir()
        os.utime(mark, (0, 0))
        assert not store.retire("window/b") and not mark.exists() and store.commit("window/a", b"two", 1)

    def test_opening_beside_who_holds_the_index_ends_with_its_time(self, tmp_path: Path) -> None:
        DiskStore(tmp_path).close()
        with contextlib.closing(sqlite3.connect(tmp_path / "cache.db", isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(OSError, match="another process holds it"):
                DiskStore(tmp_path, timeout=0.1)
        assert (tmp_path / "ballast").exists()
        DiskStore(tmp_path).close()

    def test_a_folder_that_is_gone_refuses_a_claim(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path / "store")
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(StoreUnavailable, match="cannot be locked"):
            store.claim("window/a")

    def test_a_path_with_a_variable_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="without variables"):
            DiskStore(tmp_path / "$HOME")

    def test_opening_where_a_file_stands_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(OSError, match="file"):
            DiskStore(tmp_path / "file")

    @pytest.mark.parametrize("bad", [{"max_bytes": 0}, {"max_bytes": -1}, {"ttl": 0.0}])
    def test_bad_arguments(self, tmp_path: Path, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be positive"):
            DiskStore(tmp_path, **bad)


@pytest.fixture
def tiny_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 4 MiB, or as its parameter says."""
    options = getattr(request, "param", "size=4m")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False).returncode:
        pytest.skip("a file system can only be mounted with privileges")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)


class TestFullDisk:
    def fill(self, disk: Path, store: DiskStore) -> list[str]:
        for i in range(2000):
            if not store.put(f"span/{i}", os.urandom(20_000)):
                break
        with contextlib.suppress(OSError), (disk / "somebody").open("wb") as file:
            while True:
                file.write(bytes(512))
                file.flush()
        assert len(blobs(disk / "store")) > 50
        return list(store.list())

    @pytest.mark.parametrize("reopen", [False, True])
    def test_it_can_be_emptied_again(self, tiny_disk: Path, reopen: bool) -> None:
        store = DiskStore(tiny_disk / "store")
        keys = self.fill(tiny_disk, store)
        assert store.get(keys[0]) is not None
        if reopen:
            store.close()
            store = DiskStore(tiny_disk / "store")
        for key in keys:
            assert store.delete(key), key
            assert not store.contains(key)
        assert blobs(tiny_disk / "store") == []
        assert store.put("span/new", bytes(20_000))
        assert list(store.list()) == ["span/new"]
        assert store.stats().items == 1

    @pytest.mark.parametrize("reserve", [True, False])
    @pytest.mark.parametrize("max_bytes", [10**9, 110_000])
    def test_nothing_is_dropped_while_it_is_full(self, tiny_disk: Path, max_bytes: int, reserve: bool) -> None:
        folder = tiny_disk / "store"
        store = DiskStore(folder, max_bytes)
        values = {f"span/{i}": bytes([i]) * 5000 for i in range(20)}
        assert all(store.put(key, value) for key, value in values.items())
        store.close()
        if not reserve:
            (folder / "ballast").unlink()

        def fill() -> None:
            with contextlib.suppress(OSError), (tiny_disk / "somebody").open("ab", buffering=0) as file:
                while file.write(bytes(512)):
                    pass

        fill()
        if reserve:
            store = DiskStore(folder, max_bytes)
            for i in range(20, 60):
                fill()
                assert store.put(f"span/{i}", bytes([i]) * 5000) is (i == 20 and store.failures == 0)
            assert store.failures >= 39 and store.stats().corrupt == 0
            assert sum(store.get(key) == value for key, value in values.items()) >= 18
            store.close()
        else:
            with pytest.raises(OSError, match=r"cannot be opened .*check its permissions and free space"):
                DiskStore(folder, max_bytes)
        (tiny_disk / "somebody").unlink()
        store = DiskStore(folder, max_bytes)
        assert sum(store.get(key) == value for key, value in values.items()) >= (18 if reserve else 20)
        assert store.stats().corrupt == 0 and not list(folder.glob("*.damaged-*"))

    @pytest.mark.parametrize("tiny_disk", ["size=4m", "size=4m,nr_inodes=3", "size=4m,nr_inodes=6"], indirect=True)
    def test_a_new_store_says_that_it_cannot_be_made(self, tiny_disk: Path) -> None:
        with contextlib.suppress(OSError), (tiny_disk / "somebody").open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
        with pytest.raises(
            OSError, match=r"^the store .*/new/\w+ cannot be opened \(.*\); check its perm.* free space$"
        ) as full:
            open_store(f"disk:{tiny_disk}/new")
        assert full.value.errno in (errno.ENOSPC, errno.EIO)
        done = CliRunner().invoke(app, ["library", "add", f"{tiny_disk}/new", "notes", __file__])
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1) and "check its permissions" in done.stderr

    def test_an_index_is_not_replaced_by_a_part_of_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = DiskStore(tmp_path)
        assert all(store.put(f"span/{i}", bytes(100)) for i in range(9))

        def full(*_: object, **__: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(RawDisk, "store", full)
        store._repair(damaged=True)
        assert all(store.get(f"span/{i}") == bytes(100) for i in range(9)) and store.stats().items == 9
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_gc_frees_it(self, tiny_disk: Path) -> None:
        store = DiskStore(tiny_disk / "store", ttl=0.5)
        self.fill(tiny_disk, store)
        store.close()
        time.sleep(0.6)
        again = DiskStore(tiny_disk / "store", ttl=0.5)
        again.gc(0)
        assert blobs(tiny_disk / "store") == []
        assert again.put("span/new", bytes(20_000))


def test_an_index_that_cannot_be_opened_is_named_where_its_reserve_cannot_be_deleted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    folder = store.path
    store.close()
    for name in ("lock", "ballast"):  # folders, as neither can be opened or deleted on a disk that is read only
        (folder / name).unlink()
        (folder / name).mkdir()
    with pytest.raises(OSError, match=r"the store .* cannot be opened \(.*lock'\); check its permissions"):
        DiskStore(tmp_path)


def test_another_users_store_says_what_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskStore(tmp_path).close()
    monkeypatch.setattr("os.access", lambda path, mode: False)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "tmp"))

    monkeypatch.setattr("ctxwin.store.disk.remove_old", refuse)
    with pytest.raises(OSError, match=r"the store .* cannot be opened \(.*tmp'\); check its permissions"):
        DiskStore(tmp_path)
