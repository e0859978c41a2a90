"""Files that left their libraries, as far as this process knows: what was placed of them stays placed, and is not recalled."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ctxwin.errors import ChunkUnavailable

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk

_MOST = 1 << 16
_origins: OrderedDict[str, None] = OrderedDict()
_lock = threading.Lock()


def note_removed(origins: Iterable[str]) -> None:
    """Remember that the files of these `Chunk.origin` are gone; the newest 65,536 are remembered."""
    with _lock:
        for origin in origins:
            _origins[origin] = None
            _origins.move_to_end(origin)
        while len(_origins) > _MOST:
            _origins.popitem(last=False)


def note_present(origins: Iterable[str]) -> None:
    """Undo `note_removed`."""
    with _lock:
        for origin in origins:
            _origins.pop(origin, None)


def is_removed(chunk: Chunk) -> bool:
    """Return True if ``chunk`` is of a file that has left its library."""
    return bool(chunk.origin) and chunk.origin in _origins


def check_present(chunk: Chunk) -> None:
    """Raise ChunkUnavailable for a chunk of a file that has left its library."""
    if is_removed(chunk):
        raise ChunkUnavailable(
            f"a recalled chunk must be of a file that its library has, got one of {chunk.label!r}, which was removed or has "
            "expired; add the file again and retrieve it"
        )
