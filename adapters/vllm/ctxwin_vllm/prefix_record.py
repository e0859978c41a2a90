"""Record of the blocks that this process's requests have left in vLLM's prefix cache, for plans.

vLLM's scheduler may run in another process, and cannot be queried. Its blocks are named here as it names them: by their parent,
their tokens, the media that reach into them, and the salt. Blocks of plain requests, and later evictions by vLLM, are not
visible from here.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ctxwin.engines.segments import MediaSpan


class PrefixRecord:
    """Names of as many blocks as vLLM's prefix cache has; the least recently used go first, as there. Thread-safe."""

    def __init__(self, block: int, capacity: int) -> None:
        self.block, self._capacity = block, capacity
        # By name, whether it is the last one of the newest request that has it.
        self._blocks: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, ids: Sequence[int], media: Sequence[MediaSpan], marks: Mapping[int, str], salt: str) -> list[bytes]:
        """Return the names of the full blocks of a prompt: hashes of their parent, tokens and media. About 1 us a block."""
        inside: dict[int, list[tuple[str, int, str]]] = {}
        for m in media:
            for index in range(m.offset // self.block, (m.offset + m.tokens - 1) // self.block + 1):
                medium = (m.key, m.offset - index * self.block, marks.get(m.offset, ""))
                inside.setdefault(index, []).append(medium)
        data = np.asarray(ids, dtype=np.int64).tobytes()
        width = np.dtype(np.int64).itemsize * self.block
        names, parent = [], sha256(salt.encode()).digest()
        # Every part has a fixed length, so no two blocks give the same bytes.
        for index in range(len(ids) // self.block):
            block = parent + data[index * width : (index + 1) * width]
            if index in inside:
                block += sha256(repr(inside[index]).encode()).digest()
            parent = sha256(block).digest()
            names.append(parent)
        return names

    def hit(self, names: Sequence[bytes], extra: Collection[bytes] = ()) -> int:
        """Return how many tokens of a prompt with these blocks are cached; ``extra`` blocks count as cached."""
        with self._lock:
            count = next((i for i, n in enumerate(names) if n not in self._blocks and n not in extra), len(names))
        return count * self.block

    def continues(self, names: Sequence[bytes]) -> bool:
        """Return True if all that an earlier request left in the cache is the beginning of a prompt with these blocks."""
        with self._lock:
            cached = list(itertools.takewhile(self._blocks.__contains__, names))
            return bool(cached) and self._blocks[cached[-1]]

    def add(self, names: Sequence[bytes]) -> None:
        """Record the blocks of a request that has ended."""
        with self._lock:
            for i, name in enumerate(names, 1):
                self._blocks[name] = i == len(names)
                self._blocks.move_to_end(name)
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Record that vLLM's cache was emptied."""
        with self._lock:
            self._blocks.clear()
