"""The audit log: who stored, exported, shared and deleted what, as lines of JSON in a file of bounded size, without content."""

import fcntl
import json
import logging
import os
import stat
import time
from logging.handlers import RotatingFileHandler
from typing import Any

RECORDED = {
    "append": "store", "extend": "store", "insert": "store", "remember": "store",
    "retrieve": "store", "fork": "share", "adopt": "share",
    "snapshot": "export",
}  # fmt: skip
"""Operations on windows that are recorded, and the action of each; ``evict`` is recorded where it forgets."""
_BYTES, _FILES = 64 << 20, 4
_log = logging.getLogger("ctxwin.serve")


class AuditLog:
    """Append-only log in ``path``, readable by its owner only. Past 64 MiB it rotates; four old files are kept.

    A failed write is logged as an error and does not fail the request. Thread-safe. Raises OSError at once for a path that
    cannot be written at all. "" records nothing.
    """

    def __init__(self, path: str = "", most_bytes: int = _BYTES) -> None:
        self._file = _Private(path, maxBytes=most_bytes, backupCount=_FILES, encoding="utf-8") if path else None

    def record(self, tenant: str, client: str, action: str, **details: Any) -> None:
        """Write one line: time, tenant, client address, action and its details."""
        if self._file is None:
            return
        entry = {"time": round(time.time(), 3), "tenant": tenant, "client": client, "action": action, **details}
        line = json.dumps(entry, ensure_ascii=True)
        self._file.handle(logging.LogRecord("ctxwin.audit", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class _Private(RotatingFileHandler):
    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=_open_private)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        _log.exception("the audit log %s could not be written", self.baseFilename)


def _open_private(path: str, flags: int) -> int:
    """Open a file that is its owner's and this process's alone from then on, also if it was there; a device stays as it is."""
    file = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another server would rotate away what this one writes
    return file
