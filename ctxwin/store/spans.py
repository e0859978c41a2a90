"""Typed records over a `Store`: spans, patches, embeddings, sources and JSON, each checked on a hit.

| namespace | record                                       | model-bound |
|-----------|----------------------------------------------|-------------|
| ``span``  | `SpanKV` with token ids, chunk, provenance and exactness | yes |
| ``patch``, ``orbit`` | `Patch`                           | yes         |
| ``basis`` | `SharedBasis`, stored along with its patches unless it is known (`SpanRepository.know_basis`) | yes |
| ``embed`` | vision embeddings ``[tokens, hidden]``       | yes         |
| ``chunk`` | JSON                                         | yes, unless told otherwise |
| ``source``| encoded bytes of media                       | no          |
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from ctxwin.errors import StoreCorrupt
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.store import codec
from ctxwin.store.base import Store
from ctxwin.store.behind import Entry, LeaseCounts, Writer
from ctxwin.store.failure_log import failure_logger
from ctxwin.store.fp8 import is_packed
from ctxwin.store.lru import LRUCache
from ctxwin.store.span_codec import check_finite, decode_span, encode_span

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.patch import Patch

log = failure_logger(__name__)

_PATCHES: Final = ("patch", "orbit")
_LIVE_BYTES: Final = 256 << 20
_IN_PROCESS: Final = "MemoryStore"
_PENDING_BYTES: Final = 1 << 30
_REFUSED_BYTES: Final = 64 << 20
_UNSERVED: Final = 1 << 16  # patches remembered as not yet served


@dataclass
class RepositoryCounters:
    """Counters of a `SpanRepository` since its creation; ``hits`` and ``misses`` are by namespace.

    Attributes:
        mismatched: records of another model, tokens or provenance under the requested key; each is a miss.
        corrupt: records that did not decode; each is deleted and a miss.
        refused: puts that the store refused.
        patches: stored patches.
        patches_served: stored patches that served an answer, each counted once.
        patches_dropped: patches that were removed to free bytes and had never served.
    """

    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    mismatched: int = 0
    corrupt: int = 0
    refused: int = 0
    patches: int = 0
    patches_served: int = 0
    patches_dropped: int = 0


R = TypeVar("R")


class SpanRepository(LeaseCounts):
    """Typed access to ``store`` for one model; thread-safe.

    Keys are ``namespace/digest``; a bare digest gets the namespace of the method. A record that cannot be returned
    exactly as it was put (absent, undecodable, of another model, of other tokens) is None: a wrong answer is worse than
    a slow one. Returned tensors are on the CPU and read-only (`codec.decode_tensors`); callers may share them.

    Args:
        store: holds the blobs; it stays open after the repository.
        identity: `EngineSpec.identity`; written to every record and compared on a hit.
        spec: layout of the model's KV, against which every span is checked; None checks only that a span is consistent.
        max_live_bytes: bound on cached decoded records, at most the store's own limit. A cached record is served only while the
            store still holds its key. 0 caches none. By default 256 MiB, beside spans whose bytes the store holds in this
            process, which take no memory of their own.
        behind: whether spans are written by a thread of the repository, which nobody waits for. Until then they are found here,
            and not in ``store``; see `flush`.

    Attributes:
        forgettings: how often content was forgotten.
    """

    def __init__(
        self,
        store: Store,
        identity: str,
        max_live_bytes: int | None = None,
        spec: KVSpec | None = None,
        behind: bool = False,
    ) -> None:
        if max_live_bytes is not None and max_live_bytes < 0:
            raise ValueError(f"max_live_bytes must be at least 0, got {max_live_bytes}")
        super().__init__(Writer(store, self._write_span, self._note_refused, _PENDING_BYTES if behind else 0))
        self.store = store
        self.identity = identity
        self.spec = spec
        self.counters = RepositoryCounters()
        self.forgettings = 0
        live_bytes = _LIVE_BYTES if max_live_bytes is None else max_live_bytes
        self._live: LRUCache[tuple[Entry[Any], int]] = LRUCache(min(live_bytes, store.limit() or live_bytes))
        self._shares_bytes = max_live_bytes is None and store.listen(self._live.pop)
        # Media that the store, full say, has refused: nobody else has their pixels, and a window goes on with them.
        self._refused: LRUCache[bytes] = LRUCache(_REFUSED_BYTES)
        self._known: dict[str, SharedBasis] = {}
        self._unserved: OrderedDict[str, None] = OrderedDict()

    def note_forgetting(self) -> None:
        """Count that content is about to be forgotten: a replay of an answer before it must not store anything."""
        with self._lock:
            self.forgettings += 1

    def get_span(
        self,
        key: str,
        token_ids: Sequence[int] | None = None,
        *,
        positions: np.ndarray | None = None,
        is_stored: bool = False,
        **expected: object,
    ) -> tuple[SpanKV, dict[str, Any]] | None:
        """Return the span and its metadata, or None.

        Args:
            key: a key of ``span/``.
            token_ids: ids that the span must have been computed from; others are a miss. None skips the comparison.
            positions: int64 ``[3, T]``, the positions its tokens must have relative to its origin; others are a miss.
            is_stored: the store was just found to hold ``key``, so that it is not asked again about a cached record.
            expected: further metadata that must match: ``chunk``, ``provenance``, ``exact``.

        Cost: a read, a SHA-256 of the blob and a pass over its numbers; nothing while it is cached.
        """

        def same(span: SpanKV, header: Mapping[str, Any]) -> bool:
            meta = header["user"]
            positions_match = positions is None or (
                span.positions.shape == positions.shape and bool((span.positions.numpy() == positions).all())
            )
            ids_match = token_ids is None or list(meta["token_ids"]) == list(token_ids)
            return positions_match and ids_match and all(meta.get(name) == value for name, value in expected.items())

        match = self._get(_key(key, "span"), "span", partial(decode_span, spec=self.spec), same, is_stored=is_stored)
        return None if match is None else (match[0], dict(match[1]["user"]))

    def put_span(self, key: str, span: SpanKV, meta: Mapping[str, Any]) -> bool:
        """Store a span; return False where the store refused it, as far as that is known already.

        Args:
            meta: plain JSON; ``meta["token_ids"]`` must hold one id per token of the span.

        Cost: one copy to the CPU, a SHA-256, the store's write; with ``behind`` nothing, unless very much is pending.
        """
        ids = meta.get("token_ids")
        if ids is None or len(ids) != span.tokens:
            got = "none" if ids is None else str(len(ids))
            raise ValueError(f"meta['token_ids'] must hold {span.tokens} ids, one per token of the span, got {got}")
        header = {"start": int(span.start), "user": {**meta, "token_ids": [int(i) for i in ids]}}
        key = _key(key, "span")
        self.release_abandoned()
        return self._writer.put(key, (span, self._meta(key, "span", header)), span.nbytes)

    def at_hand(self, key: str) -> Any:
        """Return the record of ``key``, just found to be stored, as it is decoded in memory, unchecked; None where it is not."""
        cached = self._live.get(key)
        with self._lock:
            self.counters.hits[key.partition("/")[0]] += cached is not None
        return cached and cached[0][0]

    def attach(self, view: object, *records: tuple[str | None, object]) -> None:
        """Keep ``view`` beside decoded records as long as they are in memory, if the keys, where not None, have just these."""
        for key, record in records:
            cached = self._live.get(key) if key else None
            if key and cached and cached[0][0] is record:
                self._live.attach(key, cached, view)

    def count_attached(self, views: Sequence[object], spans: Sequence[str], patches: Sequence[str]) -> int:
        """Return how many of the first ``views`` are attached to both of their keys, just found to be stored: a hit of each.

        ``patches`` has the key of the span where there is no patch, and is empty where there are none.
        """
        count = self._live.count_attached(views, spans)
        count = self._live.count_attached(views[:count], patches) if patches else count
        kinds = Counter(map(itemgetter(0), patches[:count]))
        with self._lock:
            for kind, hits in (("span", count), ("patch", kinds["p"]), ("orbit", kinds["o"])):
                self.counters.hits[kind] += hits
        return count

    def _write_span(self, key: str, entry: Entry[SpanKV]) -> bool:
        """Store a span; one that was pending goes on as a view of its blob."""
        blob = encode_span(*entry)
        stored = self._put_blob(key, blob)
        if stored and self._writer.get(key) is not None:
            span, header = decode_span(blob, self.spec)
            object.__setattr__(span, "origin", entry[0].origin)
            self._cache(key, (span, header), len(blob))
        return stored

    def _note_refused(self) -> None:
        with self._lock:
            self.counters.refused += 1

    def flush(self) -> None:
        """Wait until all spans are in the store, as far as it took them. Cost: what is pending; none without ``behind``."""
        self._writer.flush()

    def _meta(self, key: str, kind: str, header: Mapping[str, Any], bound: bool = True) -> dict[str, Any]:
        return {**header, "kind": kind, "key": key, "identity": self.identity if bound else ""}

    def get_patch(self, key: str, *, is_stored: bool = False) -> Patch | None:
        """Return the patch under ``patch/`` or ``orbit/`` with its shared basis, or None; ``is_stored`` as in `get_span`."""

        def decode(blob: bytes) -> tuple[Patch, dict[str, Any]]:
            from ctxwin.kv.patch import Patch

            tensors, header = codec.decode_tensors(blob, checked=False)
            named = header["patch"]["basis"]
            basis = None if named is None else self._known.get(named) or self.get_basis(named)
            if named is not None and basis is None:
                raise _BasisGoneError(named)
            patch = Patch.from_tensors(tensors, header["patch"], basis)
            right = () if patch.right is None else (patch.right,)
            check_finite(patch.left, *right, *patch.states.values())
            return patch, header

        return _record(self._get(_key(key, *_PATCHES), "patch", decode, is_stored=is_stored))

    def put_patch(self, key: str, patch: Patch, *, serves: bool = True) -> bool:
        """Store a patch, and its shared basis where that is neither known nor stored; return False where one was refused.

        With ``serves=False`` the patch may not serve answers and is left out of the counters.
        """
        if patch.basis is not None and patch.basis.id not in self._known:
            where = f"basis/{patch.basis.id}"
            described = {"basis": patch.basis.describe()}
            if not self.store.contains(where) and not self._put(where, "basis", described, patch.basis.tensors()):
                return False
        key = _key(key, *_PATCHES)
        stored = self._put(key, "patch", {"patch": patch.describe()}, patch.tensors())
        if stored and serves:
            with self._lock:
                self.counters.patches += 1
                self._unserved[key] = None
                if len(self._unserved) > _UNSERVED:
                    self._unserved.popitem(last=False)
        return stored

    def note_served(self, keys: Iterable[str]) -> None:
        """Count that the patches under ``keys`` served an answer."""
        with self._lock:
            for key in self._unserved.keys() & keys if self._unserved else set[str]():
                del self._unserved[key]
                self.counters.patches_served += 1

    def drop_unserved(self) -> int:
        """Remove the unleased patches stored here that have never served; return the bytes freed."""
        with self._lock:
            keys = list(self._unserved)
        freed = 0
        for key in keys:
            if not self.leased(key):
                blob = self.store.get(key)
                self.delete(key)
                with self._lock:
                    self._unserved.pop(key, None)
                    self.counters.patches_dropped += blob is not None
                freed += len(blob or b"")
        return freed

    def know_basis(self, basis: SharedBasis) -> None:
        """Register a basis that ships with the model, so that patches can name it without the store holding it.

        A patch whose basis is neither registered nor stored is a miss.
        """
        self._known[basis.id] = basis

    def get_basis(self, key: str) -> SharedBasis | None:
        """Return the shared basis with this id, or None."""

        def decode(blob: bytes) -> tuple[SharedBasis, dict[str, Any]]:
            from ctxwin.kv.basis import SharedBasis

            tensors, header = codec.decode_tensors(blob, checked=False)
            return SharedBasis.from_tensors(tensors, header["basis"]), header

        return _record(self._get(_key(key, "basis"), "basis", decode))

    def get_embedding(self, key: str) -> torch.Tensor | None:
        """Return vision embeddings ``[tokens, hidden]`` under ``embed/``, or None."""

        def decode(blob: bytes) -> tuple[torch.Tensor, dict[str, Any]]:
            tensors, header = codec.decode_tensors(blob, checked=False)
            check_finite(tensors["embedding"])
            return tensors["embedding"], header

        return _record(self._get(_key(key, "embed"), "embed", decode))

    def put_embedding(self, key: str, embedding: torch.Tensor) -> bool:
        """Store vision embeddings; return False where the store refused them."""
        return self._put(_key(key, "embed"), "embed", {}, {"embedding": embedding})

    def get_source(self, key: str) -> bytes | None:
        """Return encoded media under ``source/``, also refused ones, or None. All models share them: no identity is compared."""
        return _record(self._get(_key(key, "source"), "source", codec.decode_bytes, bound=False))

    def put_source(self, key: str, data: bytes) -> bool:
        """Store encoded media; return False where the store refused them, and keep the newest 64 MiB of those in memory."""
        return self._put(_key(key, "source"), "source", {}, data, bound=False)

    def get_json(self, key: str, *, bound: bool = True) -> Any:
        """Return JSON under ``chunk/`` (or another namespace named in ``key``), or None. A new object on every call.

        ``bound=False`` reads what `put_json` wrote with the same: values that are valid for every model.
        """

        def decode(blob: bytes) -> tuple[bytes, dict[str, Any]]:
            payload, header = codec.decode_bytes(blob)
            json.loads(payload)
            return payload, header

        payload_read = _record(self._get(_key(key, "chunk", any_namespace=True), "json", decode, bound=bound))
        return None if payload_read is None else json.loads(payload_read)

    def put_json(self, key: str, value: Any, *, bound: bool = True) -> bool:
        """Store plain JSON; return False where the store refused it; raise TypeError where ``value`` is not JSON."""
        payload = json.dumps(value, sort_keys=True, allow_nan=False).encode()
        return self._put(_key(key, "chunk", any_namespace=True), "json", {}, payload, bound=bound)

    def note_corrupt(self) -> None:
        """Count a record whose content does not belong in its namespace."""
        with self._lock:
            self.counters.corrupt += 1

    def record_of(self, key: str) -> Mapping[str, Any]:
        """Return the metadata stored beside the tensors of a span or patch; empty where it is gone or unreadable.

        Works for records of any model, because nothing is compared. Cost: a read and a checksum.
        """
        pending = self._writer.get(key)
        try:
            header = pending[1] if pending else codec.decode_tensors(self.store.get(key) or b"", checked=False)[1]
            meta: Mapping[str, Any] = header["user"] if "user" in header else header["patch"]["meta"]
        except (ValueError, TypeError, KeyError):
            return {}
        return meta

    def contains(self, key: str) -> bool:
        """Return True if the store holds ``key`` (in full, with its namespace). A get may still find a mismatch."""
        return self._writer.get(key) is not None or self.store.contains(key)

    def tier(self, key: str) -> str:
        """Return the source of a read of ``key``: ``at hand`` where it is cached decoded, else a kind of store."""
        return "at hand" if key in self._live or self._writer.get(key) is not None else self.store.tier(key)

    def elsewhere(self, keys: Collection[str]) -> dict[str, str]:
        """Return `tier` of those of ``keys`` that are not at hand, "" of those that are not stored. Cost: of a look into each
        memory."""
        pending, tiers = self._writer.pending(keys), dict.fromkeys(self.store.missing(keys), "")
        for key in filterfalse(tiers.__contains__, self._live.missing(keys)):
            tiers[key] = self.store.tier(key)
        return {key: tier for key, tier in tiers.items() if key not in pending} if pending else tiers

    def delete(self, key: str) -> bool:
        """Remove ``key`` from the store and from the cache of decoded records."""
        pending = self._writer.delete(key)
        self._live.pop(key)
        self._refused.pop(key)
        return self.store.delete(key) or pending

    def _put(
        self,
        key: str,
        kind: str,
        header: Mapping[str, Any],
        body: Mapping[str, torch.Tensor] | bytes,
        bound: bool = True,
    ) -> bool:
        self.release_abandoned()
        meta = self._meta(key, kind, header, bound)
        if isinstance(body, bytes):
            return self._put_blob(key, codec.encode_bytes(body, meta))
        return self._put_blob(key, codec.encode_tensors(body, meta, checked=False))

    def _put_blob(self, key: str, blob: bytes) -> bool:
        self._live.pop(key)
        stored = self.store.put(key, blob)
        with self._lock:
            self.counters.refused += not stored
        if not stored:
            if key.startswith("source/"):
                self._refused.put(key, blob, len(blob))
            log.warning("the store, full or failing, refused %s (%d bytes)", key, len(blob), extra={"kind": self._lock})
        return stored

    def _get(
        self,
        key: str,
        kind: str,
        decode: Callable[[bytes], Entry[R]],
        same: Callable[[R, Mapping[str, Any]], bool] = lambda record, header: True,
        bound: bool = True,
        is_stored: bool = False,
    ) -> Entry[R] | None:
        pending = self._writer.get(key)
        cached = self._live.get(key) if pending is None else (cast("Entry[R]", pending), 0)
        # A record that left the store (deleted, expired, evicted) must not be served; the check also counts as a use.
        if cached is not None and pending is None and not is_stored and not self.store.contains(key):
            self._live.pop(key)
            cached = None
        match: Entry[R] | None = None
        if cached is not None:
            match, size = cached
        elif (blob := self.store.get(key)) is not None or (blob := self._refused.get(key)) is not None:
            match, size = self._decode(key, kind, blob, decode), len(blob)
        if match is not None:
            another = match[1].get("identity") != (self.identity if bound else "")
            if another or not same(*match):
                what = "another model" if another else "other content"
                log.warning("stored %s is of %s than asked for; taken as a miss", key, what)
                with self._lock:
                    self.counters.mismatched += 1
                match = None
        with self._lock:
            counted = self.counters.misses if match is None else self.counters.hits
            counted[key.partition("/")[0]] += 1
        if match is not None and cached is None:
            self._cache(key, match, size)
        return match

    def _cache(self, key: str, entry: Entry[Any], size: int) -> None:
        size += getattr(entry[0], "unpacked_nbytes", 0)
        if self._shares_bytes and key.startswith("span/") and not is_packed(entry[1]):
            self._live.put(key, (entry, size), 0)
            if self.store.tier(key) == _IN_PROCESS and self.store.contains(key):
                return  # until the store drops it
        self._live.put(key, (entry, size), size)

    def _decode(self, key: str, kind: str, blob: bytes, decode: Callable[[bytes], Entry[R]]) -> Entry[R] | None:
        try:
            record, header = decode(blob)
            if header.get("kind") != kind or header.get("key") != key:
                raise StoreCorrupt(f"it is a {header.get('kind')!r} record of {header.get('key')!r}"[:200])
            return record, header
        except _BasisGoneError as gone:
            log.warning("stored %s needs basis %s, which is gone; taken as a miss", key, gone)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            # The checksum may be right and the content still foreign; it is recomputed.
            log.warning("stored %s cannot be decoded and was deleted: %s", key, error)
            with self._lock:
                self.counters.corrupt += 1
            self.store.delete(key)
        return None


def _record(match: Entry[R] | None) -> R | None:
    return None if match is None else match[0]


class _BasisGoneError(LookupError):
    """The shared basis of a patch is no longer stored."""


def _key(key: str, *namespaces: str, any_namespace: bool = False) -> str:
    namespace, slash, _ = key.partition("/")
    if not slash:
        return f"{namespaces[0]}/{key}"
    if not any_namespace and namespace not in namespaces:
        raise ValueError(f"a key here must start with {' or '.join(n + '/' for n in namespaces)}, got {key!r}")
    return key
