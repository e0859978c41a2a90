"""Vision embeddings as files in one folder: what the encoder-cache connector loads and saves.

A file is a checked blob of the store's codec (`ctxwin.store.codec`) with one tensor, ``embeddings [tokens, width]``, in
the form vLLM's encoder cache holds: ``width`` is the model's hidden size, times 1 + D for a deepstack model with D
injected layers. Nothing here imports vLLM, so a client can write files before any engine runs.

A file that cannot be used (not there, corrupt, of another model or shape) counts as not there.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ctxwin.engines.vllm.lifecycle.folders import write_file
from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec

if TYPE_CHECKING:
    import torch

_TENSOR = "embeddings"
_MOST = 4096
"""Files of no use are remembered as such, too."""
_log = logging.getLogger("ctxwin.engines")


def name_of(identifier: str) -> str:
    """The name of the embeddings that a multimodal identifier stands for: what precedes its first ``@``.

    What follows tells vLLM's prefix cache where the media stands (``<name>@<provenance>``); it changes the KV of its
    tokens and not its embeddings.
    """
    return identifier.partition("@")[0]


def file_name(name: str) -> str:
    """The file of embeddings called ``name``: any text is safe, it is hashed."""
    return f"embed-{hashlib.sha256(name.encode()).hexdigest()}"


def encode(embeddings: torch.Tensor, identity: str = "") -> bytes:
    """The content of a file.

    Args:
        embeddings: ``[tokens, width]`` on any device, in the dtype the model computes in.
        identity: digest of what makes embeddings of this model interchangeable; compared on a read.
    """
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be [tokens, width], got {list(embeddings.shape)}")
    return codec.encode_tensors({_TENSOR: embeddings}, {"identity": identity})


def decode(blob: bytes, identity: str = "") -> torch.Tensor:
    """The embeddings of a file, read-only. Raises StoreCorrupt, for another model's too. Cost: one SHA-256."""
    tensors, meta = codec.decode_tensors(blob)
    found = tensors.get(_TENSOR)
    if found is None or found.ndim != 2:
        raise StoreCorrupt("a file of embeddings must hold one tensor [tokens, width]")
    if meta.get("identity") != identity:
        raise StoreCorrupt("the embeddings are another model's")
    return found


class Version(NamedTuple):
    """One content of a file."""

    inode: int
    size: int
    changed_ns: int


@dataclass(frozen=True)
class Held:
    """What embeddings are.

    Attributes:
        shape: (tokens, width).
        dtype: as torch names it, without ``torch.``.
    """

    shape: tuple[int, int]
    dtype: str


class EmbeddingFiles:
    """Embeddings by name in ``folder``; thread-safe, and safe beside other processes on the same folder.

    Args:
        folder: made where it is not there. For hand-over between processes of one machine, in shared memory.
        identity: see `encode`.
    """

    def __init__(self, folder: str | Path, identity: str = "") -> None:
        self.folder = Path(folder)
        self.identity = identity
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / file_name(name)

    def put(self, name: str, embeddings: torch.Tensor) -> None:
        """Writes or replaces: all of it or nothing, and no other user of the machine may read it. Raises OSError."""
        write_file(self.path(name), encode(embeddings, self.identity))

    def get(self, name: str) -> torch.Tensor | None:
        """The embeddings, or None. Cost: a read and a SHA-256 (about 1 GB/s)."""
        path = self.path(name)
        try:
            return decode(path.read_bytes(), self.identity)
        except FileNotFoundError:
            return None
        except (OSError, StoreCorrupt) as error:
            _log.warning("embeddings %s cannot be used: %s", path.name, error)
            return None

    def version(self, name: str) -> Version | None:
        """Tells one content of a file from the next; None where there is no file. Files are replaced, never written into.

        Cost: one stat.
        """
        try:
            status = self.path(name).stat()
        except OSError:
            return None
        return Version(status.st_ino, status.st_size, status.st_mtime_ns)

    def discard(self, name: str) -> None:
        """Removes a file; what was read of it stays with whoever has it."""
        self.path(name).unlink(missing_ok=True)


class AtHand:
    """Checked embeddings in memory, from when a request is about to need them until they have been handed on.

    What was checked is what is loaded, whatever becomes of the file meanwhile. Those that nobody needs any more stay while
    there is room, and serve until their file changes. Not thread-safe: the scheduler is one thread.

    Args:
        files: where they come from.
        large: bytes from which a file is read and checked by a thread, beside its owner.
        room: bytes up to which what nobody needs is kept.

    Attributes:
        nbytes: bytes of all that is at hand.
    """

    def __init__(self, files: EmbeddingFiles, large: int, room: int) -> None:
        self._files = files
        self._large = large
        self._room = room
        self.nbytes = 0
        # By name, least recently used first; None for a file of no use.
        self._contents: OrderedDict[str, tuple[Version, torch.Tensor | None]] = OrderedDict()
        self._users: dict[str, set[str]] = {}
        self._reads: dict[str, tuple[Version, Future[torch.Tensor | None]]] = {}
        self._waiting: dict[str, set[str]] = {}  # who waits for a read
        self._threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Names that somebody needs."""
        return len(self._users)

    def take(self, name: str, user: str, want: Held) -> torch.Tensor | Literal[False] | None:
        """The embeddings of that name, held for ``user`` if they are what is wanted, else False. None: still being read."""
        found = self._current(name)
        if found is None:
            self._waiting.setdefault(name, set()).add(user)
            return None
        self._wait_no_more(name, user)
        if found is False:
            return False
        held = Held((found.shape[0], found.shape[1]), str(found.dtype).removeprefix("torch."))
        if held != want:
            _log.warning("the stored vision embeddings of %r must be %s, got %s", name, want, held)
            return False
        self._users.setdefault(name, set()).add(user)
        return found

    def find(self, name: str, user: str) -> torch.Tensor | None:
        """What ``user`` holds under that name."""
        return self._contents[name][1] if user in self._users.get(name, ()) else None

    def release(self, name: str, user: str) -> None:
        """Lets go for one user, who may be waiting for it still. Idempotent."""
        self._wait_no_more(name, user)
        users = self._users.get(name, set())
        users.discard(user)
        if not users:
            self._users.pop(name, None)
            self._trim()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._reads.clear()
        self._waiting.clear()
        self._users.clear()
        self._contents.clear()
        self.nbytes = 0

    def _wait_no_more(self, name: str, user: str) -> None:
        """What nobody waits for is not kept for anybody."""
        waiting = self._waiting.get(name, set())
        waiting.discard(user)
        if not waiting:
            self._waiting.pop(name, None)
            _, read = self._reads.pop(name, (None, None))
            if read is not None:
                read.cancel()

    def _current(self, name: str) -> torch.Tensor | Literal[False] | None:
        """The content of a file as it is now, or as somebody holds it; False where it is of no use."""
        if name not in self._users:
            version = self._files.version(name)
            if version is None:
                return False
            if name in self._contents and self._contents[name][0] != version:
                self._drop(name)
            if name not in self._contents and not self._read(name, version):
                return None
        self._contents.move_to_end(name)
        found = self._contents[name][1]
        return False if found is None else found

    def _read(self, name: str, version: Version) -> bool:
        """Whether a version has been read and checked. Cost: of a small file a read and a SHA-256, else nothing."""
        if version.size < self._large:
            self._put(name, version, self._files.get(name))
            return True
        wanted, read = self._reads.get(name, (None, None))
        if read is None or wanted != version:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "ctxwin-embeddings")
            self._reads[name] = version, self._threads.submit(self._files.get, name)
            return False
        if not read.done():
            return False
        del self._reads[name]
        self._put(name, version, read.result())
        return True

    def _put(self, name: str, version: Version, found: torch.Tensor | None) -> None:
        self._contents[name] = version, found
        self.nbytes += 0 if found is None else found.nbytes
        self._trim(name)

    def _drop(self, name: str) -> None:
        _, found = self._contents.pop(name)
        self.nbytes -= 0 if found is None else found.nbytes

    def _trim(self, keep: str = "") -> None:
        for name in list(self._contents):
            if self.nbytes <= self._room and len(self._contents) <= _MOST:
                break
            if name not in self._users and name != keep:
                self._drop(name)
