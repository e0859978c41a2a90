"""Helper processes that read client input: one that takes too long or too much memory is killed, not the server.

A request is its size (``<Q``) and its bytes; an answer a status byte and a size (``<BQ``), then that many bytes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from ctxwin.errors import CtxwinError, EngineFailed
from ctxwin_server.scratch import Scratch

REQUEST = struct.Struct("<Q")
ANSWER = struct.Struct("<BQ")
DONE, REFUSED = 0, 1
_START_S = 60.0
"""Longest start: a busy machine imports for half a minute."""


class OutOfBounds(Exception):
    """A helper that was killed, or that ended, during one request."""


class Helper:
    """One process of ``python -m program arguments``, started when it is first asked, and again after it was killed.

    Thread-safe: one request at a time.

    Args:
        seconds: processor and wall time that one request may take.
        writes_files: gives it a folder for temporary files, which is emptied after each request and removed with the process.
    """

    def __init__(self, program: str, arguments: Sequence[str], seconds: float, *, writes_files: bool = False) -> None:
        self._command = [sys.executable, "-m", program, *arguments]
        self._seconds = seconds
        self._writes_files = writes_files
        self._popen: subprocess.Popen[bytes] | None = None
        self._scratch: Scratch | None = None
        self._turn = threading.Lock()
        self._closed = False

    def ask(self, *parts: bytes) -> tuple[int, bytes]:
        """Return status and bytes of the answer to a request, which may be in parts. Blocks.

        Raises:
            OutOfBounds: it took too long, or the process ended. EngineFailed: no process can be started.
        """
        with self._turn:
            if self._popen is None:
                self._start()
            try:
                return self._exchange(parts, self._seconds)
            except BaseException:
                self._kill()
                raise
            finally:
                if self._scratch is not None:
                    self._scratch.empty()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        if self._popen is not None:
            self._popen.kill()  # a request in progress fails
        with self._turn:
            self._kill()

    def _start(self) -> None:
        if self._closed:
            raise EngineFailed("the server is shutting down; try another one")
        try:
            self._scratch = Scratch() if self._writes_files else None
            environment = None if self._scratch is None else {**os.environ, "TMPDIR": str(self._scratch.path)}
            self._popen = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        except OSError as error:
            self._kill()
            raise EngineFailed(f"a process that reads requests must be startable, got {error}") from error
        try:
            self._exchange((), _START_S)  # an empty request is answered once everything is imported
        except OutOfBounds as error:
            self._kill()
            raise EngineFailed(f"a process that reads requests must start, got: {error}") from error

    def _exchange(self, parts: Sequence[bytes], seconds: float) -> tuple[int, bytes]:
        popen, timed_out = self._popen, threading.Event()
        assert popen is not None
        stdin, stdout = cast(BinaryIO, popen.stdin), cast(BinaryIO, popen.stdout)

        def end() -> None:
            timed_out.set()
            popen.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            for part in (REQUEST.pack(sum(map(len, parts))), *parts):
                stdin.write(part)
            stdin.flush()
            head = stdout.read(ANSWER.size)
            status, size = ANSWER.unpack(head) if len(head) == ANSWER.size else (REFUSED, -1)
            answer = stdout.read(size) if size >= 0 else b""
            if len(answer) == size:
                return int(status), answer
        except OSError:
            pass  # it has ended
        finally:
            timer.cancel()
        raise OutOfBounds(
            f"it took more than {seconds:g} s" if timed_out.is_set() else f"its process ended with {popen.wait()}"
        )

    def _kill(self) -> None:
        popen, self._popen = self._popen, None
        if popen is not None:
            popen.kill()
            popen.wait()
            cast(BinaryIO, popen.stdout).close()
            with contextlib.suppress(OSError):  # closing flushes unread input to the ended process
                cast(BinaryIO, popen.stdin).close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.remove()


def serve(answer: Callable[[bytes], bytes], most_bytes: int) -> None:
    """Answer requests from stdin until it ends, with at most ``most_bytes`` more memory than now; for a program's ``main``."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries is not an answer
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + most_bytes, mapped + most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(15)  # answers of other requests have priority
    while head := source.read(REQUEST.size):
        raw = source.read(*REQUEST.unpack(head))
        try:
            status, result = DONE, answer(raw) if raw else b""
        except Exception as error:  # libraries raise anything on malformed input, MemoryError included
            name = "" if isinstance(error, CtxwinError) else f"{type(error).__name__}: "
            status, result = REFUSED, f"{name}{error}"[:2000].encode("utf-8", "replace")
        sink.write(ANSWER.pack(status, len(result)) + result)
        sink.flush()
