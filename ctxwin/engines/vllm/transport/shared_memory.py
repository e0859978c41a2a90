"""Between processes: files in shared memory, named in a job file under an unguessable handle.

A `SharedMemoryTransport` belongs to the process of the engine, a `SharedMemoryEndpoint` to each process of vLLM that runs
the connector. Nothing is pickled: KV travels as the store's blobs (`ctxwin.store.codec`), and what was read from a store as
the very bytes that were read; instructions are JSON, with a sum of each file that they name.

| file                    | written by | content                                                       |
|-------------------------|------------|---------------------------------------------------------------|
| ``spec.json``           | engine     | the model's `KVSpec`                                          |
| ``span-<digest>-<n>``   | engine     | a span, by the key of its KV; kept while there is room        |
| ``patch-<digest>-<n>``  | engine     | a patch; one over a shared basis names it                     |
| ``basis-<digest>-<n>``  | engine     | a shared basis, once for all its patches                      |
| ``embed/``              | engine     | vision embeddings for the encoder cache (`embeddings`)        |
| ``job-<handle>.json``   | engine     | one `Transfer`: `Job`, and where each span goes               |
| ``seen-<handle>.json``  | scheduler  | tokens it found in its own prefix cache, tokens it wants      |
| ``out-<handle>-<name>.<rank>`` | worker | a capture, the KV heads of one rank                        |
| ``error-<handle>.json`` | worker     | why a load or a capture failed                                |
| ``refused.json``        | worker     | why the model's cache cannot be served, at start-up           |
| ``segments.json``       | engine     | vLLM's shared memory, by name                                 |
| ``lock``                | engine     | nothing; locked as long as the folder is used                 |

Every file is written under another name and then renamed, so that a reader sees all of it or nothing.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.engines.base import Segment
from ctxwin.engines.vllm.lifecycle import watchdog
from ctxwin.engines.vllm.lifecycle.folders import (
    LOCK,
    PREFIX,
    SEGMENTS,
    read_json,
    shared_memory,
    sweep,
    write_file,
    write_json,
)
from ctxwin.engines.vllm.ranks import gather, gather_stages
from ctxwin.engines.vllm.transport import embeddings
from ctxwin.engines.vllm.transport.base import Job, Transfer, Transport, new_handle, state_bytes
from ctxwin.errors import EngineFailed, StoreCorrupt
from ctxwin.hashing import digest
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.layout import KVSpec, SpanKV, outputs_named
from ctxwin.kv.patch import Patch
from ctxwin.kv.states import named, since_exact, states_in
from ctxwin.store import codec

if TYPE_CHECKING:
    import torch

MAX_BYTES = 2 << 30
"""Spans and patches kept in a folder by default, or half of its file system's free space where that is less."""
RESERVE_BYTES = 64 << 20
"""Left free for others, or a sixteenth of the file system where that is less."""
WAIT_S = 120.0
"""How long a capture may take after its request has ended: a step of the other requests of the batch."""
DRAFTED = ("drafter.k", "drafter.v")
"""A drafter's KV among the tensors of a capture."""
_EMBEDDINGS = "embed"
_log = logging.getLogger("ctxwin.engines")


class SharedMemoryTransport(Transport):
    """The engine's side.

    Args:
        kv: layout of the model's KV (all heads).
        folder: where the transport's own folder is made; shared memory by default.
        max_bytes: bound on the spans and patches kept for later requests. Those of running requests always stay.

    Attributes:
        source: the folder's name. vLLM's processes that get it end with this one.

    Raises:
        EngineFailed: the folder cannot be written.
    """

    def __init__(self, kv: KVSpec, folder: str | Path | None = None, max_bytes: int | None = None) -> None:
        root = Path(folder or shared_memory())
        sweep(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
            held = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(held, fcntl.LOCK_EX)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise EngineFailed(f"the shared-memory folder {str(root)!r} must be writable: {error}") from error
        self.kv = kv
        self.source = watchdog.Lifeline(str(self.path))
        self.max_bytes = min(MAX_BYTES, free // 2) if max_bytes is None else max_bytes
        self.alive: Callable[[], bool] = lambda: True  # set by the engine: whether vLLM's processes still run
        self.ranks = 1  # of all stages
        self.stages = 1
        self.drafter: KVSpec | None = None  # layout of a drafter's KV, set by the engine
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()  # bytes and sum by file, most recently used last
        self._used: Counter[str] = Counter()  # running jobs by file
        self._jobs: dict[str, tuple[list[str], tuple[str, ...]]] = {}  # files and captures of running transfers
        self._named: dict[str, tuple[str, weakref.ref[torch.Tensor] | None]] = {}  # file and tensor by kind and key
        self._serial = itertools.count()
        self._bytes = 0
        self._lock = threading.Lock()
        # Also when it is collected, and when the interpreter ends.
        self._remove = weakref.finalize(self, _remove, self.path, held, os.getpid())
        self.embeddings = self.path / _EMBEDDINGS
        self.embeddings.mkdir()
        write_json(self.path / "spec.json", asdict(kv))

    def __len__(self) -> int:
        with self._lock:
            return len(self._jobs)

    @property
    def refusal(self) -> str | None:
        """What one of vLLM's processes reported by `Endpoint.refuse`."""
        found = read_json(self.path / "refused.json")
        return None if found is None else str(found["error"])

    def remember_segments(self, names: set[str]) -> None:
        """Leaves the names of vLLM's shared memory to whoever sweeps this folder, should all be killed at once."""
        write_json(self.path / SEGMENTS, dict.fromkeys(names))

    def add(self, transfer: Transfer) -> str:
        """As `Transport.add`. Cost: one write of each span that no earlier transfer brought."""
        handle = new_handle()
        names: list[str] = []
        try:
            entries = []
            for i, segment in enumerate(transfer.loads):
                entry: dict[str, Any] = {"tokens": segment.tokens, "start": segment.start, "patch": None, "basis": None}
                entry["approximate"] = segment.approximate
                for kind, key, tensor, encode in _contents(segment):
                    known_as = digest("transport", transfer.tenant, key) if key else f"{handle}-{i}"
                    name = self._file(f"{kind}-{known_as}", tensor, encode, names)
                    entry[kind] = name, self._held[name][1]
                entries.append(entry)
            for identifier, tensor in transfer.embeddings.items():
                made = partial(embeddings.encode, tensor, self.kv.identity)
                self._file(f"{_EMBEDDINGS}/{embeddings.file_name(identifier)}", tensor, made, names)
            job = {part.name: getattr(transfer, part.name) for part in fields(Job)}
            write_json(self.path / f"job-{handle}.json", {"job": job, "loads": entries})
        except BaseException:
            self._unlease(names, handle)
            raise
        with self._lock:
            self._jobs[handle] = names, tuple(transfer.captures)
        return handle

    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        seen = read_json(self.path / f"seen-{handle}.json")
        if seen is not None:
            transfer.local_tokens, transfer.planned_tokens = int(seen["local"]), int(seen["planned"])
        self._look_for_error(handle, transfer)
        if transfer.error is not None or not finished:
            # The files handed over for it may be what is broken, so the next request writes them anew. Nobody reports
            # embeddings that cannot be used: vLLM just ends the request.
            with self._lock:
                for name in self._jobs.get(handle, ((), ()))[0]:
                    if self._used[name] <= 1:
                        self._drop(name)
        if transfer.error is not None:
            return
        transfer.loaded_tokens = transfer.planned_tokens
        transfer.bytes_loaded = transfer.planned_tokens * self.kv.token_bytes
        if transfer.planned_tokens and self.kv.recurrent:
            transfer.bytes_loaded += state_bytes(since_exact(transfer.loads))
        if not finished:
            return
        until = time.monotonic() + WAIT_S
        for name in transfer.captures:
            if transfer.error is None:
                self._await_capture(handle, name, transfer, until)

    def remove(self, handle: str) -> None:
        """Forgets a transfer and its files; spans and patches stay for others while there is room."""
        with self._lock:
            names, captures = self._jobs.pop(handle, ([], ()))
        self._unlease(names, handle)
        own = [f"job-{handle}.json", f"seen-{handle}.json", f"error-{handle}.json"]
        own += [f"out-{handle}-{name}.{rank}" for name in captures for rank in range(self.ranks)]
        for name in own:
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        self._remove()

    def _file(self, key: str, tensor: torch.Tensor, encode: Callable[[], bytes], names: list[str]) -> str:
        """The name of a file, written where it is missing, and leased into ``names``."""
        by_content = key.startswith(_EMBEDDINGS)  # the encoder-cache connector looks for that very name
        with self._lock:
            name, known_as = self._named.get(key, (key, None))
            # The very tensor that was written: a name alone would trust every caller to use it only once.
            known = name in self._held and (by_content or (known_as is not None and known_as() is tensor))
            if not known and not by_content:
                name = f"{key}-{next(self._serial)}"
                self._named[key] = name, weakref.ref(tensor)
            self._used[name] += 1
            names.append(name)
            if name in self._held:
                self._held.move_to_end(name)
        if not (known and (self.path / name).exists()):
            self._put(name, encode())
        return name

    def _put(self, name: str, blob: bytes) -> None:
        with self._lock:
            for old in [n for n in self._held if not self._used[n]]:
                if self._bytes + len(blob) <= self.max_bytes and _room(self.path) >= len(blob):
                    break
                self._drop(old)
        check_room(self.path, len(blob))
        write_file(self.path / name, blob)
        with self._lock:
            self._bytes += len(blob) - self._held.pop(name, (0, 0))[0]
            self._held[name] = len(blob), sum_of(blob)

    def _drop(self, name: str) -> None:
        self._bytes -= self._held.pop(name, (0, 0))[0]
        key = name.rpartition("-")[0]
        if self._named.get(key, ("",))[0] == name:
            del self._named[key]
        (self.path / name).unlink(missing_ok=True)

    def _unlease(self, names: list[str], handle: str) -> None:
        with self._lock:
            for name in names:
                self._used[name] -= 1
                if self._used[name] <= 0:
                    del self._used[name]
                    if self._bytes > self.max_bytes or handle in name:
                        self._drop(name)

    def _look_for_error(self, handle: str, transfer: Transfer) -> bool:
        error = read_json(self.path / f"error-{handle}.json")
        if error is not None and transfer.error is None:
            transfer.error = RuntimeError(str(error["error"]))
        return transfer.error is not None

    def _await_capture(self, handle: str, name: str, transfer: Transfer, until: float) -> None:
        """Polls: a rename in shared memory tells nobody, and the file is there within a step."""
        paths = [self.path / f"out-{handle}-{name}.{rank}" for rank in range(self.ranks)]
        pause = 0.0002
        while not all(path.exists() for path in paths):
            if self._look_for_error(handle, transfer):
                return
            if not self.alive():
                raise EngineFailed("vLLM's processes ended while a request was read back; open a new engine")
            if time.monotonic() > until:
                transfer.error = TimeoutError(f"vLLM did not hand back the KV of {name!r} within {WAIT_S:.0f} s")
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        try:
            parts = [codec.decode_tensors(path.read_bytes())[0] for path in paths]
        except StoreCorrupt as error:
            transfer.error = error
            return
        k, v = (gather_stages([p[x] for p in parts], self.kv.heads, self.stages) for x in "kv")
        transfer.captured[name] = k, v
        if self.drafter is not None:
            k, v = (gather([p[x] for p in parts], self.drafter.heads) for x in DRAFTED)
            transfer.drafted[name] = k, v
        if states := states_in(parts[0]):
            transfer.states[name] = states


def _contents(segment: Segment) -> Iterator[tuple[str, str, torch.Tensor, Callable[[], bytes]]]:
    """What a segment hands over: kind of file, stable key, the tensor that tells it from another, and what encodes it."""
    assert segment.span is not None
    yield "span", segment.span_key, segment.span.k, partial(encode_span, segment.span)
    if segment.patch is not None:
        patch, basis = segment.patch, segment.patch.basis
        yield "patch", segment.key, patch.left, lambda: _encoded("patch", patch)
        if basis is not None:
            yield "basis", basis.id, basis.right, lambda: _encoded("basis", basis)


def encode_span(span: SpanKV) -> bytes:
    """A span as the store frames it; the bytes that it was read from where it is unchanged."""
    if span.blob is not None:
        return span.blob
    tensors = {
        "k": span.k,
        "v": span.v,
        "positions": span.positions,
        **outputs_named(span.outputs),
        **named(span.states),
    }
    return codec.encode_tensors(tensors, {"start": span.start}, checked=False)


def _encoded(kind: str, record: Patch | SharedBasis) -> bytes:
    """A patch, without its shared basis, or a basis, which has a file of its own for all its patches."""
    return codec.encode_tensors(record.tensors(), {kind: record.describe()}, checked=False)


def _room(folder: Path) -> int:
    """Bytes that may be written: vLLM's own queues live in shared memory, and would kill its processes were it all full."""
    total, _, free = shutil.disk_usage(folder)
    return free - min(RESERVE_BYTES, total // 16)


def check_room(folder: Path, size: int) -> None:
    """Raises OSError where a folder's file system has no room for ``size`` bytes more."""
    room = max(0, _room(folder))
    if size > room:
        raise OSError(errno.ENOSPC, f"{folder.parent} must have room for {size} more bytes, got {room}; free some")


def sum_of(blob: bytes) -> int:
    """Tells a damaged file from a sound one at the speed of memory; digests are for files that leave the machine."""
    words = np.frombuffer(blob, dtype="<u8", count=len(blob) // 8)
    rest = int.from_bytes(blob[8 * len(words) :], "little")
    return (int(words.sum(dtype=np.uint64)) + rest + len(blob)) % (1 << 63)


def _remove(folder: Path, held: int, pid: int) -> None:
    """Ends a transport; a forked child that exits leaves its parent's alone."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
