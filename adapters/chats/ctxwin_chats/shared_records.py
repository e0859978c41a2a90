"""Conversations in a store, so that another server, or this one's next process, takes them up.

All that is remembered of a conversation is one fenced record of the store (`ctxwin.store.base.Store.commit`), written behind the
answers. A server that is asked for a conversation of another one takes it over, and the former owner's writes are refused. No
answer depends on it: a record that is old, or lost, costs a forward.

A tenant has a fixed number of records. The name of a conversation tells its place among them, where it displaces another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Generic
from uuid import uuid4

from pydantic import TypeAdapter

from ctxwin.errors import StaleOwner
from ctxwin.hashing import digest
from ctxwin.store.base import Store
from ctxwin.store.memory import MemoryStore
from ctxwin.store.tiered import TieredStore
from ctxwin_chats.continuation import first_turn, turns_field
from ctxwin_chats.records import R, Records

WAIT_S = 0.002
"""Seconds that a request waits for the store; a record that comes later is there for the next request."""
MOST_BYTES = 4 << 20
"""Most bytes of a record, uncompressed."""
_FLUSH_S = 5.0
_FORMAT = 1
_THREADS = ThreadPoolExecutor(4, "ctxwin-conversations")
_log = logging.getLogger("ctxwin.serve")


@dataclass(frozen=True)
class SavedRecords(Generic[R]):
    """Records that are part of a conversation's, under the name ``kind``.

    Attributes:
        pack: returns the JSON of one, without the client's name; unpack: the record of such JSON, parsed.
    """

    kind: str
    records: Records[R]
    pack: Callable[[R], str]
    unpack: Callable[[dict[str, Any]], R]

    @classmethod
    def of(cls, kind: str, records: Records[R], record: type[R]) -> SavedRecords[R]:
        """Return them for a dataclass whose fields Pydantic can read again."""
        adapter, excluded = TypeAdapter(record), {"name", "record_name", "used"}
        return cls(
            kind,
            records,
            lambda one: adapter.dump_json(one, exclude=excluded).decode(),
            lambda data: adapter.validate_python({**data, "name": ""}),
        )


@dataclass(frozen=True)
class Reading:
    """A record that is being read: ``answered`` once the store has answered, ``ended`` once it is remembered here."""

    answered: Future[None] = field(default_factory=Future)
    ended: Future[None] = field(default_factory=Future)


class SharedConversations:
    """The conversations of one tenant, in a store. Thread-safe.

    Args:
        store: where they are written. One that ends with this process is not used.
        saved: what is remembered of them.
        places: how many conversations have a place in the store.
        ttl: seconds after which a record that was not written since counts for nothing, by the machines' clocks.
        count: called with what happened to a record: ``written``, ``taken_up``, ``fenced_off``, ``refused`` where the store has
            no room or it is too large, ``failed`` where the store does not answer or what it has cannot be read.
        wait_s: see `WAIT_S`.

    Attributes:
        has_store: the store outlives this process; nothing is written or read otherwise.
    """

    def __init__(
        self,
        store: Store,
        saved: Sequence[SavedRecords[Any]],
        places: int,
        ttl: float,
        count: Callable[[str], None] = lambda result: None,
        wait_s: float = WAIT_S,
    ) -> None:
        last = store.tiers[-1] if isinstance(store, TieredStore) else store
        self._store = None if isinstance(last, MemoryStore) else store
        self.has_store = self._store is not None
        self._writer = uuid4().hex
        self._saved, self._places, self._ttl, self._count, self._wait_s = saved, places, ttl, count, wait_s
        self._tokens: dict[str, int] = {}  # by place, of those that this process owns
        self._unsaved: dict[str, None] = {}  # names, the oldest first
        self._reading: dict[str, Reading] = {}
        self._writing: Future[None] | None = None
        self._is_failing = False
        self._lock = threading.Lock()

    async def open(self, name: str, data: Mapping[str, Any]) -> str:
        """Take over a conversation that this process does not own; see `WAIT_S`. Return its name here, "" where it has none.

        Args:
            name: that the client gives it; otherwise it is known by its first turn.
            data: a request's body.
        """
        if self._store is None:
            return ""
        # Not by `_THREADS`, all of which may wait for a store.
        name = name or await asyncio.to_thread(first_turn, data.get(turns_field(data)))
        if (reading := self.begin(name)) is not None:
            await asyncio.wait([asyncio.wrap_future(reading.answered)], timeout=self._wait_s)
            if reading.answered.done():  # what is there is read to its end: some 0.1 ms a segment
                # A request that is cancelled meanwhile must not cancel what others wait for.
                await asyncio.shield(asyncio.wrap_future(reading.ended))
        return name

    def begin(self, name: str) -> Reading | None:
        """Begin to read what the store has of a conversation; None where this process has it already."""
        store = self._store
        if not name or store is None:
            return None
        is_known = self._place(name) in self._tokens and any(one.records.find_saved(name) for one in self._saved)
        if is_known and not store.shared:
            return None
        with self._lock:
            if self._store is not None and name not in self._reading:
                reading = self._reading[name] = Reading()
                _THREADS.submit(self._read, store, name, is_known, reading)
            return self._reading.get(name)

    def save(self, name: str) -> None:
        """Have a conversation written as it is by then. Returns at once."""
        with self._lock:
            if not name or self._store is None:
                return
            self._unsaved[name] = None
            if len(self._unsaved) > self._places:
                del self._unsaved[next(iter(self._unsaved))]
                self._count("failed")
            if self._writing is None:
                self._writing = _THREADS.submit(self._write_all, self._store)

    def flush(self, seconds: float = _FLUSH_S) -> None:
        """Wait until nothing is being read or written, for so many seconds at most."""
        with self._lock:
            pending = [
                *(reading.ended for reading in self._reading.values()),
                *([self._writing] if self._writing is not None else []),
            ]
        wait_for(pending, seconds)

    def close(self) -> None:
        """Write what is not written yet, unless that takes long; nothing is read or written from then on. Idempotent."""
        self.flush()
        with self._lock:
            self._store = None

    def _place(self, name: str) -> str:
        place = int(digest("shelf", name)[:12], 16) % self._places
        return f"conversation/{digest('place', self._places, place)}"

    def _read(self, store: Store, name: str, is_known: bool, reading: Reading) -> None:
        """Take a conversation over, unless this process owns it still."""
        place = self._place(name)
        try:
            is_current = is_known and store.token(place) <= self._tokens.get(place, 0)
            claimed = None if is_current else store.claim(place)
            reading.answered.set_result(None)
            if claimed is not None:
                self._tokens[place] = claimed[0]
                self._take_up(name, claimed[1])
            elif not is_current:
                self._tokens.pop(place, None)
        except Exception as error:  # the request is computed
            self._fail(f"the record of a conversation was not read ({error})")
        finally:
            with self._lock:
                del self._reading[name]
            if not reading.answered.done():
                reading.answered.set_result(None)
            reading.ended.set_result(None)

    def _take_up(self, name: str, raw: bytes) -> None:
        """Put what a record holds in place of what is remembered here. Raises ValueError for one that cannot be read."""
        record = json.loads(zlib.decompressobj().decompress(raw, MOST_BYTES))
        is_its = record["format"] == _FORMAT and record["shelf"] == digest("shelf", name)
        if not is_its or record["written"] + self._ttl < time.time():
            return
        # What this process wrote itself is older than what it remembers: a request came before the write had ended.
        if record["writer"] == self._writer and any(one.records.find_saved(name) for one in self._saved):
            return
        loaded = [[(named, one.unpack(data)) for named, data in record["records"][one.kind]] for one in self._saved]
        for one, records in zip(self._saved, loaded, strict=True):
            for named, each in records:
                each.name, each.record_name = name if named else "", name
            one.records.replace_saved(name, [each for _, each in records])
        self._count("taken_up")

    def _write_all(self, store: Store) -> None:
        while True:
            with self._lock:
                name = next(iter(self._unsaved), None)
                if name is None:
                    self._writing = None
                    return
                del self._unsaved[name]
            try:
                self._write(store, name)
                self._is_failing = False
            except Exception as error:  # behind an answer: nobody waits for it
                self._fail(f"a conversation was not written to the store ({error}); its next server computes it anew")

    def _write(self, store: Store, name: str) -> None:
        place = self._place(name)
        kinds = []
        for one in self._saved:
            packed = (f"[{json.dumps(bool(each.name))},{one.pack(each)}]" for each in one.records.find_saved(name))
            kinds.append(f'"{one.kind}":[{",".join(packed)}]')
        head = json.dumps(
            {"format": _FORMAT, "shelf": digest("shelf", name), "written": time.time(), "writer": self._writer}
        )
        plain = f'{head[:-1]},"records":{{{",".join(kinds)}}}}}'.encode()
        raw = zlib.compress(plain, 1)
        token = self._tokens.get(place)
        try:
            is_stored = len(plain) <= MOST_BYTES and store.commit(place, raw, token or 1)
            # A new record of two servers would have one token for both.
            claimed = store.claim(place) if is_stored and token is None else None
            if claimed is not None:
                self._tokens[place] = claimed[0]
        except StaleOwner:
            if self._tokens.get(place) == token:  # else it was taken back meanwhile
                self._tokens.pop(place, None)
            self._count("fenced_off")
            return
        self._count("written" if is_stored else "refused")

    def _fail(self, message: str) -> None:
        """Count a failure, and log the first of several."""
        self._count("failed")
        _log.log(logging.DEBUG if self._is_failing else logging.WARNING, "%s", message)
        self._is_failing = True
