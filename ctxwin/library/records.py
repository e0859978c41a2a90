"""How a library lies in a store: entries and editions never change and are named by content, one fenced record names them.

| key | record | changes |
|---|---|---|
| ``library/<digest of its name>`` | `Head`: the newest editions, when files expire | by `Fenced.update` |
| ``edition/<digest>`` | `Edition`: the files of one version | never |
| ``entry/<digest>`` | `Entry`: the passages of one file | never |
| ``source/<digest>`` | pixels of a passage's media | never |
| ``trace/<library>/<file>/<model>`` | `Trace`: what a file left in this store | never |
| ``grants/<digest of a tenant's name>`` | the libraries that a tenant may read | by `Fenced.update` |

A process that ends between these writes leaves records that nothing names; what the head names was written before it.
"""

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar
from unicodedata import normalize

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from ctxwin.chunk import Chunk
from ctxwin.errors import StaleOwner, StoreUnavailable
from ctxwin.hashing import digest
from ctxwin.store.base import Store, store_full
from ctxwin.store.spans import SpanRepository

_TRIES = 100
_SPREAD = 16
_log = logging.getLogger("ctxwin.library")
M = TypeVar("M", bound=BaseModel)
nfc = partial(normalize, "NFC")  # a file's name as it is stored: systems differ in how they write its accents


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

    name: Annotated[str, AfterValidator(nfc)]
    passages: tuple[Passage, ...]
    bytes: int = 0
    added: float = 0.0
    ttl: float | None = None


class Row(_Record):
    """A file as an edition lists it. ``key`` is its `Entry`'s, ``expires`` seconds since the epoch, where that was asked for."""

    name: Annotated[str, AfterValidator(nfc)]
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
    """The mutable record of a library.

    Attributes:
        editions: version and key, the newest last.
        expires: seconds since the epoch by file.
        ttl: seconds after its last use at which a file expires that says nothing itself; None: never.
        gone: keys of entries that older editions list and nobody reads any more, with the version from which on none does.
        removals: how often entries left it for good.
    """

    name: str
    ttl: float | None = None
    editions: tuple[tuple[int, str], ...] = ()
    expires: dict[str, float] = {}
    gone: dict[str, int] = {}
    removals: int = 0


class Trace(_Record):
    """Records that a file left in a store: its chunks, by which KV is found, and other keys (`ctxwin.library.traces`)."""

    chunks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class Granted(_Record):
    """The libraries that a tenant may read."""

    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fenced:
    """A fenced record of a model, changed by whoever holds its token; losers try again on what the winner wrote."""

    store: Store
    key: str

    def read(self, empty: M) -> M:
        """Return its value; ``empty`` where there is none. Raises StoreUnavailable, also where another version wrote it."""
        raw = self.store.read(self.key)
        return empty if raw is None else self._readable(raw, empty)

    def _readable(self, raw: bytes, empty: M) -> M:
        """The record in ``raw``. One that cannot be read is not missing, nor written over: another version may have made it."""
        try:
            return type(empty).model_validate_json(raw)
        except ValidationError as error:
            raise StoreUnavailable(
                f"the stored record {self.key[:20]} must be readable, got {error.error_count()} faults; delete "
                "what it belongs to, or use the version of ctxwin that wrote it"
            ) from None

    def update(self, empty: M, change: Callable[[M], M]) -> M:
        """Write ``change`` of what it says; whatever ``change`` raises leaves it as it is.

        Cost: a read and two small writes. Raises StoreUnavailable, and StoreFull where the store refuses it.
        """
        took = 0.0
        for tried in range(_TRIES):
            # Those who collide try again within several times what a try takes, however slow the store is now.
            time.sleep(random.uniform(0, min(tried, _SPREAD) * took))  # nosec B311
            began = time.monotonic()
            try:
                claimed = self.store.claim(self.key)
                token, raw = claimed or (1, None)
                updated = change(empty if raw is None else self._readable(raw, empty))
                if claimed is None:  # two that make it at once write the same, and then take turns
                    self._commit(empty.model_dump_json().encode(), 1)
                    continue
                self._commit(updated.model_dump_json().encode(), token)
                return updated
            except StaleOwner:
                took = time.monotonic() - began
                continue
        raise StoreUnavailable(f"{self.key[:20]} must be free for a moment to be changed; try again later")

    def _commit(self, value: bytes, token: int) -> None:
        if not self.store.commit(self.key, value, token) or not self.store.persists(self.key):
            raise store_full("a library's record")


def put(repo: SpanRepository, namespace: str, record: BaseModel) -> str:
    """Store ``record`` under its content; return the key. Raises StoreFull where the store refuses it."""
    payload = record.model_dump(mode="json")
    key = f"{namespace}/{digest(namespace, json.dumps(payload, sort_keys=True))}"
    if not repo.store.persists(key) and not (repo.put_json(key, payload, bound=False) and repo.store.persists(key)):
        raise store_full(f"{namespace} records")
    return key


def get(repo: SpanRepository, key: str, model: type[M]) -> M | None:
    """The record under ``key``; None where it is gone, or is not what its key says."""
    namespace = key.partition("/")[0]
    payload: Any = repo.get_json(key, bound=False)
    if payload is None or key != f"{namespace}/{digest(namespace, json.dumps(payload, sort_keys=True))}":
        return None
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        _log.warning("the stored record %s is malformed, and counts as missing: %s", key, error)
        repo.note_corrupt()
        return None
