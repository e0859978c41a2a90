"""Stores stacked from fast to durable: reads go down until found and bring the value up, writes go to every tier."""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from ctxwin.store.base import LeaseCounts, Store, StoreStats, check_key

_MOST_WANTED = 1024


class TieredStore(Store):
    """``tiers`` from the fastest to the most durable; closing it closes them.

    A value is held where any tier holds it, so a put counts as stored when one tier took it; a lease protects it in
    every tier that holds it at that moment. What is deleted while it is read does not come back by being copied up.
    """

    def __init__(self, tiers: Sequence[Store]) -> None:
        if not tiers:
            raise ValueError("tiers must have at least one store, got none")
        self.tiers = tuple(tiers)
        self.shared, self.evicts = self.tiers[-1].shared, self.tiers[-1].evicts
        self._lock = threading.Lock()
        self._leases: dict[str, list[tuple[Store, ...]]] = {}
        self._tally = LeaseCounts()
        self._deletions = self._deleting = 0  # those that have begun, and those under way
        self._fetcher, self._process, self._wanted = ThreadPoolExecutor(1, "ctxwin-prefetch"), os.getpid(), 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self.tiers))}>"

    def get(self, key: str) -> bytes | None:
        """The value from the first tier that holds it, copied to the tiers above. Cost: of the tiers asked."""
        check_key(key)
        before = self._deletions, self._deleting
        for depth, tier in enumerate(self.tiers):
            value = tier.get(key)
            if value is not None:
                self._copy(key, value, self.tiers[:depth], before)
                # What is hot above must not look cold below: `contains` counts as a use.
                for below in self.tiers[depth + 1 :]:
                    below.contains(key)
                self._tally.count("hits")
                return value
        self._tally.count("misses")
        return None

    def put(self, key: str, value: bytes) -> bool:
        """Write through to every tier; True where at least one took it.

        Then a tier that refused drops the older value it may hold; where all refused, everything stays as it was.
        """
        refused = [tier for tier in self.tiers if not tier.put(key, value)]
        if len(refused) == len(self.tiers):
            return False
        for tier in refused:
            tier.delete(key)
        self._tally.count("puts")
        return True

    def delete(self, key: str) -> bool:
        with self._lock:
            self._leases.pop(key, None)
            self._deletions += 1
            self._deleting += 1
        try:  # from the last tier on: once a tier has let go of it, a copy made of one below is seen to be one (`_copy`)
            return any([tier.delete(key) for tier in reversed(self.tiers)])
        finally:
            with self._lock:
                self._deleting -= 1

    def _copy(self, key: str, value: bytes, tiers: Sequence[Store], before: tuple[int, int]) -> None:
        """Put a value that was read below into ``tiers``, unless a deletion was under way ``before``; take it back where one
        began since and it is gone below."""
        begun, under_way = before
        if under_way:
            return
        for tier in tiers:
            tier.put(key, value)
        if self._deletions != begun and not any(tier.contains(key) for tier in self.tiers[len(tiers) :]):
            for tier in tiers:
                tier.delete(key)

    def contains(self, key: str) -> bool:
        return any([tier.contains(key) for tier in self.tiers])

    def persists(self, key: str) -> bool:
        return self.tiers[-1].persists(key)

    def missing(self, keys: Collection[str]) -> list[str]:
        first, *others = [tier.missing(keys) for tier in self.tiers]
        return [*filter({*first}.intersection(*others).__contains__, first)]

    def tier(self, key: str) -> str:
        """Of the first tier that holds ``key``. Cost: a lookup in the tiers above the last."""
        return next((tier for tier in self.tiers[:-1] if tier.contains(key)), self.tiers[-1]).tier(key)

    def reachable(self) -> bool:
        """Return True if every tier answers."""
        return all(tier.reachable() for tier in self.tiers)

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted({key for tier in self.tiers for key in tier.list(prefix)}))

    def lease(self, key: str) -> bool:
        holders = tuple(tier for tier in self.tiers if tier.lease(key))
        if holders:
            with self._lock:
                self._leases.setdefault(key, []).append(holders)
        return bool(holders)

    def release(self, key: str) -> None:
        with self._lock:
            stack = self._leases.get(key)
            holders = stack.pop() if stack else ()
            if stack is not None and not stack:
                del self._leases[key]
        for tier in holders:
            tier.release(key)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Copy values into the first tier, one after another in a thread; what is too much at once is left where it is."""
        with self._lock:
            if self._closed:
                return
            if self._process != os.getpid():  # a forked one has no thread of its parent's
                self._fetcher, self._process, self._wanted = ThreadPoolExecutor(1, "ctxwin-prefetch"), os.getpid(), 0
            for key in islice(keys, max(0, _MOST_WANTED - self._wanted)):
                self._wanted += 1
                self._fetcher.submit(self._fetch, key)

    def _fetch(self, key: str) -> None:
        first, *below = self.tiers
        before = self._deletions, self._deleting
        try:
            if not first.contains(key):
                value = next((value for tier in below if (value := tier.get(key)) is not None), None)
                if value is not None:
                    self._copy(key, value, [first], before)
        except ValueError:
            pass  # a tier was closed meanwhile
        finally:
            with self._lock:
                self._wanted -= 1

    def claim(self, key: str) -> tuple[int, bytes] | None:
        """From the last tier, as every fenced record: a copy above it could be old."""
        return self.tiers[-1].claim(key)

    def commit(self, key: str, value: bytes, token: int) -> bool:
        return self.tiers[-1].commit(key, value, token)

    def read(self, key: str) -> bytes | None:
        return self.tiers[-1].read(key)

    def token(self, key: str) -> int:
        return self.tiers[-1].token(key)

    def hold(self, key: str, value: str, seconds: float) -> str:
        return self.tiers[-1].hold(key, value, seconds)

    def retire(self, key: str) -> bool:
        return self.tiers[-1].retire(key)

    def stats(self) -> StoreStats:
        """Items are those of the tier that holds most, bytes are summed over the tiers."""
        parts, leased = [tier.stats() for tier in self.tiers], len(self._leases)
        mine = self._tally.stats(max(part.items for part in parts), sum(part.bytes for part in parts))
        lost = {name: sum(getattr(part, name) for part in parts) for name in ("evictions", "corrupt", "foreign")}
        return replace(mine, leased=leased, **lost)

    def listen(self, dropped: Callable[[str], None]) -> bool:
        return any([tier.listen(dropped) for tier in self.tiers])

    def limit(self) -> int:
        """That of the largest tier: what it lets go of is gone."""
        limits = [tier.limit() for tier in self.tiers]
        return max(limits) if all(limits) else 0

    def verify(self) -> tuple[int, int]:
        """Sum over the tiers; a key held twice counts twice."""
        checked = [tier.verify() for tier in self.tiers]
        return sum(good for good, _ in checked), sum(corrupt for _, corrupt in checked)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._fetcher.shutdown(cancel_futures=True)
        for tier in self.tiers:
            tier.close()
