"""The disk store among processes: those that share it, an interrupt and a crash at any step."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxwin.store.disk import DiskStore
from ctxwin.store.disk_index import Index
from store.disk_files import blobs


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A second process, as a user's would be: fresh interpreter, same folder."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
