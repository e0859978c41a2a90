"""Routing hints of requests, and the replicas that are tried for them. No Ray."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from starlette.datastructures import Headers

from ctxwin.errors import CtxwinError
from ctxwin.hashing import digest
from ctxwin_chats.options import ROUTES, conversation_name

_WINDOW = re.compile(r"/v1/windows/([0-9a-z]{1,64})(?:/|$)")
_CHUNK = re.compile(rb'"chunk(?:_id)?"\s*:\s*"([0-9a-f]{64})"')
_MAX_CHUNKS: Final = 4096
TRIED: Final = 8
"""Replicas that are tried for a request before the router backs off and tries again."""
_PREFIX: Final = 8
_PROBES: Final = 21
_RING: Final = 1 << 64
_SLACK: Final = 8
"""Ongoing requests by which the place of a chunk may exceed another replica's."""


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
    scheme: str = "http"


@dataclass(frozen=True)
class Head:
    """Head of a replica's answer; the body follows in pieces."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


def hint_of(path: str, headers: Headers, body: bytes, parse: Callable[[bytes], Any]) -> Hint:
    """Return the hint of a request, from its path, headers and body.

    ``parse`` reads the JSON of chats and raises if that would take long. Cost: a pass over the body, and a
    JSON parse for chats.
    """
    if window := _WINDOW.match(path):
        return Hint(window=window[1])
    chunks = frozenset(match[1].decode() for match in islice(_CHUNK.finditer(body), _MAX_CHUNKS))
    session = ""
    if path in ROUTES:
        try:
            data = parse(body)
        except (ValueError, CtxwinError):
            data = None  # the replica reports the error
        session = conversation_name(headers, data if isinstance(data, dict) else {})
    return Hint(session=session, chunks=chunks)


def window_prefix(replica: str) -> str:
    """Return the beginning of the ids of the windows that a replica opens, by which `Places` finds it again."""
    return digest("window", replica)[:_PREFIX]


class Places:
    """The places of requests among replicas, by their names alone: every front finds the same ones, and keeps nothing of a name.

    A window belongs to the replica that opened it, which its id tells; once that one is gone, as any other name to the nearest
    replica on a ring. By multi-probe consistent hashing (Appleton and O'Reilly 2015) the nearest is that of several probes, so
    that one point for each replica suffices: the largest share is about 1.1 of the mean, and only names of replicas that come
    or go move. Memory: O(replicas).
    """

    def __init__(self, replicas: Iterable[str]) -> None:
        self.replicas = sorted(set(replicas))
        self._by_prefix = {window_prefix(replica): replica for replica in self.replicas}
        ring = sorted((_point("replica", replica)[0], replica) for replica in self.replicas)
        self._points = [point for point, _ in ring]
        self._at = [replica for _, replica in ring]

    def order(self, hint: Hint, running: Callable[[str], int]) -> list[str]:
        """Return the replicas to try for a request, best first: at most `TRIED`, filled up with a random sample.

        A window or conversation stays at its place. A chunk leaves it for the next one while that has many more requests than
        the least busy of a random sample: what is asked for by all is then served by many. Other requests go to the least busy.

        Args:
            running: ongoing requests of a replica.

        Cost: O(probes x log replicas), and at most 2 x `TRIED` + 1 calls of ``running``.
        """
        name = hint.window or hint.session
        near = [self._by_prefix[prefix]] if (prefix := hint.window[:_PREFIX]) in self._by_prefix else []
        if name or hint.chunks:
            near += self._near(name or min(hint.chunks))
        if name and len(near) >= TRIED:
            return list(dict.fromkeys(near))[:TRIED]
        sample = sorted(random.sample(self.replicas, min(TRIED, len(self.replicas))), key=running)
        if not name and near:
            most = running(sample[0]) + _SLACK
            near = [replica for replica in near if running(replica) <= most]
        return list(dict.fromkeys((*near, *sample)))[:TRIED]

    def _near(self, name: str) -> list[str]:
        """Return replicas by the distance of their point behind the nearest probe of ``name``."""
        begin, step = _point("name", name)
        probes: list[tuple[int, str]] = []
        for _ in range(_PROBES if self._at else 0):
            at = bisect_left(self._points, begin) % len(self._points)
            probes.append(((self._points[at] - begin) % _RING, self._at[at]))
            begin = (begin + step) % _RING
        return list(dict.fromkeys(replica for _, replica in sorted(probes)))[:TRIED]


def _point(kind: str, name: str) -> tuple[int, int]:
    """Return a point of the ring, and an odd step to further ones."""
    hashed = digest(kind, name)
    return int(hashed[:16], 16), int(hashed[16:32], 16) | 1
