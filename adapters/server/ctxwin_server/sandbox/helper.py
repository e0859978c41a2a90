"""Helper processes that read client input: one that takes too long or too much memory is killed, not the server.

A request is its size (``<Q``) and its bytes; an answer a status byte and a size (``<BQ``), then that many bytes. Temporary files
of a helper stand in a folder of its parent's (`Scratch`), so that a killed one leaves none.
"""

import contextlib
import fcntl
import itertools
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from ctxwin.errors import CtxwinError, EngineFailed

REQUEST = struct.Struct("<Q")
ANSWER = struct.Struct("<BQ")
DONE, REFUSED = 0, 1
_START_S = 60.0
"""Longest start: a busy machine imports for half a minute."""


_PREFIX = "ctxwin-scratch-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""A younger folder may not have its lock yet."""


def pack(head: Any, *blobs: bytes) -> list[bytes]:
    """Return JSON and bytes as parts of one request or answer."""
    return [json.dumps([head, *map(len, blobs)]).encode() + b"\n", *blobs]


def unpack(raw: bytes) -> tuple[Any, list[bytes]]:
    """Return what `pack` was given."""
    at = raw.index(b"\n") + 1
    head, *sizes = json.loads(raw[:at])
    ends = [*itertools.accumulate(sizes, initial=at)]
    return head, [raw[begin:end] for begin, end in itertools.pairwise(ends)]


class OutOfBounds(Exception):
    """A helper that was killed, or that ended, during one request."""


class Scratch:
    """A folder for the files of one helper process; its ``TMPDIR`` is `path`.

    It is locked while its owner lives, so that `sweep` can tell it from those of killed owners, in any container.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = self._folder / "files"
        self.path.mkdir(mode=0o700)

    def empty(self) -> None:
        """Remove the files that a job has left. Cost if there are none: listing the folder."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def sweep() -> int:
    """Remove this user's folders whose owners were killed; return how many."""
    count = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            if folder.is_symlink() or not folder.is_dir() or about.st_uid != os.geteuid():
                continue
            if _is_locked(folder, time.time() - about.st_mtime):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count


def _is_locked(folder: Path, age: float) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return age < _YOUNG_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


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
            variables = None if self._scratch is None else {**os.environ, "TMPDIR": str(self._scratch.path)}
            self._popen = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
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
        late = f"it took more than {seconds:g} s" if timed_out.is_set() else ""
        raise OutOfBounds(late or f"its process ended with {popen.wait()}")

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
