"""Files that left their libraries, as far as this process knows: what was placed of them stays placed, and is not recalled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ctxwin.errors import ChunkUnavailable
from ctxwin.store.lru import LRUCache

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk

_origins: LRUCache[None] = LRUCache(1 << 16)


def note_removed(origins: Iterable[str]) -> None:
    """Remember that the files of these `Chunk.origin` are gone; the newest 65,536 are remembered."""
    for origin in origins:
        _origins.put(origin, None, 1)


def note_present(origins: Iterable[str]) -> None:
    """Undo `note_removed`."""
    for origin in origins:
        _origins.pop(origin)


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
