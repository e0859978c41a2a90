"""The disk store in a folder that somebody else has written to: nothing is unpickled, and no foreign path is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diskcache
import pytest

from ctxwin.store.disk import DiskStore
from store.disk_files import blobs, sql


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TestPickle:
    """CVE-2025-69872: diskcache unpickles what it finds; this store must not."""

    def plant(self, path: Path, key: Any, value: Any) -> None:
        with diskcache.Cache(str(path)) as cache:
            cache.set(key, value)

    def test_the_bomb_works_on_plain_diskcache(self, tmp_path: Path) -> None:
        self.plant(tmp_path, "span/a", Bomb(tmp_path / "pwned"))
        with diskcache.Cache(str(tmp_path)) as cache:
            cache.get("span/a")
        assert (tmp_path / "pwned").exists()

    @pytest.mark.parametrize("existing", [False, True])
    def test_a_planted_value_is_a_miss(self, tmp_path: Path, existing: bool) -> None:
        if existing:
            DiskStore(tmp_path).put("span/a", b"value")
        self.plant(tmp_path, "span/a", Bomb(tmp_path / "pwned"))
        store = DiskStore(tmp_path)
        assert store.get("span/a") is None
        assert store.stats().corrupt == 1
        assert store.put("span/a", b"value")
        assert store.get("span/a") == b"value"
        assert not (tmp_path / "pwned").exists()

    def test_a_planted_file_value_is_a_miss(self, tmp_path: Path) -> None:
        DiskStore(tmp_path).close()
        # What a pickle of `os.mkdir(pwned)` is, so that reading it as one would show.
        (tmp_path / "bomb.val").write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "pwned").encode() + b"\ntR.")
        sql(
            tmp_path,
            "INSERT INTO Cache(key, raw, store_time, access_time, size, mode, filename)"
            " VALUES ('span/a', 1, 0, 0, 9, 4, ?)",
            "bomb.val",
        )
        store = DiskStore(tmp_path)
        assert not store.contains("span/a")
        assert store.get("span/a") is None
        assert store.verify()[0] == 0
        assert not (tmp_path / "pwned").exists()
        assert (tmp_path / "bomb.val").exists(), "a foreign file is not ours to delete"

    def test_a_planted_key_is_passed_over(self, tmp_path: Path) -> None:
        DiskStore(tmp_path).put("span/a", b"value")
        with diskcache.Cache(str(tmp_path), disk=diskcache.Disk) as cache:
            cache.set(("a", Bomb(tmp_path / "pwned")), b"x")
        store = DiskStore(tmp_path, max_bytes=1000)
        assert list(store.list()) == ["span/a"]
        assert store.verify() == (1, 1)
        assert store.stats().items == 1
        self.plant(tmp_path, ("a", Bomb(tmp_path / "pwned")), b"x")
        for i in range(9):
            assert store.put(f"span/{i}", bytes(200)), "a foreign row takes nobody's place"
        store.gc(0)
        assert store.verify()[1] == 1
        assert store.verify() == (store.stats().items, 0)
        assert not (tmp_path / "pwned").exists()

    @pytest.mark.parametrize("value", ["text", 7, 1.5, b"raw bytes", b"x" * 50_000])
    def test_other_foreign_values_are_misses(self, tmp_path: Path, value: Any) -> None:
        DiskStore(tmp_path).close()
        self.plant(tmp_path, "span/a", value)
        store = DiskStore(tmp_path)
        assert store.get("span/a") is None
        assert not store.contains("span/a")

    def test_nothing_but_blobs_is_ever_written(self, tmp_path: Path) -> None:
        store = DiskStore(tmp_path)
        for value in ({"a": 1}, "text", object(), b"bytes"):
            with pytest.raises(TypeError):
                store._cache.set("span/a", value)
        with pytest.raises(TypeError):
            store._cache.set(("a", "tuple"), b"x")

    def test_planted_settings_are_not_obeyed(self, tmp_path: Path) -> None:
        DiskStore(tmp_path).put("span/a", b"value")
        for key, value in (("cull_limit", 10), ("size_limit", 1), ("eviction_policy", "evil"), ("disk_evil", "x")):
            sql(tmp_path, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
        store = DiskStore(tmp_path)
        for i in range(5):
            assert store.put(f"span/{i}", b"value")
        assert store.get("span/a") == b"value"
        assert store.stats().items == 6

    @pytest.mark.parametrize("target", ["../victim", "{absolute}", "blobs/../../victim", "victim"])
    def test_a_planted_path_is_neither_read_nor_deleted(self, tmp_path: Path, target: str) -> None:
        folder = tmp_path / "store"
        store = DiskStore(folder)
        store.put("span/a", b"value")
        good = blobs(folder)[0].read_bytes()
        for victim in (tmp_path / "victim", folder / "victim"):
            victim.write_bytes(good)
        name = target.format(absolute=tmp_path / "victim")
        sql(folder, "UPDATE Cache SET filename = ? WHERE key = 'span/a'", name)
        assert store.get("span/a") is None
        store.put("span/a", b"value")
        sql(folder, "UPDATE Cache SET filename = ? WHERE key = 'span/a'", name)
        store.delete("span/a")
        store.verify()
        assert (tmp_path / "victim").exists()
        assert (folder / "victim").exists()


PLANTED = ("-3", "'many'", "NULL", "x'00'", "1e300", "9223372036854775807")


@pytest.mark.parametrize("value", PLANTED)
@pytest.mark.parametrize("total", ["count", "size"])
@pytest.mark.parametrize("opened", [False, True])
def test_planted_totals_of_the_index_are_no_errors(tmp_path: Path, total: str, value: str, opened: bool) -> None:
    """A negative count raised out of `stats`, and out of every metric."""
    store = DiskStore(tmp_path)
    assert store.put("span/a", b"value")
    if not opened:
        store.close()
    sql(tmp_path, f"UPDATE Settings SET value = {value} WHERE key = '{total}'")
    if not opened:
        store = DiskStore(tmp_path)
    first = store.stats()
    assert first.items >= 0 and first.bytes >= 0
    assert store.get("span/a") == b"value" and list(store.list()) == ["span/a"]
    assert store.put("span/b", b"other") or store.put("span/b", b"other"), "the index was made again"
    assert store.get("span/b") == b"other"
    if value != PLANTED[-1]:  # a number that could be right
        assert (store.stats().items, store.stats().corrupt) == (2, 1)
    store.close()


def test_a_missing_total_of_the_index_is_no_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    assert store.put("span/a", b"value")
    sql(tmp_path, "DELETE FROM Settings WHERE key = 'count'")
    assert store.stats().items >= 0
    assert store.stats().items == 1 and store.get("span/a") == b"value"
    store.close()
