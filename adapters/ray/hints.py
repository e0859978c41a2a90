"""What a request is about, and in which order replicas should be asked to answer it. Pure; nothing here knows Ray."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from ctxwin.errors import CtxwinError
from ctxwin.hashing import digest
from ctxwin.serve.asked import ROUTES, conversation_name

_WINDOW = re.compile(r"/v1/windows/([0-9a-z]{1,64})(?:/|$)")
_CHUNK = re.compile(rb'"chunk(?:_id)?"\s*:\s*"([0-9a-f]{64})"')
_MOST_CHUNKS = 4096


@dataclass(frozen=True)
class Hint:
    """What a request is about.

    Attributes:
        window: the window that it names.
        session: the conversation of a plain chat.
        chunks: the uploaded chunks that it names.
    """

    window: str = ""
    session: str = ""
    chunks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    """A request on its way from the front to a replica."""

    hint: Hint
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None


@dataclass(frozen=True)
class Head:
    """What a replica answers first; the body follows in pieces.

    Attributes:
        replica: whose answer it is.
        windows: those that it used last.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str
    windows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A replica, as the router sees it.

    Attributes:
        name: unique in the fleet.
        windows: that it has open; chunks: bytes of KV by chunk.
        running: requests that it has in hand.
    """

    name: str
    windows: frozenset[str] = frozenset()
    chunks: Mapping[str, int] = field(default_factory=dict)
    running: int = 0


def hint_of(path: str, headers: Headers, body: bytes, parse: Callable[[bytes], Any]) -> Hint:
    """What a request is about, from its path, its headers and its body.

    ``parse`` reads the JSON of chats, and raises for what takes long to read (`Limits.parse`). Cost: a pass over the body, and
    JSON's.
    """
    found = _WINDOW.match(path)
    if found:
        return Hint(window=found[1])
    chunks: set[str] = set()
    for match in _CHUNK.finditer(body):
        chunks.add(match[1].decode())
        if len(chunks) >= _MOST_CHUNKS:
            break
    session = ""
    if path in ROUTES:
        try:
            data = parse(body)
        except (ValueError, CtxwinError):
            data = None  # the replica says what is wrong with it
        session = conversation_name(headers, data if isinstance(data, dict) else {})
    return Hint(session=session, chunks=frozenset(chunks))


def rank(hint: Hint, candidates: Sequence[Candidate], owners: Mapping[str, str]) -> list[Candidate]:
    """The candidates, best first: the window's owner, then the most bytes of the chunks, then the fewest requests.

    A window or a session that nobody is known to hold goes where its name falls (rendezvous hashing, Thaler and Ravishankar
    1998), so that every front sends it to the same replica, and few move when replicas come and go.

    Args:
        owners: replicas by window, of answers seen here; newer than what the candidates say of themselves.
    """
    named = hint.window or hint.session
    owner = owners.get(hint.window, "")

    def key(candidate: Candidate) -> tuple[bool, bool, int, str, int, int, str]:
        held = sum(candidate.chunks.get(chunk, 0) for chunk in hint.chunks)
        place = digest("place", named, candidate.name) if named else ""
        listed = hint.window in candidate.windows
        load = candidate.running, len(candidate.windows)
        return candidate.name != owner, not listed, -held, place, *load, candidate.name

    return sorted(candidates, key=key)


def held_chunks(windows: Iterable[Any], token_bytes: int, most: int = _MOST_CHUNKS) -> dict[str, int]:
    """Bytes of KV by chunk that the windows have placed, the largest first where there are more than ``most``."""
    held: Counter[str] = Counter()
    for window in windows:
        for placed in window.core.state.placed:
            held[placed.chunk_id] = max(held[placed.chunk_id], placed.tokens * token_bytes)
    return dict(held.most_common(most))
