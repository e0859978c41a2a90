"""Pools of processes that decode files: a file that takes too long or too much memory ends its process, not the server."""

from __future__ import annotations

import contextlib
import queue
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, ClassVar

from ctxwin.chunk import Chunk
from ctxwin.errors import BadMedia, EngineFailed
from ctxwin.media import unpack_frames
from ctxwin_server.process.fair import FairPool
from ctxwin_server.sandbox.helper import DONE, Helper, OutOfBounds, pack, unpack

if TYPE_CHECKING:
    import numpy as np

    from ctxwin.library.records import Passage


class ProcessPool:
    """A few processes of one program, shared fairly by tenants and started on first use. Thread-safe.

    Args:
        seconds: time limit of one file, after which its process is killed.
        most_bytes: memory that one file may take.
        count: number of processes; further files wait.
        shared: whether there are several tenants. Each then gets all processes but one at most, so that a file does not wait
            for another tenant's long one.
    """

    module: ClassVar[str] = "ctxwin_server.sandbox.decoders"
    program: ClassVar[str]
    """What `module` is run for."""

    def __init__(self, seconds: float, most_bytes: int, count: int = 2, *, shared: bool = False) -> None:
        self._idle: queue.LifoQueue[Helper] = queue.LifoQueue()
        each = max(1, count - 1) if shared else count
        self._turns = FairPool(count, each=each, name=self.program)
        self._closed = False
        for _ in range(count):
            self._idle.put(Helper(self.module, [self.program, str(most_bytes)], seconds, writes_files=True))

    def ask(self, head: Any, raw: bytes, tenant: str = "", refusal: str = "") -> tuple[Any, list[bytes]]:
        """Return head and bytes of one process's answer about a file. Blocks until one is free and it is the tenant's turn.

        Raises BadMedia, with its reason after ``refusal``, if the process refuses the file or ends first, EngineFailed if the
        server shuts down.
        """
        try:
            give_back = self._turns.reserve(tenant).result()
        except (CancelledError, RuntimeError) as error:
            raise EngineFailed("the server is shutting down; try another one") from error
        helper = self._idle.get()
        try:
            status, answer = helper.ask(*pack(head, raw))
        except OutOfBounds as error:
            raise BadMedia(f"a file of {len(raw)} bytes must be decodable within bounds: {error}") from None
        finally:
            if self._closed:
                helper.close()
            self._idle.put(helper)
            give_back()
        if status != DONE:
            raise BadMedia(refusal + answer.decode("utf-8", "replace"))
        return unpack(answer)

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
    """Decodes pictures."""

    program = "picture"

    def decode(self, raw: bytes, width: int, height: int, *, tenant: str = "") -> np.ndarray:
        """Return the pixels ``[H, W, 3]`` uint8 of an encoded picture, upright; raise BadMedia if it cannot be decoded in bounds.

        ``width`` and ``height`` are those of its header; the returned ones are swapped where its orientation says so.
        """
        import numpy as np

        refusal = f"an image must be decodable, got {len(raw)} bytes: "
        (width, height), (pixels,) = self.ask((width, height), raw, tenant, refusal)
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


class FileSplitters(ProcessPool):
    """Splits files of libraries into passages (`ctxwin.library.files`)."""

    program = "file"

    def split(
        self, name: str, raw: bytes, caption: str = "", most_pixels: int = 64 << 20, *, tenant: str = ""
    ) -> list[Passage]:
        """Return the passages of a file, with their pixels; raise BadMedia if it cannot be split in bounds."""
        from ctxwin.library.records import Passage

        head, blobs = self.ask((name, caption, most_pixels), raw, tenant)
        frames, passages = iter(blobs), [Passage.model_validate(one) for one in head]

        def with_pixels(chunk: Chunk) -> Chunk:
            return chunk.holding({part.content: unpack_frames(next(frames)) for part in chunk.media})

        return [one.model_copy(update={"chunk": with_pixels(one.chunk)}) for one in passages]


class VideoHeaders(ProcessPool):
    """Reads the size of videos."""

    program = "video"

    def size(self, raw: bytes) -> tuple[int, int]:
        """Return width and height; raises BadMedia, with the reason, where vLLM's reader finds no video stream."""
        (width, height, reason), _ = self.ask(None, raw)
        if min(width, height) <= 0:
            unread = f"a video must have a stream that this server can read, got {len(raw)} bytes without one"
            raise BadMedia(reason or unread)
        return width, height
