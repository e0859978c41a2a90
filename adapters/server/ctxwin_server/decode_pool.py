"""Pools of processes that decode files: a file that takes too long or too much memory ends its process, not the server."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, BinaryIO, cast

from ctxwin.errors import BadMedia, EngineFailed
from ctxwin_server.fair import FairPool
from ctxwin_server.media_decoder import ANSWER, DECODED, REQUEST, SIZE
from ctxwin_server.schemas import FORMATS
from ctxwin_server.scratch import Scratch

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.library.records import Passage


class _ProcessPool:
    """A few processes of one program, shared fairly by tenants and started on first use. Thread-safe.

    Args:
        program: module that is run; arguments: its command line.
        seconds: time limit of one file, after which its process is killed.
        count: number of processes; further files wait.
        shared: whether there are several tenants. Each then gets all processes but one at most, so that a file does not wait
            for another tenant's long one.
    """

    def __init__(self, program: str, arguments: Sequence[str], seconds: float, count: int, shared: bool) -> None:
        command = [sys.executable, "-m", program, *arguments]
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        each = max(1, count - 1) if shared else count
        self._turns = FairPool(count, each=each, name=program.rpartition(".")[2])
        self._closed = False
        for _ in range(count):
            self._idle.put(_Process(command, seconds))

    def ask(self, head: bytes, raw: bytes, tenant: str = "") -> tuple[int, bytes]:
        """Return status and bytes of one process's answer. Blocks until one is free and it is the tenant's turn.

        Raises BadMedia if the process ends first, EngineFailed if the server shuts down.
        """
        try:
            give_back = self._turns.reserve(tenant).result()
        except (CancelledError, RuntimeError) as error:
            raise EngineFailed("the server is shutting down; try another one") from error
        process = self._idle.get()
        try:
            return process.ask(head, raw)
        finally:
            if self._closed:
                process.kill()
            self._idle.put(process)
            give_back()

    def close(self) -> None:
        """End the processes; busy ones end after their file. Idempotent."""
        self._closed = True
        self._turns.shutdown()
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for process in idle:
            process.kill()
            self._idle.put(process)


class MediaDecoders(_ProcessPool):
    """Decodes pictures.

    Args:
        seconds: how long one picture may take.
        most_bytes: address space of one process.
        count, shared: processes, and whether there are several tenants.
    """

    def __init__(
        self, seconds: float, most_bytes: int, count: int = 2, formats: Sequence[str] = FORMATS, *, shared: bool = False
    ) -> None:
        super().__init__("ctxwin_server.media_decoder", [str(most_bytes), *formats], seconds, count, shared)

    def decode(self, raw: bytes, width: int, height: int, *, tenant: str = "") -> np.ndarray:
        """Return the pixels ``[H, W, 3]`` uint8 of an encoded picture, upright; raise BadMedia if it cannot be decoded in bounds.

        ``width`` and ``height`` are those of its header; the returned ones are swapped where its orientation says so.
        """
        import numpy as np

        status, payload = self.ask(REQUEST.pack(len(raw), width, height), raw, tenant)
        if status != DECODED:
            raise BadMedia(f"an image must be decodable, got {len(raw)} bytes: {payload.decode('utf-8', 'replace')}")
        width, height = SIZE.unpack_from(payload)
        return np.frombuffer(payload, np.uint8, offset=SIZE.size).reshape(height, width, 3)


class FileSplitters(_ProcessPool):
    """Splits files of libraries into passages (`ctxwin.library.files`); arguments as for `MediaDecoders`."""

    def __init__(self, seconds: float, most_bytes: int, count: int = 2, *, shared: bool = False) -> None:
        super().__init__("ctxwin_server.file_splitter", [str(most_bytes)], seconds, count, shared)

    def split(
        self, name: str, raw: bytes, caption: str = "", most_pixels: int = 64 << 20, *, tenant: str = ""
    ) -> list[Passage]:
        """Return the passages of a file, with their pixels; raise BadMedia if it cannot be split in bounds."""
        from ctxwin_server import file_splitter

        header = json.dumps({"name": name, "caption": caption, "most_pixels": most_pixels}).encode()
        status, payload = self.ask(file_splitter.REQUEST.pack(len(header), len(raw)) + header, raw, tenant)
        if status != DECODED:
            raise BadMedia(payload.decode("utf-8", "replace"))
        return file_splitter.unpack(payload)


class _Process:
    """A decoding process, started on demand and restarted after it was killed.

    Its temporary files are in a folder that is emptied after every file and removed with the process.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._popen: subprocess.Popen[bytes] | None = None
        self._scratch: Scratch | None = None

    def ask(self, head: bytes, raw: bytes) -> tuple[int, bytes]:
        """Return status and bytes of the answer; raise BadMedia if the process ends first or has to be killed."""
        seconds = self._seconds
        if self._popen is None:
            seconds += 30  # starting Python and importing Pillow takes a second and more on a busy machine
            try:
                self._scratch = Scratch()
                environment = {**os.environ, "TMPDIR": str(self._scratch.path)}
                self._popen = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
            except OSError as error:
                self.kill()
                raise EngineFailed(f"a process to decode files must be startable, got {error}") from error
        popen, timed_out = self._popen, threading.Event()
        stdin, stdout = cast(BinaryIO, popen.stdin), cast(BinaryIO, popen.stdout)

        def read(size: int) -> bytes:
            data = stdout.read(size)
            if len(data) < size:
                raise EOFError
            return data

        def end() -> None:
            timed_out.set()
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
            cause = "it took too long" if timed_out.is_set() else f"its decoder ended with {popen.returncode}"
            raise BadMedia(f"a file of {len(raw)} bytes must be decodable within bounds: {cause}") from None
        finally:
            timer.cancel()
            if self._scratch is not None:
                self._scratch.empty()

    def kill(self) -> None:
        """End the process. Idempotent."""
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
