"""Who holds which window, as the latest answers that passed through this process said."""

from __future__ import annotations

from ctxwin.adapters.ray.hints import Head
from ctxwin.store.recent import Recent

_MOST_OWNERS = 1 << 16
LATEST: Recent[str] = Recent(_MOST_OWNERS)
"""Replicas by window. What replicas report themselves is a second old."""


def learn(head: Head) -> None:
    """Remembers who holds the windows that an answer speaks of."""
    for window in head.windows:
        LATEST.put(window, head.replica, 1)
