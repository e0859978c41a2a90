"""Files are decoded in processes of their own: one that takes too long or too much memory is killed, not the server."""

from __future__ import annotations

import contextlib
import json
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

    from ctxwin.library.records import Passage


class _Processes:
    """A few processes of one program, started when they are first needed. Thread-safe.

    Args:
        program: module that is run; arguments: what it is told.
        seconds: how long one file may take; its process is killed then.
        count: processes; further files wait.
    """

    def __init__(self, program: str, arguments: Sequence[str], seconds: float, count: int) -> None:
        command = [sys.executable, "-m", program, *arguments]
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._closed = False
        for _ in range(count):
            self._idle.put(_Process(command, seconds))

    def ask(self, head: bytes, raw: bytes) -> tuple[int, bytes]:
        """Status and bytes of one process's answer. Blocks until one is free."""
        process = self._idle.get()
        try:
            return process.ask(head, raw)
        finally:
            if self._closed:
                process.kill()
            self._idle.put(process)

    def close(self) -> None:
        """Ends the processes; those at work end after it. Idempotent."""
        self._closed = True
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for process in idle:
            process.kill()
            self._idle.put(process)


class Decoders(_Processes):
    """Decodes pictures.

    Args:
        seconds: how long one picture may take.
        most_bytes: address space of one process.
    """

    def __init__(self, seconds: float, most_bytes: int, count: int = 2, formats: Sequence[str] = FORMATS) -> None:
        super().__init__("ctxwin.serve.decoder", [str(most_bytes), *formats], seconds, count)

    def decode(self, raw: bytes, width: int, height: int) -> np.ndarray:
        """Pixels ``[height, width, 3]`` uint8 of an encoded picture; BadMedia where it cannot be decoded within bounds."""
        import numpy as np

        status, made = self.ask(REQUEST.pack(len(raw), width, height), raw)
        if status != DECODED:
            raise BadMedia(f"an image must be decodable, got {len(raw)} bytes: {made.decode('utf-8', 'replace')}")
        return np.frombuffer(made, np.uint8).reshape(height, width, 3)


class Cutters(_Processes):
    """Cuts files of libraries into passages (`ctxwin.library.files`); arguments as for `Decoders`."""

    def __init__(self, seconds: float, most_bytes: int, count: int = 1) -> None:
        super().__init__("ctxwin.serve.cutter", [str(most_bytes)], seconds, count)

    def cut(self, name: str, raw: bytes, caption: str = "", most_pixels: int = 64 << 20) -> list[Passage]:
        """The passages of a file, with their pixels; BadMedia where it cannot be cut within bounds."""
        from ctxwin.serve import cutter

        said = json.dumps({"name": name, "caption": caption, "most_pixels": most_pixels}).encode()
        status, made = self.ask(cutter.REQUEST.pack(len(said), len(raw)) + said, raw)
        if status != DECODED:
            raise BadMedia(made.decode("utf-8", "replace"))
        return cutter.unpack(made)


class _Process:
    """A decoding process that is started when it is asked, and again after it was killed."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._popen: subprocess.Popen[bytes] | None = None

    def ask(self, head: bytes, raw: bytes) -> tuple[int, bytes]:
        """Status and bytes of the answer; raises BadMedia where the process ends first, or has to be ended."""
        seconds = self._seconds
        if self._popen is None:
            seconds += 30  # starting Python and importing Pillow takes a second and more on a busy machine
            try:
                self._popen = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                raise EngineFailed(f"a process to decode files must be startable, got {error}") from error
        popen, late = self._popen, threading.Event()
        stdin, stdout = cast(BinaryIO, popen.stdin), cast(BinaryIO, popen.stdout)

        def read(size: int) -> bytes:
            made = stdout.read(size)
            if len(made) < size:
                raise EOFError
            return made

        def end() -> None:
            late.set()
            popen.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            stdin.write(head)
            stdin.write(raw)
            stdin.flush()
            status, size = ANSWER.unpack(read(ANSWER.size))
            return status, read(size)
        except BaseException as error:
            self.kill()
            if not isinstance(error, OSError | EOFError):
                raise
            why = "it took too long" if late.is_set() else f"its decoder ended with {popen.returncode}"
            raise BadMedia(f"a file of {len(raw)} bytes must be decodable within bounds: {why}") from None
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Ends the process. Idempotent."""
        popen, self._popen = self._popen, None
        if popen is not None:
            popen.kill()
            popen.wait()
            cast(BinaryIO, popen.stdout).close()
            with contextlib.suppress(OSError):  # what it has not read is written once more, to nobody
                cast(BinaryIO, popen.stdin).close()
