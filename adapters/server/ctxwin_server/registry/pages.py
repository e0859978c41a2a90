"""Pages of evicted chunks: a window's record names them instead of holding all that it has evicted, so that a version of a long
stream writes what is new. A page is written once, and goes when one of its chunks is evicted no more."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

from ctxwin.hashing import digest
from ctxwin.store.base import Store
from ctxwin.window.state import Placed, State

SIZE = 64
"""Most chunks of a page; of the newest evicted ones, fewer than that lie in no page."""
_log = logging.getLogger("ctxwin")


class EvictedPages:
    """The pages of one window in a store, leased while it is open. Not thread-safe.

    Args:
        store: that of the window's record.
        window: its id.
    """

    def __init__(self, store: Store, window: str) -> None:
        self._store, self._prefix = store, f"evicted/{window}/"
        self._pages: dict[str, Sequence[Placed]] = {}
        self._keys: dict[int, str] = {}  # by the identity of the first chunk, which its page keeps alive

    def write(self, state: State) -> tuple[State, list[str]]:
        """Return the state without the evicted chunks that lie in pages, and the keys of these, which stand in front.

        Pages that are missing are written; what the store refuses stays in the state. Raises OSError as the store does.
        Cost: O(n) for n evicted chunks, and the JSON of new pages.
        """
        evicted, keys, at = (*state.evicted,), [], 0
        while at < len(evicted):
            key = self._key(evicted, at)
            if key is None:
                end = self._end(evicted, at)
                if end == len(evicted) and end - at < SIZE:
                    break
                page = state.replace(placed=(), evicted=evicted[at:end])
                value = json.dumps(page.model_dump(mode="json", include={"evicted"}), allow_nan=False).encode()
                key = self._prefix + digest(value)
                if not self._store.commit(key, value, 1):
                    break
                self._add(key, page.evicted)
            keys.append(key)
            at += len(self._pages[key])
        return state.replace(evicted=evicted[at:]), keys

    def _key(self, evicted: Sequence[Placed], at: int) -> str | None:
        """Return the key of the page that holds just what stands at ``at``."""
        key = self._keys.get(id(evicted[at]))
        page = self._pages.get(key or "", ())
        present = evicted[at : at + len(page)]
        return key if page and len(present) == len(page) and all(map(is_, page, present)) else None

    def _end(self, evicted: Sequence[Placed], at: int) -> int:
        """Return where a new page from ``at`` ends: it takes whole pages behind it only."""
        end = at + 1
        while end < len(evicted):
            key = self._key(evicted, end)
            size = 1 if key is None else len(self._pages[key])
            if end + size - at > SIZE:
                break
            end += size
        return end

    def _add(self, key: str, page: Sequence[Placed]) -> None:
        self._store.lease(key)
        self._pages[key] = page
        self._keys[id(page[0])] = key

    def read(self, keys: Iterable[str], parse: Callable[[Any], State]) -> tuple[Placed, ...]:
        """Return the chunks of pages; ``parse`` makes a state of the JSON of some evicted chunks.

        A page that the store has lost or damaged is logged, and its chunks are left out: they cannot be recalled. Raises
        StoreUnavailable, and what ``parse`` raises.
        """
        try:
            for key in keys:
                value = self._store.read(key) if key.startswith(self._prefix) else None
                if value is None or key != self._prefix + digest(value):
                    _log.warning("a page of evicted chunks left the store: they cannot be recalled (%s)", key[:80])
                    continue
                self._add(key, parse(json.loads(value)).evicted)
        except BaseException:
            self.release()
            raise
        return tuple(p for page in self._pages.values() for p in page)

    def keep(self, keys: Iterable[str]) -> None:
        """Delete all pages but these, once the record names no other ones."""
        for key in self._pages.keys() - {*keys}:
            page = self._pages.pop(key)
            if self._keys.get(id(page[0])) == key:
                del self._keys[id(page[0])]
            self._store.release(key)
            self._store.delete(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete pages of a window that is no more."""
        for key in keys:
            if key.startswith(self._prefix):
                self._store.delete(key)

    def release(self) -> None:
        """Release the leases and know no page any more; they stay in the store."""
        for key in self._pages:
            self._store.release(key)
        self._pages.clear()
        self._keys.clear()
