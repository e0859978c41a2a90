"""What every `Store` must do, for the stores here and for anybody's own (needs pytest and Hypothesis).

class TestMyStore(StoreConformance):
    def make_store(self, path, *, max_bytes=None, ttl=None):
        return MyStore(path, max_bytes=max_bytes, ttl=ttl)
"""

from __future__ import annotations

import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ctxwin.store.base import Store

_BLOB = 10_000
_ROOM_FOR_FOUR = 45_000


def _blob(name: str) -> bytes:
    return name.encode().ljust(_BLOB, b".")


class StoreConformance:
    """Subclass it with `make_store`; pytest collects the tests of the subclass.

    Attributes:
        copies: how many times the store holds one value (tiers); its limit applies to each.
        examples: runs of each state machine; fewer where the store is slow.
    """

    copies: ClassVar[int] = 1
    examples: ClassVar[int] = 25

    @abstractmethod
    def make_store(self, path: Path, *, max_bytes: int | None = None, ttl: float | None = None) -> Store:
        """A new, empty store; ``path`` is an empty folder it may use."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(self.make_store(tmp_path)) as store:
            yield store

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Store]:
        """A store with room for four of `_blob`."""
        with closing(self.make_store(tmp_path, max_bytes=_ROOM_FOR_FOUR)) as store:
            yield store

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)) * 300], ids=["empty", "zero", "large"])
    def test_returns_what_was_put(self, store: Store, value: bytes) -> None:
        assert store.put("span/a", value)
        got = store.get("span/a")
        assert type(got) is bytes
        assert got == value

    def test_missing(self, store: Store) -> None:
        assert store.get("span/a") is None
        assert not store.contains("span/a")
        assert not store.delete("span/a")
        assert not store.lease("span/a")
        store.release("span/a")
        assert list(store.list()) == []

    def test_put_again(self, store: Store) -> None:
        assert store.put("span/a", b"one")
        assert store.put("span/a", b"one")
        assert store.get("span/a") == b"one"
        assert store.stats().items == 1
        assert store.put("span/a", b"three")
        assert store.get("span/a") == b"three"
        assert store.stats().items == 1

    def test_delete(self, store: Store) -> None:
        store.put("span/a", b"one")
        store.put("span/b", b"two")
        assert store.delete("span/a")
        assert not store.delete("span/a")
        assert store.get("span/a") is None
        assert store.get("span/b") == b"two"

    def test_delete_of_a_leased_key(self, store: Store) -> None:
        store.put("span/a", b"one")
        store.lease("span/a")
        assert store.delete("span/a")
        assert store.get("span/a") is None

    def test_list(self, store: Store) -> None:
        for key in ("span/b", "span/a", "patch/a", "spa/x"):
            store.put(key, b"x")
        assert sorted(store.list()) == ["patch/a", "spa/x", "span/a", "span/b"]
        assert sorted(store.list("span/")) == ["span/a", "span/b"]
        assert list(store.list("none/")) == []
        for key in store.list():
            assert store.delete(key)
        assert list(store.list()) == []

    @pytest.mark.parametrize("key", ["", "a b", "a\nb", "a" * 513, "ä"])
    def test_refuses_bad_keys(self, store: Store, key: str) -> None:
        with pytest.raises(ValueError, match="key must be"):
            store.put(key, b"x")
        with pytest.raises(ValueError, match="key must be"):
            store.get(key)

    def test_refuses_other_types(self, store: Store) -> None:
        with pytest.raises(TypeError, match="key must be"):
            store.put(7, b"x")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="value must be"):
            store.put("span/a", bytearray(b"x"))  # type: ignore[arg-type]
        assert store.get("span/a") is None

    def test_keys_are_not_paths(self, store: Store, tmp_path: Path) -> None:
        outside = tmp_path.parent / "outside"
        assert store.put("../outside", b"x")
        assert store.put("/outside", b"y")
        assert (store.get("../outside"), store.get("/outside")) == (b"x", b"y")
        assert not outside.exists()

    def test_the_least_recently_used_leaves(self, small: Store) -> None:
        for name in "abcd":
            assert small.put(f"span/{name}", _blob(name))
        assert small.get("span/a") == _blob("a")
        assert small.contains("span/b")
        assert small.put("span/e", _blob("e"))
        assert small.put("span/f", _blob("f"))
        assert sorted(small.list()) == ["span/a", "span/b", "span/e", "span/f"]
        assert small.get("span/c") is None
        assert small.stats().evictions == 2 * self.copies
        assert small.stats().bytes <= _ROOM_FOR_FOUR * self.copies

    def test_what_is_too_large_is_refused_and_evicts_nothing(self, small: Store) -> None:
        small.put("span/a", _blob("a"))
        assert not small.put("span/b", bytes(_ROOM_FOR_FOUR + 1))
        assert small.get("span/a") == _blob("a")
        assert small.get("span/b") is None

    def test_a_lease_protects(self, small: Store) -> None:
        small.put("span/a", _blob("a"))
        assert small.lease("span/a")
        for i in range(12):
            assert small.put(f"span/{i}", _blob(str(i)))
        assert small.get("span/a") == _blob("a")
        assert small.stats().leased == 1

    def test_leases_are_counted(self, small: Store) -> None:
        small.put("span/a", _blob("a"))
        assert small.lease("span/a")
        assert small.lease("span/a")
        small.release("span/a")
        for i in range(6):
            small.put(f"span/{i}", _blob(str(i)))
        assert small.contains("span/a")
        small.release("span/a")
        assert small.stats().leased == 0
        for i in range(6, 12):
            small.put(f"span/{i}", _blob(str(i)))
        assert not small.contains("span/a")

    def test_refuses_where_everything_is_leased(self, small: Store) -> None:
        for name in "abcd":
            small.put(f"span/{name}", _blob(name))
            assert small.lease(f"span/{name}")
        assert not small.put("span/e", _blob("e"))
        assert sorted(small.list()) == [f"span/{name}" for name in "abcd"]
        small.release("span/b")
        assert small.put("span/e", _blob("e"))
        assert sorted(small.list()) == ["span/a", "span/c", "span/d", "span/e"]

    def test_time_to_live(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, ttl=0.05)) as store:
            store.put("span/a", b"x")
            time.sleep(0.1)
            assert store.get("span/a") is None
            assert not store.contains("span/a")
            assert not store.lease("span/a")
            assert list(store.list()) == []
            store.put("span/a", b"y")
            time.sleep(0.1)
            assert store.get("span/a") is None

    def test_within_its_time_to_live(self, tmp_path: Path) -> None:
        with closing(self.make_store(tmp_path, ttl=3600.0)) as store:
            store.put("span/a", b"x")
            assert store.get("span/a") == b"x"

    def test_stats(self, store: Store) -> None:
        store.put("span/a", b"x" * 100)
        store.get("span/a")
        store.get("span/b")
        stats = store.stats()
        assert (stats.items, stats.hits, stats.misses, stats.puts, stats.corrupt) == (1, 1, 1, 1, 0)
        assert stats.bytes >= 100

    def test_verify(self, store: Store) -> None:
        for i in range(3):
            store.put(f"span/{i}", b"x" * i)
        assert store.verify() == (3 * self.copies, 0)
        assert store.get("span/2") == b"xx"

    def test_close(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        store.put("span/a", b"x")
        store.close()
        store.close()
        with pytest.raises(ValueError, match="closed"):
            store.get("span/a")
        with pytest.raises(ValueError, match="closed"):
            store.put("span/a", b"x")

    def test_threads(self, store: Store) -> None:
        wrong: list[str] = []

        def work(name: int) -> None:
            try:
                for i in range(12):
                    mine, shared = f"span/{name}-{i}", f"span/{i}"
                    store.put(mine, mine.encode() * 50)
                    store.put(shared, shared.encode() * 50)
                    if store.get(mine) != mine.encode() * 50 or store.get(shared) != shared.encode() * 50:
                        wrong.append(mine)
                    if i % 3 == 0:
                        store.lease(mine)
                        store.release(mine)
                        store.delete(mine)
            except Exception as error:
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert store.stats().items == 12 + 4 * 8
        assert store.stats().leased == 0

    def test_behaves_like_a_dict(self) -> None:
        self._run(StoreMachine, None)

    def test_evicts_only_what_it_may(self) -> None:
        self._run(EvictionMachine, _ROOM_FOR_FOUR)

    def _run(self, machine: type[_Machine], max_bytes: int | None) -> None:
        def fresh() -> _Machine:
            folder = tempfile.TemporaryDirectory()
            store = self.make_store(Path(folder.name), max_bytes=max_bytes)
            return machine(store, self.copies, folder.cleanup)

        checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
        run_state_machine_as_test(
            fresh,  # type: ignore[arg-type]  # any callable that makes a machine will do
            settings=settings(
                max_examples=self.examples, stateful_step_count=25, deadline=None, suppress_health_check=checks
            ),
        )


class _Machine(RuleBasedStateMachine):
    def __init__(self, store: Store, copies: int, cleanup: Callable[[], None]) -> None:
        super().__init__()
        self.store = store
        self.copies = copies
        self.cleanup = cleanup

    def teardown(self) -> None:
        self.store.close()
        self.cleanup()


_KEYS = st.sampled_from(["span/a", "span/b", "span/c", "patch/a", "patch/ab", "s", "source/z/deep"])


class StoreMachine(_Machine):
    """A store with room for everything is a dict with leases."""

    @initialize()
    def empty(self) -> None:
        self.held: dict[str, bytes] = {}

    @rule(key=_KEYS, value=st.binary(max_size=200))
    def put(self, key: str, value: bytes) -> None:
        assert self.store.put(key, value) is True
        self.held[key] = value

    @rule(key=_KEYS)
    def get(self, key: str) -> None:
        assert self.store.get(key) == self.held.get(key)

    @rule(key=_KEYS)
    def delete(self, key: str) -> None:
        assert self.store.delete(key) is (key in self.held)
        if key in self.held:
            del self.held[key]

    @rule(key=_KEYS)
    def contains(self, key: str) -> None:
        assert self.store.contains(key) is (key in self.held)

    @rule(key=_KEYS)
    def lease(self, key: str) -> None:
        assert self.store.lease(key) is (key in self.held)

    @rule(key=_KEYS)
    def release(self, key: str) -> None:
        self.store.release(key)

    @rule(prefix=st.sampled_from(["", "s", "span/", "patch/a", "zzz"]))
    def listing(self, prefix: str) -> None:
        assert sorted(self.store.list(prefix)) == sorted(k for k in self.held if k[: len(prefix)] == prefix)

    @rule()
    def verify(self) -> None:
        assert self.store.verify() == (len(self.held) * self.copies, 0)

    @invariant()
    def items(self) -> None:
        if hasattr(self, "held"):
            assert self.store.stats().items == len(self.held)


class EvictionMachine(_Machine):
    """A store that is too small returns a value or nothing, keeps what is leased, and stays within its limit."""

    @initialize()
    def empty(self) -> None:
        self.last: dict[str, bytes] = {}
        self.leased: dict[str, int] = {}

    @rule(key=_KEYS, fill=st.integers(0, 255), size=st.integers(0, 20_000))
    def put(self, key: str, fill: int, size: int) -> None:
        value = bytes([fill]) * size
        if self.store.put(key, value):
            self.last[key] = value
            assert self.store.get(key) == value
        else:
            # Refused: whatever is still there must not be an older value passed off as this one's successor.
            found = self.store.get(key)
            assert found is None or found == self.last[key]

    @rule(key=_KEYS)
    def get(self, key: str) -> None:
        found = self.store.get(key)
        assert found is None or found == self.last[key]

    @rule(key=_KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        assert not self.store.contains(key)
        self.last.pop(key, None)
        self.leased.pop(key, None)

    @rule(key=_KEYS)
    def lease(self, key: str) -> None:
        if self.store.lease(key):
            self.leased[key] = self.leased.get(key, 0) + 1

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leased)))
        self.store.release(key)
        self.leased[key] -= 1
        if self.leased[key] == 0:
            del self.leased[key]

    @invariant()
    def bounded(self) -> None:
        stats = self.store.stats()
        assert stats.bytes <= _ROOM_FOR_FOUR * self.copies
        assert stats.corrupt == 0

    @invariant()
    def leased_stay(self) -> None:
        if hasattr(self, "leased"):
            for key in self.leased:
                assert self.store.get(key) == self.last[key]
            assert self.store.stats().leased == len(self.leased)
