"""`LRUCache` in several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from ctxwin.store.lru import LRUCache


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Have Python change from thread to thread as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_a_value_that_threads_replace_is_there_throughout_and_counts_once() -> None:
    cache: LRUCache[int] = LRUCache(1 << 20)
    cache.put("key", 0, 1)
    missing: list[int] = []

    def replace() -> None:
        for i in range(5000):
            cache.put("key", i, 1)
            if "key" not in cache:
                missing.append(i)

    threads = [threading.Thread(target=replace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not missing and cache.nbytes == 1
