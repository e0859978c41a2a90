"""Vision embeddings as files in one folder: what the EC connector loads and saves.

A file is a checked blob of the store's codec (`ctxwin.store.codec`) with one tensor, ``embeddings [tokens, width]``, in
the form vLLM's encoder cache holds: ``width`` is the model's hidden size, times 1 + D for a deepstack model with D
injected layers. Nothing here imports vLLM, so a client can write files before any engine runs.

A file that cannot be used (not there, corrupt, of another model or shape) counts as not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin.adapters.vllm.folders import owner_of, runs, write_file
from ctxwin.errors import StoreCorrupt
from ctxwin.store import codec

if TYPE_CHECKING:
    import torch

_TENSOR = "embeddings"
_MOST_CHECKED = 4096
_PINS = ".pins-"
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


@dataclass(frozen=True)
class Held:
    """What a sound file holds.

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
        self._checked: OrderedDict[tuple[int, int, int], Held | None] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        return self.folder / file_name(name)

    def put(self, name: str, embeddings: torch.Tensor) -> None:
        """Writes or replaces: all of it or nothing, and no other user of the machine may read it. Raises OSError."""
        write_file(self.path(name), encode(embeddings, self.identity))

    def get(self, name: str) -> torch.Tensor | None:
        """The embeddings, or None. Cost: a read and a SHA-256 (about 1 GB/s)."""
        return self.read(self.path(name))

    def read(self, path: Path) -> torch.Tensor | None:
        """`get` of a file of this folder by its path, a pinned one for example."""
        try:
            return decode(path.read_bytes(), self.identity)
        except FileNotFoundError:
            return None
        except (OSError, StoreCorrupt) as error:
            _log.warning("embeddings %s cannot be used: %s", path.name, error)
            return None

    def known(self, path: Path) -> tuple[bool, Held | None]:
        """Whether this version of a file was checked before, and what it holds. Cost: one stat."""
        try:
            status = path.stat()
        except OSError:
            return True, None
        key = status.st_ino, status.st_size, status.st_mtime_ns
        with self._lock:
            if key in self._checked:
                self._checked.move_to_end(key)
                return True, self._checked[key]
        return False, None

    def check(self, path: Path) -> Held | None:
        """What a file holds, or None where it is of no use. Cost: `get`, once for each version of a file; then a stat.

        A version is an inode, its size and its time: files are replaced, never written into.
        """
        known, held = self.known(path)
        if known:
            return held
        try:
            status = path.stat()
        except OSError:
            return None
        found = self.read(path)
        held = (
            None if found is None else Held((found.shape[0], found.shape[1]), str(found.dtype).removeprefix("torch."))
        )
        with self._lock:
            self._checked[status.st_ino, status.st_size, status.st_mtime_ns] = held
            while len(self._checked) > _MOST_CHECKED:
                self._checked.popitem(last=False)
        return held

    def discard(self, name: str) -> None:
        """Removes a file; who has pinned it keeps it."""
        self.path(name).unlink(missing_ok=True)


class Pins:
    """Hard links that keep files of one folder readable while requests use them, whoever removes or replaces them.

    A link outlives its last user by some steps of the engine: one that is being computed may still read it. Not
    thread-safe: the scheduler is one thread. `close` removes the links; those of a killed process go with the folder, or
    when the next process pins something in it.

    Args:
        files: what is pinned.
        linger: steps for which a link stays; more than the engine has under way at once.
    """

    def __init__(self, files: EmbeddingFiles, linger: int = 8) -> None:
        self._files = files
        self._linger = linger
        self._folder: Path | None = None
        self._users: dict[str, set[str]] = {}
        self._paths: dict[str, Path] = {}
        self._leaving: deque[tuple[int, Path]] = deque()
        self._serial = 0
        self._step = 0

    def __len__(self) -> int:
        """Files that somebody uses."""
        return len(self._paths)

    def pin(self, name: str, user: str) -> Path | None:
        """The pinned file of ``name``, held for ``user`` as well; None where there is no such file."""
        if name not in self._paths:
            if self._folder is None:
                _sweep(self._files.folder)
                try:
                    self._folder = Path(tempfile.mkdtemp(prefix=f"{_PINS}{os.getpid()}-", dir=self._files.folder))
                except OSError:  # whoever made the folder has closed, and vLLM serves on
                    return None
            self._serial += 1
            link = self._folder / f"{self._serial}-{file_name(name)}"
            try:
                link.hardlink_to(self._files.path(name))
            except OSError:
                return None
            self._paths[name] = link
        self._users.setdefault(name, set()).add(user)
        return self._paths[name]

    def find(self, name: str, user: str) -> Path | None:
        """The pinned file of ``name``, if ``user`` holds it."""
        return self._paths[name] if user in self._users.get(name, ()) else None

    def unpin(self, name: str, user: str) -> None:
        """Lets go for one user; after the last one the link is removed, some steps later."""
        users = self._users.get(name)
        if users is None or user not in users:
            return
        users.remove(user)
        if not users:
            del self._users[name]
            self._leaving.append((self._step + self._linger, self._paths.pop(name)))

    def tick(self) -> None:
        """Counts a step, and removes the links that have stayed long enough."""
        self._step += 1
        while self._leaving and self._leaving[0][0] <= self._step:
            self._leaving.popleft()[1].unlink(missing_ok=True)

    def close(self) -> None:
        self._users.clear()
        self._paths.clear()
        self._leaving.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _sweep(folder: Path) -> None:
    """Removes the links of processes that do not run any more."""
    for left in folder.glob(f"{_PINS}*"):
        pid = owner_of(left, _PINS)
        if pid is not None and not runs(pid):
            shutil.rmtree(left, ignore_errors=True)
