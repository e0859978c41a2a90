"""Who stored, took out, shared and deleted what: lines of JSON in a file of bounded size, without any content."""

from __future__ import annotations

import json
import logging
import os
import time
from logging.handlers import RotatingFileHandler
from typing import Any

RECORDED = {
    "append": "store", "extend": "store", "insert": "store", "remember": "store",
    "retrieve": "store", "fork": "share", "adopt": "share",
    "snapshot": "export",
}  # fmt: skip
"""Operations on windows that are recorded, and as what; ``evict`` is one where it forgets."""
_BYTES, _FILES = 64 << 20, 4
_log = logging.getLogger("ctxwin.serve")


class AuditLog:
    """An append-only log in ``path``, readable by its owner; past 64 MiB it goes on in a new file, and four old ones stay.

    What cannot be written is an error in the server's log; the request goes on. Thread-safe. Raises OSError at once for a
    path that cannot be written at all. "" records nothing.
    """

    def __init__(self, path: str = "", most_bytes: int = _BYTES) -> None:
        self._file = _Private(path, maxBytes=most_bytes, backupCount=_FILES, encoding="utf-8") if path else None

    def record(self, tenant: str, client: str, action: str, **said: Any) -> None:
        """One line: when, whose key, from where, what was done and to what."""
        if self._file is None:
            return
        told = {"time": round(time.time(), 3), "tenant": tenant, "client": client, "action": action, **said}
        line = json.dumps(told, ensure_ascii=True)
        self._file.handle(logging.LogRecord("ctxwin.audit", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


class _Private(RotatingFileHandler):
    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=lambda p, f: os.open(p, f, 0o600))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        _log.exception("the audit log %s could not be written", self.baseFilename)
