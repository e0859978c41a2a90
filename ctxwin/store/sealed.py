"""The base of stores whose records lie outside this process, each under a seal."""

import logging
from abc import abstractmethod
from typing import Any

from ctxwin.errors import StoreCorrupt
from ctxwin.store.base import LeaseCounts, Store, check_key, check_limits
from ctxwin.store.codec import ForeignRecordError, Seal

log = logging.getLogger(__name__)


class SealedStore(Store):
    """Reads records one by one; a failed read, counted in ``failures``, is neither a good record nor a corrupt one."""

    name: str

    def __init__(self, max_bytes: int, ttl: float | None, secret: bytes | None) -> None:
        check_limits(max_bytes, ttl)
        self.max_bytes, self.ttl, self.failures = max_bytes, ttl, 0
        self._seal, self._tally = Seal(secret), LeaseCounts()

    @abstractmethod
    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        """Return the value of an undamaged record. ``use``: it counts as used, at least then."""

    @abstractmethod
    def _remove(self, key: str, record: Any) -> bool:
        """Remove ``record`` of ``key``, as `_reject` was given it. Returns False where it stays, or another one stands there."""

    def _open(self, key: str, record: bytes) -> bytes | None:
        """Return the value of a record; None of one that is foreign, which stays, or corrupt."""
        try:
            return self._seal.open(key, record)
        except ForeignRecordError as error:
            self._pass_over(key, error)
        except StoreCorrupt as error:
            self._reject(key, record, error)
        return None

    def _pass_over(self, key: str, error: ForeignRecordError) -> None:
        self._tally.count("foreign")
        log.warning("stored record %s in %s is not read, and stays: %s", key, self.name, error)

    def _reject(self, key: str, record: Any, error: Exception) -> None:
        self._tally.count("corrupt")
        deleted = " and was deleted" if self._remove(key, record) else ""
        log.warning("stored record %s in %s is corrupt%s: %s", key, self.name, deleted, error)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None. Cost: a read of the record, one SHA-256 (about 1 GB/s)."""
        value = self._read(check_key(key), use=True)
        self._tally.count("misses" if value is None else "hits")
        return value

    def verify(self) -> tuple[int, int]:
        """Read every record; return (good, corrupt), missing values included. Corrupt ones are deleted, foreign ones stay."""
        good = corrupt = 0
        for key in self.list():
            passed_over = self.failures + self._tally["foreign"]
            if self._read(key) is not None:
                good += 1
            elif self.failures + self._tally["foreign"] == passed_over:
                corrupt += 1
        return good, corrupt
