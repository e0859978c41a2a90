"""Pictures are decoded in processes of their own: one that takes too long or too much memory is killed, not the server."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, cast

from ctxwin.errors import BadMedia, EngineFailed
from ctxwin.serve.decoder import ANSWER, DECODED, REQUEST
from ctxwin.serve.specs import FORMATS

if TYPE_CHECKING:
    import numpy as np


class Decoders:
    """A few decoding processes, started when they are first needed. Thread-safe.

    Args:
        seconds: how long one picture may take; its process is killed then.
        most_bytes: address space of one process.
        count: processes; further pictures wait.
    """

    def __init__(self, seconds: float, most_bytes: int, count: int = 2, formats: Sequence[str] = FORMATS) -> None:
        self._seconds = seconds
        self._command = [sys.executable, "-m", "ctxwin.serve.decoder", str(most_bytes), *formats]
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # None: one that has not been started
        self._closed = False
        for _ in range(count):
            self._idle.put(None)

    def decode(self, raw: bytes, width: int, height: int) -> np.ndarray:
        """Pixels ``[height, width, 3]`` uint8 of an encoded picture; BadMedia where it cannot be decoded within bounds.

        Blocks until a process is free.
        """
        import numpy as np

        process = self._idle.get()
        try:
            if process is None:
                process = _Process(self._command)
            status, made = process.ask(REQUEST.pack(len(raw), width, height), raw, self._seconds)
        except _DiedError as error:
            process = None
            raise BadMedia(f"a picture of {len(raw)} bytes must be decodable within bounds: {error}") from None
        except BaseException:
            if process is not None:
                process.kill()
                process = None
            raise
        finally:
            if self._closed and process is not None:
                process.kill()
                process = None
            self._idle.put(process)
        if status != DECODED:
            raise BadMedia(f"an image must be decodable, got {len(raw)} bytes: {made.decode('utf-8', 'replace')}")
        return np.frombuffer(made, np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        """Ends the processes; those at work end after it. Idempotent."""
        self._closed = True
        idle = []
        while True:
            try:
                idle.append(self._idle.get_nowait())
            except queue.Empty:
                break
        for process in idle:
            if process is not None:
                process.kill()
            self._idle.put(None)


class _DiedError(Exception):
    """The process ended, or had to be ended, before it answered."""


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise EngineFailed(f"a process to decode pictures must be startable, got {error}") from error
        self._stdin = cast(BinaryIO, self._popen.stdin)
        self._stdout = cast(BinaryIO, self._popen.stdout)
        self._warm = False

    def ask(self, head: bytes, raw: bytes, seconds: float) -> tuple[int, bytes]:
        late = threading.Event()

        def end() -> None:
            late.set()
            self._popen.kill()

        # Starting Python and importing Pillow takes a second and more on a busy machine.
        timer = threading.Timer(seconds + (0 if self._warm else 30), end)
        timer.daemon = True
        timer.start()
        try:
            self._stdin.write(head)
            self._stdin.write(raw)
            self._stdin.flush()
            status, size = ANSWER.unpack(self._read(ANSWER.size))
            self._warm = True
            return status, self._read(size)
        except (OSError, EOFError):
            raise self._died(late) from None
        finally:
            timer.cancel()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._stdout.close()
        with contextlib.suppress(OSError):  # what it has not read is written once more, to nobody
            self._stdin.close()

    def _read(self, size: int) -> bytes:
        made = self._stdout.read(size)
        if len(made) < size:
            raise EOFError
        return made

    def _died(self, late: threading.Event) -> _DiedError:
        self.kill()
        return _DiedError("it took too long" if late.is_set() else f"its decoder ended with {self._popen.returncode}")
