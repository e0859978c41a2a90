"""Replicas by window, from the latest answers that passed through this process."""

from __future__ import annotations

from ctxwin.store.lru import LRUCache
from ctxwin_server.ray.hints import Head

_MAX_OWNERS = 1 << 16
LATEST: LRUCache[str] = LRUCache(_MAX_OWNERS)
"""Replicas by window; more recent than the replicas' own reports, which are up to a second old."""


def learn(head: Head) -> None:
    """Record which replica holds the windows of an answer."""
    for window in head.windows:
        LATEST.put(window, head.replica, 1)
