"""How a library lies in a store: entries and editions never change and are named by content, one fenced record names them.

| key | record | changes |
|---|---|---|
| ``library/<digest of its name>`` | `Head`: the newest editions, when files expire | by `Heads.update`, fenced |
| ``edition/<digest>`` | `Edition`: the files of one version | never |
| ``entry/<digest>`` | `Entry`: the passages of one file | never |
| ``source/<digest>`` | pixels of a passage's media | never |
| ``grants/<digest of a tenant's name>`` | the libraries that a tenant may read | by `Grants.update`, fenced |

A process that ends between these writes leaves records that nothing names; what the head names was written before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from ctxwin.chunk import Chunk
from ctxwin.errors import StaleOwner, StoreFull, StoreUnavailable
from ctxwin.hashing import digest
from ctxwin.store.base import Store
from ctxwin.store.spans import SpanRepository

_TRIES = 100
M = TypeVar("M", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Passage(_Record):
    """A piece of a file that is found and placed as one.

    Attributes:
        chunk: what is placed.
        text: what search by words reads: the text in it, the caption.
    """

    chunk: Chunk
    text: str = ""


class Entry(_Record):
    """A file of a library.

    Attributes:
        name: unique in its library.
        bytes: size of the file.
        added: seconds since the epoch.
        ttl: seconds after its last use at which it expires; None: never.
    """

    name: str
    passages: tuple[Passage, ...]
    bytes: int = 0
    added: float = 0.0
    ttl: float | None = None


class Row(_Record):
    """A file as an edition lists it. ``key`` is its `Entry`'s, ``expires`` seconds since the epoch, where that was asked for."""

    name: str
    key: str
    passages: int
    bytes: int
    added: float
    ttl: float | None = None
    expires: float | None = None


class Edition(_Record):
    """The files of one version of a library."""

    version: int = 0
    rows: tuple[Row, ...] = ()


class Head(_Record):
    """What changes of a library.

    Attributes:
        editions: version and key, the newest last.
        expires: seconds since the epoch by file.
        ttl: seconds after its last use at which a file expires that says nothing itself; None: never.
    """

    name: str
    ttl: float | None = None
    editions: tuple[tuple[int, str], ...] = ()
    expires: dict[str, float] = {}


class Granted(_Record):
    """The libraries that a tenant may read."""

    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fenced:
    """A fenced record of a model, changed by whoever holds its token; losers try again on what the winner wrote."""

    store: Store
    key: str

    def read(self, empty: M) -> M:
        """What it says; ``empty`` where there is none. Raises StoreUnavailable."""
        raw = self.store.read(self.key)
        return empty if raw is None else type(empty).model_validate_json(raw)

    def update(self, empty: M, change: Callable[[M], M]) -> M:
        """Writes ``change`` of what it says; whatever ``change`` raises leaves it as it is.

        Cost: a read and two small writes. Raises StoreUnavailable, and StoreFull where the store refuses it.
        """
        for _ in range(_TRIES):
            try:
                claimed = self.store.claim(self.key)
                token, raw = claimed or (1, None)
                made = change(empty if raw is None else type(empty).model_validate_json(raw))
                if claimed is None:  # two that make it at once write the same, and then take turns
                    self._commit(empty.model_dump_json().encode(), 1)
                    continue
                self._commit(made.model_dump_json().encode(), token)
                return made
            except StaleOwner:
                continue
        raise StoreUnavailable(f"{self.key[:20]} must be free for a moment to be changed; try again later")

    def _commit(self, value: bytes, token: int) -> None:
        if not self.store.commit(self.key, value, token):
            raise StoreFull("the store must take a library's record, and is full; make room there, or raise its limit")


def put(repo: SpanRepository, namespace: str, record: BaseModel) -> str:
    """Stores ``record`` under its content; returns the key. Raises StoreFull where the store refuses it."""
    said = record.model_dump(mode="json")
    key = f"{namespace}/{digest(namespace, json.dumps(said, sort_keys=True))}"
    if not repo.contains(key) and not repo.put_json(key, said, bound=False):
        raise StoreFull(f"the store must take {namespace} records, and is full; make room there, or raise its limit")
    return key


def get(repo: SpanRepository, key: str, model: type[M]) -> M | None:
    """The record under ``key``; None where it is gone, or is not what its key says."""
    namespace = key.partition("/")[0]
    said: Any = repo.get_json(key, bound=False)
    if said is None or key != f"{namespace}/{digest(namespace, json.dumps(said, sort_keys=True))}":
        return None
    return model.model_validate(said)
