"""Pools of processes that decode files: a file that takes too long or too much memory ends its process, not the server."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia, EngineFailed
from ctxwin.media import unpack_frames
from ctxwin_chats.bodies import FORMATS
from ctxwin_server.process.fair import FairPool
from ctxwin_server.sandbox.helper import DONE, Helper, OutOfBounds, pack, unpack

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.library.records import Passage

_PROGRAMS = "ctxwin_server.sandbox.decoders"
_HEADER_BYTES = 512 << 20


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
        super().__init__(_PROGRAMS, ["picture", str(most_bytes), *formats], seconds, count, shared)

    def decode(self, raw: bytes, width: int, height: int, *, tenant: str = "") -> np.ndarray:
        """Return the pixels ``[H, W, 3]`` uint8 of an encoded picture, upright; raise BadMedia if it cannot be decoded in bounds.

        ``width`` and ``height`` are those of its header; the returned ones are swapped where its orientation says so.
        """
        import numpy as np

        status, answer = self.ask(*pack((width, height), raw), tenant=tenant)
        if status != DONE:
            raise BadMedia(f"an image must be decodable, got {len(raw)} bytes: {answer.decode('utf-8', 'replace')}")
        (width, height), (pixels,) = unpack(answer)
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


class FileSplitters(ProcessPool):
    """Splits files of libraries into passages (`ctxwin.library.files`); arguments as for `MediaDecoders`."""

    def __init__(self, seconds: float, most_bytes: int, count: int = 2, *, shared: bool = False) -> None:
        super().__init__(_PROGRAMS, ["file", str(most_bytes)], seconds, count, shared)

    def split(
        self, name: str, raw: bytes, caption: str = "", most_pixels: int = 64 << 20, *, tenant: str = ""
    ) -> list[Passage]:
        """Return the passages of a file, with their pixels; raise BadMedia if it cannot be split in bounds."""
        from ctxwin.library.records import Passage

        status, answer = self.ask(*pack((name, caption, most_pixels), raw), tenant=tenant)
        if status != DONE:
            raise BadMedia(answer.decode("utf-8", "replace"))
        head, blobs = unpack(answer)
        frames, passages = iter(blobs), [Passage.model_validate(one) for one in head]

        def with_pixels(chunk: Chunk) -> Chunk:
            return chunk.holding({part.content: unpack_frames(next(frames)) for part in chunk.media})

        return [one.model_copy(update={"chunk": with_pixels(one.chunk)}) for one in passages]


class VideoHeaders(ProcessPool):
    """Reads the size of videos; each may take ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(_PROGRAMS, ["video", str(_HEADER_BYTES)], seconds, 1, False)

    def size(self, raw: bytes) -> tuple[int, int]:
        """Return width and height; raises BadMedia, with the reason, where vLLM's reader finds no video stream."""
        status, answer = self.ask(*pack(None, raw))
        if status != DONE:
            raise BadMedia(answer.decode("utf-8", "replace"))
        (width, height, reason), _ = unpack(answer)
        if min(width, height) <= 0:
            unread = f"a video must have a stream that this server can read, got {len(raw)} bytes without one"
            raise BadMedia(reason or unread)
        return width, height
