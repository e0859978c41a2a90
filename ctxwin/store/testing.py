"""Conformance suite of `Store`, for the stores here and for third-party ones (needs pytest and Hypothesis).

Without ``max_bytes`` there is room for everything::

    class TestMyStore(StoreConformance):
        def make_store(self, path, *, max_bytes=None, ttl=None):
            return MyStore(path, max_bytes=max_bytes or 1 << 30, ttl=ttl)
"""

import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ctxwin.errors import StaleOwner
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
        """An empty store with room for everything."""
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

    def test_all_of_some_keys(self, store: Store) -> None:
        assert store.missing([]) == [] and store.put("span/aa", b"1") and store.put("span/bb", b"2")
        assert store.lease("span/bb") and store.missing(["span/d", "span/aa", "span/bb"]) == ["span/d"]
        assert store.delete("span/bb") and store.missing({"span/aa": 1, "span/bb": 2}) == ["span/bb"]

    def test_list(self, store: Store) -> None:
        """A prefix selects keys, and what is listed can be deleted on the way."""
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
        """A get or a look counts as a use."""
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

    def test_leases_are_counted(self, small: Store) -> None:
        """The last release ends the protection."""
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

    def test_a_fenced_record_belongs_to_who_claimed_it_last(self, store: Store) -> None:
        """An owner that was succeeded cannot write any more, and its successor goes on from its last version."""
        assert store.claim("window/a") is None and store.token("window/a") == 0
        assert store.commit("window/a", b"one", 1)
        assert store.commit("window/a", b"two", 1)
        token, value = store.claim("window/a") or (0, b"")
        assert value == b"two" and token == store.token("window/a") > 1
        with pytest.raises(StaleOwner):
            store.commit("window/a", b"three", 1)
        assert store.commit("window/a", b"four", token)
        assert store.claim("window/a") == (token + 1, b"four")
        assert store.list("window/") and store.retire("window/a")
        assert store.claim("window/a") is None and not list(store.list("window/"))

    def test_owners_at_once_get_tokens_of_their_own(self, store: Store) -> None:
        assert store.commit("window/a", b"start", 1)
        with ThreadPoolExecutor(8) as pool:
            claimed = [(one or (0,))[0] for one in pool.map(store.claim, ["window/a"] * 8)]
        assert len(set(claimed)) == 8
        for token in claimed:
            if token < max(claimed):
                with pytest.raises(StaleOwner):
                    store.commit("window/a", b"stale", token)
        assert store.commit("window/a", b"mine", max(claimed))

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
        def work(name: int) -> None:
            for i in range(12):
                mine, shared = f"span/{name}-{i}", f"span/{i}"
                store.put(mine, mine.encode() * 50)
                store.put(shared, shared.encode() * 50)
                assert store.get(mine) == mine.encode() * 50
                assert store.get(shared) == shared.encode() * 50
                if i % 3 == 0:
                    store.lease(mine)
                    store.release(mine)
                    store.delete(mine)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert store.stats().items == 12 + 4 * 8
        assert store.stats().leased == 0

    @pytest.mark.parametrize("max_bytes", [None, _ROOM_FOR_FOUR], ids=["roomy", "too small"])
    def test_behaves_like_a_dict(self, max_bytes: int | None) -> None:
        """Random calls against a dict: all of it where there is room, a part of it otherwise."""

        def fresh() -> _Machine:
            folder = tempfile.TemporaryDirectory()
            store = self.make_store(Path(folder.name), max_bytes=max_bytes)
            return _Machine(store, self.copies, max_bytes, folder.cleanup)

        checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
        run_state_machine_as_test(
            fresh,  # type: ignore[arg-type]  # any callable that makes a machine will do
            settings=settings(
                max_examples=self.examples, stateful_step_count=25, deadline=None, suppress_health_check=checks
            ),
        )


_KEYS = st.sampled_from(["span/a", "span/b", "span/c", "patch/a", "patch/ab", "s", "source/z/deep"])


class _Machine(RuleBasedStateMachine):
    """A store with room for everything is a dict with leases.

    One that is too small returns a value or nothing, keeps what is leased, and stays within its limit.
    """

    def __init__(self, store: Store, copies: int, limit: int | None, cleanup: Callable[[], None]) -> None:
        super().__init__()
        self.store, self.copies, self.limit, self.cleanup = store, copies, limit, cleanup
        self.last: dict[str, bytes] = {}
        self.leased: Counter[str] = Counter()

    def teardown(self) -> None:
        self.store.close()
        self.cleanup()

    def check(self, value: bytes | None, key: str) -> None:
        """A value that is there is the last one that was put; nothing is missing where there is room."""
        assert value == self.last.get(key) or (value is None and self.limit is not None and not self.leased[key])

    @rule(key=_KEYS, piece=st.binary(min_size=1, max_size=20), times=st.integers(0, 1000))
    def put(self, key: str, piece: bytes, times: int) -> None:
        value = piece * times
        if self.store.put(key, value):
            self.last[key] = value
            assert self.store.get(key) == value
        else:
            assert self.limit is not None
            self.check(self.store.get(key), key)

    @rule(key=_KEYS)
    def get(self, key: str) -> None:
        self.check(self.store.get(key), key)

    @rule(key=_KEYS)
    def delete(self, key: str) -> None:
        deleted = self.store.delete(key)
        assert deleted is (key in self.last) or (self.limit is not None and not deleted)
        assert not self.store.contains(key)
        self.last.pop(key, None)
        self.leased.pop(key, None)

    @rule(key=_KEYS)
    def contains(self, key: str) -> None:
        assert self.store.contains(key) is (self.store.get(key) is not None)

    @rule(key=_KEYS)
    def lease(self, key: str) -> None:
        leased = self.store.lease(key)
        assert leased is (self.store.get(key) is not None)
        self.leased[key] += leased

    @rule(key=_KEYS)
    def release(self, key: str) -> None:
        self.store.release(key)
        self.leased[key] = max(0, self.leased[key] - 1)

    @rule(prefix=st.sampled_from(["", "s", "span/", "patch/a", "zzz"]))
    def listing(self, prefix: str) -> None:
        listed = sorted(self.store.list(prefix))
        assert listed == sorted(key for key in self.last if key.startswith(prefix) and self.store.contains(key))

    @rule()
    def verify(self) -> None:
        good, corrupt = self.store.verify()
        assert corrupt == 0
        assert good == len(self.last) * self.copies or self.limit is not None

    @invariant()
    def bounded(self) -> None:
        stats = self.store.stats()
        assert stats.items == len(self.last) or (self.limit is not None and stats.items < len(self.last))
        assert self.limit is None or stats.bytes <= self.limit * self.copies
        assert (stats.corrupt, stats.leased) == (0, sum(count > 0 for count in self.leased.values()))

    @invariant()
    def leased_stay(self) -> None:
        for key, count in self.leased.items():
            if count:
                assert self.store.get(key) == self.last[key]
