"""The base of stores whose records lie outside this process, each under a seal."""

from abc import abstractmethod

from ctxwin.store.base import Store, Tally, check_key


class SealedStore(Store):
    """Reads records one by one; a failed read, counted in ``failures``, is neither a good record nor a corrupt one."""

    failures: int
    _tally: Tally

    @abstractmethod
    def _read(self, key: str, *, use: bool = False) -> bytes | None:
        """Return the value of an undamaged record. ``use``: it counts as used, at least then."""

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
