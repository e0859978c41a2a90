"""Record of the blocks that this process's requests have left in vLLM's prefix cache, for plans.

vLLM's scheduler may run in another process, and cannot be queried. Its blocks are named here as it names them: by their parent,
their tokens, the media that reach into them, and the salt. Blocks of plain requests, and later evictions by vLLM, are not
visible from here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ctxwin.hashing import digest

if TYPE_CHECKING:
    from ctxwin.engines.segments import MediaSpan


class PrefixRecord:
    """Names of blocks in vLLM's prefix cache. Thread-safe.

    Args:
        block: tokens of a block.
        capacity: number of blocks that vLLM has; the least recently used go first, as there.
    """

    def __init__(self, block: int, capacity: int) -> None:
        self.block, self._capacity = block, capacity
        self._blocks: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, ids: Sequence[int], media: Sequence[MediaSpan], marks: Mapping[int, str], salt: str) -> list[str]:
        """Return the names of the full blocks of a prompt. O(tokens)."""
        names, parent = [], salt
        for begin in range(0, len(ids) - self.block + 1, self.block):
            end = begin + self.block
            inside = [
                (m.key, m.offset - begin, marks.get(m.offset, ""))
                for m in media
                if m.offset < end and begin < m.offset + m.tokens
            ]
            parent = digest("block", parent, list(ids[begin:end]), inside)
            names.append(parent)
        return names

    def hit(self, names: Sequence[str], extra: Collection[str] = ()) -> int:
        """Return how many tokens of a prompt with these blocks are cached; ``extra`` blocks count as cached."""
        with self._lock:
            count = next((i for i, n in enumerate(names) if n not in self._blocks and n not in extra), len(names))
        return count * self.block

    def add(self, names: Sequence[str]) -> None:
        """Record the blocks of a request that has ended."""
        with self._lock:
            for name in names:
                self._blocks[name] = None
                self._blocks.move_to_end(name)
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Record that vLLM's cache was emptied."""
        with self._lock:
            self._blocks.clear()
