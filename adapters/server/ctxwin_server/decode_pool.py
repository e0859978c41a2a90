"""Pools of processes that decode files: a file that takes too long or too much memory ends its process, not the server."""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from ctxwin.errors import BadMedia, EngineFailed
from ctxwin_server import file_splitter
from ctxwin_server.fair import FairPool
from ctxwin_server.helper import DONE, Helper, OutOfBounds
from ctxwin_server.media_decoder import SIZE
from ctxwin_server.schemas import FORMATS

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.library.records import Passage


class ProcessPool:
    """A few processes of one program, shared fairly by tenants and started on first use. Thread-safe.

    Args:
        program: module that is run; arguments: its command line.
        seconds: time limit of one file, after which its process is killed.
        count: number of processes; further files wait.
        shared: whether there are several tenants. Each then gets all processes but one at most, so that a file does not wait
            for another tenant's long one.
    """

    def __init__(self, program: str, arguments: Sequence[str], seconds: float, count: int, shared: bool) -> None:
        self._idle: queue.LifoQueue[Helper] = queue.LifoQueue()
        each = max(1, count - 1) if shared else count
        self._turns = FairPool(count, each=each, name=program.rpartition(".")[2])
        self._closed = False
        for _ in range(count):
            self._idle.put(Helper(program, arguments, seconds, writes_files=True))

    def ask(self, *parts: bytes, tenant: str = "") -> tuple[int, bytes]:
        """Return status and bytes of one process's answer. Blocks until one is free and it is the tenant's turn.

        Raises BadMedia if the process ends first, EngineFailed if the server shuts down.
        """
        try:
            give_back = self._turns.reserve(tenant).result()
        except (CancelledError, RuntimeError) as error:
            raise EngineFailed("the server is shutting down; try another one") from error
        helper = self._idle.get()
        try:
            return helper.ask(*parts)
        except OutOfBounds as error:
            size = len(parts[-1])
            raise BadMedia(f"a file of {size} bytes must be decodable within bounds: {error}") from None
        finally:
            if self._closed:
                helper.close()
            self._idle.put(helper)
            give_back()

    def close(self) -> None:
        """End the processes; busy ones end after their file. Idempotent."""
        self._closed = True
        self._turns.shutdown()
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for helper in idle:
            helper.close()
            self._idle.put(helper)


class MediaDecoders(ProcessPool):
    """Decodes pictures.

    Args:
        seconds: how long one picture may take.
        most_bytes: memory that one picture may take.
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

        status, payload = self.ask(SIZE.pack(width, height), raw, tenant=tenant)
        if status != DONE:
            raise BadMedia(f"an image must be decodable, got {len(raw)} bytes: {payload.decode('utf-8', 'replace')}")
        width, height = SIZE.unpack_from(payload)
        return np.frombuffer(payload, np.uint8, offset=SIZE.size).reshape(height, width, 3)


class FileSplitters(ProcessPool):
    """Splits files of libraries into passages (`ctxwin.library.files`); arguments as for `MediaDecoders`."""

    def __init__(self, seconds: float, most_bytes: int, count: int = 2, *, shared: bool = False) -> None:
        super().__init__("ctxwin_server.file_splitter", [str(most_bytes)], seconds, count, shared)

    def split(
        self, name: str, raw: bytes, caption: str = "", most_pixels: int = 64 << 20, *, tenant: str = ""
    ) -> list[Passage]:
        """Return the passages of a file, with their pixels; raise BadMedia if it cannot be split in bounds."""
        header = json.dumps({"name": name, "caption": caption, "most_pixels": most_pixels}).encode()
        status, payload = self.ask(file_splitter.HEADER.pack(len(header)), header, raw, tenant=tenant)
        if status != DONE:
            raise BadMedia(payload.decode("utf-8", "replace"))
        return file_splitter.unpack(payload)
