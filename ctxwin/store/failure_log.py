"""Loggers that report a failure which repeats once a minute: a full disk refuses every record of a stream."""

import logging
import threading
import time

from ctxwin.store.lru import LRUCache

_PAUSE_S = 60.0
_KINDS = 1024  # that are remembered


class _OncePerMinute(logging.Filter):
    """Passes the first record of each ``kind`` (given as ``extra={"kind": ...}``) in a minute; the next one says how many it
    stands for. Records without a kind pass."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: LRUCache[tuple[float, int]] = LRUCache(_KINDS)  # when the next one passes, and how many did not

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, "kind", None)
        if kind is None:
            return True
        with self._lock:
            due, dropped = self._kinds.get(kind) or (0.0, 0)
            now = time.monotonic()
            passes = now >= due
            self._kinds.put(kind, (now + _PAUSE_S, 0) if passes else (due, dropped + 1), 1)
        if passes and dropped:
            record.msg = f"{record.msg} (and {dropped} more like it)"
        return passes


def failure_logger(name: str) -> logging.Logger:
    """Return the logger ``name``, which takes ``extra={"kind": ...}`` of failures that repeat."""
    logger = logging.getLogger(name)
    if not any(isinstance(f, _OncePerMinute) for f in logger.filters):
        logger.addFilter(_OncePerMinute())
    return logger
