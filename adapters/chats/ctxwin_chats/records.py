"""What conversations were served last: records by name and content, bounded in number, bytes and age."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PER_NAME = 8
"""Most conversations of one name that are remembered."""


@dataclass(eq=False, kw_only=True)
class Record:
    """What is remembered of one conversation.

    Attributes:
        key: equal for requests that may be of the conversation.
        name: the client's name of it.
        size: its bytes, by estimate.
        record_name: its conversation's name in a store (`ctxwin_chats.shared_records`); "" where it is not saved.
    """

    key: str
    name: str
    size: int
    used: float = field(default_factory=time.monotonic)
    record_name: str = ""


R = TypeVar("R", bound=Record)


class Records(Generic[R]):
    """The records of one tenant. Thread-safe.

    Args:
        most: conversations that are remembered; the one idle longest is forgotten first, as is one idle for ``ttl`` seconds.
        most_bytes: of all records together.
    """

    def __init__(self, most: int, ttl: float, most_bytes: int = 256 << 20) -> None:
        self._most, self._ttl, self._most_bytes = most, ttl, most_bytes
        self._records: OrderedDict[int, R] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def forgotten(self, record: R) -> None:
        """Do nothing; a subclass may react to a record that is forgotten. Called with the lock held."""

    def forget(self, name: str) -> None:
        """Forget all conversations of a name."""
        with self._lock:
            self._drop([key for key, record in self._records.items() if record.name == name])

    def find(self, key: str) -> list[R]:
        """Return the records with a key, the most recently used last."""
        with self._lock:
            now = time.monotonic()
            self._drop([k for k, record in self._records.items() if now - record.used > self._ttl])
            return [record for record in self._records.values() if record.key == key]

    def find_saved(self, record_name: str) -> list[R]:
        """Return the records of a saved conversation, the most recently used last."""
        with self._lock:
            return [record for record in self._records.values() if record.record_name == record_name]

    def replace_saved(self, record_name: str, records: Sequence[R]) -> None:
        """Remember ``records`` in place of those of a saved conversation."""
        with self._lock:
            self._drop([key for key, record in self._records.items() if record.record_name == record_name])
        for record in records:
            self.keep(None, record)

    def keep(self, old: R | None, record: R) -> None:
        """Remember ``record`` in place of ``old``, and forget what exceeds a bound, of the same name first."""
        with self._lock:
            self._records.pop(id(old), None)
            self._records[id(record)] = record
            alike = [key for key, other in self._records.items() if record.name and other.name == record.name]
            self._drop(alike[:-PER_NAME])
            total = sum(other.size for other in self._records.values())
            while self._records and (len(self._records) > self._most or total > self._most_bytes):
                key, oldest = next(iter(self._records.items()))
                total -= oldest.size
                self._drop([key])

    def _drop(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.forgotten(self._records.pop(key))
