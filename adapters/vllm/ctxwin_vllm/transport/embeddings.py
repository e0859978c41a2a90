"""Vision embeddings as files in one folder, which the encoder-cache connector loads.

A file is a checked blob of the store's codec (`ctxwin.store.codec`) with one tensor, ``embeddings [tokens, width]``, in
the form vLLM's encoder cache holds: ``width`` is the model's hidden size, times 1 + D for a deepstack model with D
injected layers. A file that cannot be used (missing, corrupt, of another model or shape) is a miss. Nothing here imports
vLLM.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec

if TYPE_CHECKING:
    import torch

_TENSOR = "embeddings"
_MAX_FILES = 4096
"""Most files remembered, unusable ones included."""
_log = logging.getLogger("ctxwin.engines")

Version = tuple[int, int, int]
"""Inode, size and modification time: tells one content of a file from the next, as files are only ever replaced."""


def name_of(identifier: str) -> str:
    """Return the name of the embeddings of a multimodal identifier: the part before its first ``@``.

    The rest separates blocks in vLLM's prefix cache (``<name>@<provenance>``). It identifies the KV of the medium's tokens, not
    its embeddings.
    """
    return identifier.partition("@")[0]


def file_name(name: str) -> str:
    """Return the file name of the embeddings ``name``; any text is safe, because it is hashed."""
    return f"embed-{hashlib.sha256(name.encode()).hexdigest()}"


def encode(embeddings: torch.Tensor, identity: str = "") -> bytes:
    """Return the content of a file.

    Args:
        embeddings: ``[tokens, width]`` on any device, in the dtype the model computes in.
        identity: digest of what makes embeddings of this model interchangeable; compared on a read.
    """
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be [tokens, width], got {list(embeddings.shape)}")
    return codec.encode_tensors({_TENSOR: embeddings}, {"identity": identity})


def decode(blob: bytes, identity: str = "") -> torch.Tensor:
    """Return the embeddings of a file, read-only. Raises StoreCorrupt, also for another model's. Cost: one SHA-256."""
    tensors, meta = codec.decode_tensors(blob)
    embeddings = tensors.get(_TENSOR)
    if embeddings is None or embeddings.ndim != 2:
        raise StoreCorrupt("a file of embeddings must hold one tensor [tokens, width]")
    if meta.get("identity") != identity:
        raise StoreCorrupt("the embeddings are another model's")
    return embeddings


@dataclass
class EmbeddingFiles:
    """Embeddings by name in a folder in shared memory, which may be gone; thread-safe, also beside the writing process.

    ``identity``: see `encode`.
    """

    folder: Path
    identity: str = ""

    def path(self, name: str) -> Path:
        """Return the path of the embeddings of that name."""
        return self.folder / file_name(name)

    def get(self, name: str) -> torch.Tensor | None:
        """Return the embeddings, or None. Cost: a read and a SHA-256 (about 1 GB/s)."""
        path = self.path(name)
        try:
            return decode(path.read_bytes(), self.identity)
        except FileNotFoundError:
            return None
        except (OSError, StoreCorrupt) as error:
            _log.warning("embeddings %s cannot be used: %s", path.name, error)
            return None

    def version(self, name: str) -> Version | None:
        """Return the `Version` of a file; None where there is no file. Cost: one stat."""
        try:
            status = self.path(name).stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class _Read:
    """One content of a file, checked or being read; ``users`` wait for it or hold it."""

    version: Version
    content: Future[torch.Tensor | None]
    nbytes: int
    users: set[str] = field(default_factory=set)


class EmbeddingCache:
    """Checked embeddings in memory, from shortly before a request needs them until they are loaded.

    The checked content is what is loaded, whatever happens to the file meanwhile. Embeddings without users stay while there is
    room, and are served until their file changes. Not thread-safe: the scheduler is one thread.

    Args:
        files: source of the embeddings.
        large: bytes from which a file is read and checked by a thread, beside its owner.
        room: bytes up to which embeddings without users are kept.

    Attributes:
        nbytes: size of all cached files.
    """

    def __init__(self, files: EmbeddingFiles, large: int, room: int) -> None:
        self._files = files
        self._large = large
        self._room = room
        self.nbytes = 0
        self._reads: OrderedDict[str, _Read] = OrderedDict()  # least recently used first
        self._threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Number of names that have users."""
        return sum(bool(read.users) for read in self._reads.values())

    def take(
        self, name: str, user: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor | Literal[False] | None:
        """Return the embeddings of that name and hold them for ``user``; False if none have that shape, None while being read."""
        read = self._current(name)
        if read is None:
            self.release(name, user)
            return False
        read.users.add(user)
        self._trim()
        if not read.content.done():
            return None
        embeddings = read.content.result()
        if embeddings is not None and (embeddings.shape, embeddings.dtype) == (shape, dtype):
            self._reads.move_to_end(name)
            return embeddings
        if embeddings is None:  # remembered as useless
            self.nbytes -= read.nbytes
            read.nbytes = 0
        else:
            got = f"{[*embeddings.shape]} of {embeddings.dtype}"
            _log.warning("the embeddings of %r must be %s of %s, got %s", name, [*shape], dtype, got)
        self.release(name, user)
        return False

    def find(self, name: str, user: str) -> torch.Tensor | None:
        """Return the embeddings that ``user`` holds under that name; None if it holds none."""
        read = self._reads.get(name)
        return read.content.result() if read is not None and user in read.users and read.content.done() else None

    def release(self, name: str, user: str) -> None:
        """Release the embeddings for one user, who may still be waiting for them. Idempotent."""
        read = self._reads.get(name)
        if read is None:
            return
        read.users.discard(user)
        if not read.users and not read.content.done():
            self._drop(name)
        self._trim()

    def close(self) -> None:
        """Drop all embeddings."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        self._reads.clear()
        self.nbytes = 0

    def _current(self, name: str) -> _Read | None:
        """Return the content of a file as it is now, or as a user holds it; None where there is no file.

        Cost: of a small file that is new a read and a SHA-256, else a stat.
        """
        read = self._reads.get(name)
        if read is not None and read.users and read.content.done():
            return read
        version = self._files.version(name)
        if version is None or (read is not None and read.version == version):
            return None if version is None else read
        users = set() if read is None else read.users
        if read is not None:
            self._drop(name)
        content: Future[torch.Tensor | None] = Future()
        if version[1] < self._large:
            content.set_result(self._files.get(name))
        else:
            self._threads = self._threads or ThreadPoolExecutor(1, "ctxwin-embeddings")
            content = self._threads.submit(self._files.get, name)
        self._reads[name] = read = _Read(version, content, version[1], users)
        self.nbytes += read.nbytes
        return read

    def _drop(self, name: str) -> None:
        read = self._reads.pop(name)
        self.nbytes -= read.nbytes
        read.content.cancel()

    def _trim(self) -> None:
        if self.nbytes <= self._room and len(self._reads) <= _MAX_FILES:
            return
        for name in [n for n, read in self._reads.items() if not read.users]:
            self._drop(name)
            if self.nbytes <= self._room and len(self._reads) <= _MAX_FILES:
                return
