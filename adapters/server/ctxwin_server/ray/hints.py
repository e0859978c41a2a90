"""Routing hints of requests, and the order in which replicas are tried for them. Pure functions; no Ray."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from ctxwin.errors import CtxwinError
from ctxwin.hashing import digest
from ctxwin_server.request_options import ROUTES, conversation_name

_WINDOW = re.compile(r"/v1/windows/([0-9a-z]{1,64})(?:/|$)")
_CHUNK = re.compile(rb'"chunk(?:_id)?"\s*:\s*"([0-9a-f]{64})"')
_MAX_CHUNKS = 4096


@dataclass(frozen=True)
class Hint:
    """The window, conversation and chunks that a request refers to.

    Attributes:
        window: id of the window in its path.
        session: the conversation of a plain chat.
        chunks: ids of the uploaded chunks in its body.
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
    """Head of a replica's answer; the body follows in pieces.

    Attributes:
        replica: the replica that answers.
        windows: the windows that it used last.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str
    windows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """The router's view of a replica.

    Attributes:
        name: unique in the fleet.
        windows: its open windows.
        chunks: its KV bytes by chunk.
        running: its ongoing requests.
    """

    name: str
    windows: frozenset[str] = frozenset()
    chunks: Mapping[str, int] = field(default_factory=dict)
    running: int = 0


def hint_of(path: str, headers: Headers, body: bytes, parse: Callable[[bytes], Any]) -> Hint:
    """Return the hint of a request, from its path, headers and body.

    ``parse`` reads the JSON of chats and raises if that would take long (`Limits.parse`). Cost: a pass over the body, and a
    JSON parse for chats.
    """
    window = _WINDOW.match(path)
    if window:
        return Hint(window=window[1])
    chunks: set[str] = set()
    for match in _CHUNK.finditer(body):
        chunks.add(match[1].decode())
        if len(chunks) >= _MAX_CHUNKS:
            break
    session = ""
    if path in ROUTES:
        try:
            data = parse(body)
        except (ValueError, CtxwinError):
            data = None  # the replica reports the error
        session = conversation_name(headers, data if isinstance(data, dict) else {})
    return Hint(session=session, chunks=frozenset(chunks))


def rank(hint: Hint, candidates: Sequence[Candidate], owners: Mapping[str, str]) -> list[Candidate]:
    """Sort the candidates, best first: the window's owner, then the most bytes of the chunks, then the fewest requests.

    A window or session without a known owner goes to the replica that its name hashes to (rendezvous hashing, Thaler and
    Ravishankar 1998), so that every front chooses the same one, and few move when replicas are added or removed.

    Args:
        owners: replicas by window, from answers seen in this process; newer than the candidates' own reports.
    """
    name = hint.window or hint.session
    owner = owners.get(hint.window, "")

    def key(candidate: Candidate) -> tuple[bool, bool, int, str, int, int, str]:
        chunk_bytes = sum(candidate.chunks.get(chunk, 0) for chunk in hint.chunks)
        place = digest("place", name, candidate.name) if name else ""
        listed = hint.window in candidate.windows
        load = candidate.running, len(candidate.windows)
        return candidate.name != owner, not listed, -chunk_bytes, place, *load, candidate.name

    return sorted(candidates, key=key)


def held_chunks(windows: Iterable[Any], token_bytes: int, limit: int = _MAX_CHUNKS) -> dict[str, int]:
    """Return the KV bytes of each chunk placed in ``windows``: the ``limit`` largest, the largest first."""
    sizes: Counter[str] = Counter()
    for window in windows:
        for entry in window.core.state.placed:
            sizes[entry.chunk_id] = max(sizes[entry.chunk_id], entry.tokens * token_bytes)
    return dict(sizes.most_common(limit))
