"""Transport between processes: files in shared memory, named in a request file under an unguessable handle.

A `SharedMemoryTransport` belongs to the process of the engine, a `SharedMemoryEndpoint` to each process of vLLM that runs
the connector. Nothing is pickled: KV travels as the store's blobs (`ctxwin.store.codec`), a span that was read from a store as
its stored bytes; instructions are JSON, with a sum of each file that they name.

| file                    | written by | content                                                       |
|-------------------------|------------|---------------------------------------------------------------|
| ``spec.json``           | engine     | the model's `KVSpec`                                          |
| ``span-<digest>-<n>``   | engine     | a span, or all but KV that is copied; kept as long as its origin |
| ``patch-<digest>-<n>``  | engine     | a patch; one over a shared basis names it                     |
| ``basis-<digest>-<n>``  | engine     | a shared basis, once for all its patches                      |
| ``embed/``              | engine     | vision embeddings for the encoder cache (`embeddings`)        |
| ``job-<handle>.json``   | engine     | one `Transfer`: its `RequestMeta`, and where each span goes   |
| ``reserved-<handle>``   | engine     | nothing; there until a reserved transfer is added             |
| ``seen-<handle>.json``  | scheduler  | tokens it found in its own prefix cache, tokens it wants      |
| ``out-<handle>-<name>.<rank>`` | worker | a capture, the KV heads of one rank, with a sum            |
| ``kept-<handle>-<name>.<rank>`` | worker | nothing; there until the worker's copy of a capture goes  |
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
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ctxwin.engines.segments import Segment
from ctxwin.errors import EngineFailed, StoreCorrupt
from ctxwin.hashing import digest
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.layout import KVSpec, SpanKV, SpanOrigin, outputs_named
from ctxwin.kv.patch import Patch
from ctxwin.kv.states import named, since_exact
from ctxwin.store import codec
from ctxwin_vllm.lifecycle import folders, watchdog
from ctxwin_vllm.lifecycle.folders import read_json, sum_of, write_file, write_json
from ctxwin_vllm.ranks import gather, gather_stages
from ctxwin_vllm.resident import Selection
from ctxwin_vllm.transport import embeddings
from ctxwin_vllm.transport.base import (
    DRAFTED,
    SLOTS,
    SUMS,
    RequestMeta,
    Transfer,
    Transport,
    blank_span,
    is_reserved,
    new_handle,
    state_bytes,
)

MAX_BYTES = 2 << 30
"""Spans and patches kept in a folder by default, or half of its file system's free space where that is less."""
RESERVE_BYTES = 64 << 20  # left free for others, or a sixteenth of the file system where that is less
STEPS = 64
"""Steps of vLLM after the end of a request within which its workers return or report its captures, behind thousands of others'
(`scheduler.BACKLOG`). A capture that is missing by then never comes."""
_LOOK_S = 0.25
"""How long to poll for a capture, which exists after one step, before calling the workers to count their steps."""
_EMBEDDINGS = "embed"
_log = logging.getLogger("ctxwin.engines")


class SharedMemoryTransport(Transport):
    """The engine's side.

    Args:
        kv: layout of the model's KV (all heads).
        folder: where the transport's own folder is made; shared memory by default.

    Attributes:
        max_bytes: bound on the spans and patches kept for later requests. Those of running requests always stay.
        source: the folder's name. vLLM's processes that get it end with this one.

    Raises:
        EngineFailed: the folder cannot be written.
    """

    def __init__(self, kv: KVSpec, folder: str | Path | None = None) -> None:
        super().__init__()
        root = Path(folder or folders.shared_memory())
        folders.sweep(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{folders.PREFIX}{os.getpid()}-", dir=root))
            lock = os.open(self.path / folders.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.max_bytes = min(MAX_BYTES, shutil.disk_usage(self.path).free // 2)
        except OSError as error:
            raise EngineFailed(f"the shared-memory folder {str(root)!r} must be writable: {error}") from error
        self.kv = kv
        self.source = watchdog.Lifeline(str(self.path))
        self.alive: Callable[[], bool] = lambda: True  # set by the engine: whether vLLM's processes still run
        # Set by the engine: returns between two later steps of all workers.
        self.step: Callable[[], object] = lambda: None
        self.ranks = 1  # of all stages
        self.stages = 1
        self.keeps_outputs = False  # whether spans hold stage outputs, set where its vLLM is started
        self.draft_model: KVSpec | None = None  # layout of the draft model's KV, set by the engine
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()  # bytes and sum by file, most recently used last
        self._used: Counter[str] = Counter()  # running transfers by file
        self._transfers: dict[str, tuple[list[str], tuple[str, ...]]] = {}  # files and captures of running transfers
        self._named: dict[str, tuple[str, weakref.ref[Any]]] = {}  # file, and what it was written from, by kind and key
        self._copies = weakref.WeakKeyDictionary[SpanOrigin, str]()  # names of the workers' copies of captures
        # What spans without KV take of which capture.
        self._selections = weakref.WeakKeyDictionary[SpanOrigin, tuple[SpanOrigin, Selection]]()
        self._unreachable: deque[str] = deque()  # files that no later transfer can use; appended to at any time
        self._serial = itertools.count()
        self._bytes = 0
        self._lock = threading.Lock()
        # Also when it is collected, and when the interpreter ends.
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        self.embeddings = self.path / _EMBEDDINGS
        self.embeddings.mkdir()
        write_json(self.path / "spec.json", asdict(kv))

    def __len__(self) -> int:
        with self._lock:
            return len(self._transfers)

    @property
    def refusal(self) -> str | None:
        """Reason that one of vLLM's processes reported by `Endpoint.refuse`; None where there is none."""
        report = read_json(self.path / "refused.json")
        return None if report is None else str(report["error"])

    def remember_segments(self, names: set[str]) -> None:
        """Record the names of vLLM's shared memory, for the next `sweep` if all processes are killed at once."""
        write_json(self.path / folders.SEGMENTS, dict.fromkeys(names))

    def reserve(self) -> str:
        handle = new_handle(reserved=True)
        (self.path / f"reserved-{handle}").touch()
        return handle

    def add(self, transfer: Transfer, handle: str = "") -> str:
        """As `Transport.add`. Cost: one write of each span that no earlier transfer brought."""
        handle = handle or new_handle()
        names: list[str] = []
        with self._lock:
            self._drop_unreachable()
        try:
            entries = []
            for i, segment in enumerate(transfer.loads):
                entry: dict[str, Any] = {"tokens": segment.tokens, "start": segment.start, "patch": None, "basis": None}
                entry["approximate"] = segment.approximate
                assert segment.span is not None
                origin, selection = self._selections.get(segment.span.origin, (segment.span.origin, None))
                for kind, key, source, encode in _contents(segment, self._copy_of(origin), selection):
                    file_key = digest("transport", transfer.tenant, key) if key else f"{handle}-{i}"
                    name = self._lease(f"{kind}-{file_key}", source, encode, names)
                    entry[kind] = name, self._files[name][1]
                entries.append(entry)
            for identifier, tensor in transfer.embeddings.items():
                encode = partial(embeddings.encode, tensor, self.kv.identity)
                self._lease(f"{_EMBEDDINGS}/{embeddings.file_name(identifier)}", tensor, encode, names)
            meta = {field.name: getattr(transfer, field.name) for field in fields(RequestMeta)}
            write_json(self.path / f"job-{handle}.json", {"job": meta, "loads": entries})
        except BaseException:
            self._unlease(names, handle)
            raise
        with self._lock:
            self._transfers[handle] = names, tuple(transfer.captures)
            for capture in transfer.captures:
                origin = transfer.origins[capture] = SpanOrigin()
                self._copies[origin] = copy = f"kept-{handle}-{capture}"
                weakref.finalize(origin, self._unreachable.extend, self._by_rank(copy)).atexit = False
        if is_reserved(handle):  # the scheduler looks for this file first, so that it finds the one above
            (self.path / f"reserved-{handle}").unlink(missing_ok=True)
        return handle

    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        if (hit := read_json(self.path / f"seen-{handle}.json")) is not None:
            transfer.local_tokens, transfer.planned_tokens = int(hit["local"]), int(hit["planned"])
        self._read_error(handle, transfer)
        if transfer.error is not None or not finished:
            # The transfer's files may be the broken part, so the next request writes them again. Unusable embeddings are
            # not reported: vLLM just ends the request.
            with self._lock:
                for name in self._transfers.get(handle, ((), ()))[0]:
                    if self._used[name] <= 1:
                        self._drop(name)
            for origin in (segment.span.origin for segment in transfer.loads if segment.span is not None):
                self._copy_of(self._selections.get(origin, (origin,))[0], forget=True)
        if transfer.error is not None:
            return
        transfer.loaded_tokens = transfer.planned_tokens
        transfer.bytes_loaded = transfer.planned_tokens * self.kv.token_bytes
        if transfer.planned_tokens and self.kv.recurrent:
            transfer.bytes_loaded += state_bytes(since_exact(transfer.loads))
        if not finished:
            return
        for name in transfer.captures:
            if transfer.error is None:
                self._await_capture(handle, name, transfer)

    def remove(self, handle: str) -> None:
        """Remove a transfer and its files; spans and patches stay for other requests while there is room."""
        with self._lock:
            names, captures = self._transfers.pop(handle, ([], ()))
        self._unlease(names, handle)
        paths = [f"reserved-{handle}", f"job-{handle}.json", f"seen-{handle}.json", f"error-{handle}.json"]
        paths += [f"out-{handle}-{name}.{rank}" for name in captures for rank in range(self.ranks)]
        for name in paths:
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._remove()

    def select(self, origin: SpanOrigin | None, selection: Selection) -> SpanKV | None:
        if origin is None or not self._copy_of(origin):
            return None
        span = blank_span(self.kv, torch.arange(len(selection.slots)).repeat(3, 1), 0)
        self._selections[span.origin] = origin, selection
        return span

    def _copy_of(self, origin: SpanOrigin, forget: bool = False) -> str:
        """Return the name of the copies of a span that all workers keep; "" where one has none, or to ``forget`` them."""
        files = self._by_rank(copy := self._copies.get(origin, ""))
        if copy and (forget or not all(os.access(f"{self.path}/{file}", os.F_OK) for file in files)):
            self._unreachable.extend(files)
            copy = self._copies[origin] = ""
        return copy

    def _by_rank(self, copy: str) -> list[str]:
        return [f"{copy}.{rank}" for rank in range(self.ranks)]

    def _lease(self, key: str, source: Any, encode: Callable[[], bytes], names: list[str]) -> str:
        """Lease a file into ``names``, write it if it is missing, and return its name; ``source`` identifies its content."""
        by_content = key.startswith(_EMBEDDINGS)  # the encoder-cache connector looks for that very name
        with self._lock:
            name, reference = self._named.get(key, (key, None))
            # The same object: a key alone would trust every caller to use it for one content only.
            current = name in self._files and (by_content or (reference is not None and reference() is source))
            if not current and not by_content:
                if reference is not None:
                    self._unreachable.append(name)
                name = f"{key}-{next(self._serial)}"
                gone = self._unreachable  # appended to without the lock: a source may end in a thread that holds it
                self._named[key] = name, weakref.ref(source, lambda _: gone.append(name))
            self._used[name] += 1
            names.append(name)
            if name in self._files:
                self._files.move_to_end(name)
        if not (current and (self.path / name).exists()):
            self._put(name, encode())
        return name

    def _put(self, name: str, blob: bytes) -> None:
        with self._lock:
            unused = None  # looked for only where something has to go: every new span comes here
            while self._bytes + len(blob) > self.max_bytes or _free_bytes(self.path) < len(blob):
                unused = iter([n for n in self._files if not self._used[n]]) if unused is None else unused
                old = next(unused, None)
                if old is None:
                    break
                self._drop(old)
        check_room(self.path, len(blob))
        write_file(self.path / name, blob)
        with self._lock:
            self._bytes += len(blob) - self._files.pop(name, (0, 0))[0]
            self._files[name] = len(blob), sum_of(blob)

    def _drop_unreachable(self) -> None:
        """Remove the files whose source is gone or was replaced by another one of its key."""
        for _ in range(len(self._unreachable)):
            name = self._unreachable.popleft()
            if self._used[name]:
                self._unreachable.append(name)  # the running transfers come first
            else:
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._bytes -= self._files.pop(name, (0, 0))[0]
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
            self._drop_unreachable()

    def _read_error(self, handle: str, transfer: Transfer) -> bool:
        error = read_json(self.path / f"error-{handle}.json")
        if error is not None and transfer.error is None:
            transfer.error = RuntimeError(str(error["error"]))
        return transfer.error is not None

    def _await_capture(self, handle: str, name: str, transfer: Transfer) -> None:
        """Wait for a capture by polling: a rename in shared memory raises no event, and the file exists within a step.

        Workers report a capture that they cannot return, unless the disk is full. So the wait is bounded by vLLM's steps,
        however long they take.
        """
        paths = [self.path / f"out-{handle}-{name}.{rank}" for rank in range(self.ranks)]
        pause, steps, look_until = 0.0002, 0, time.monotonic() + _LOOK_S
        while not all(path.exists() for path in paths):
            if self._read_error(handle, transfer):
                return
            if not self.alive():
                raise EngineFailed("vLLM's processes ended while a request was read back; open a new engine")
            if steps == STEPS:
                transfer.error = RuntimeError(f"vLLM has gone on without returning the KV of {name!r}")
                return
            if time.monotonic() > look_until:
                self.step()
                steps += 1
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.01)
        try:
            parts = [_read_capture(path) for path in paths]
        except StoreCorrupt as error:
            transfer.error = error
            return
        size = self.ranks // self.stages
        tensors = {x: gather_stages([p[x] for p in parts], self.kv.heads, self.stages) for x in "kv"}
        if self.draft_model is not None:
            tensors |= {x: gather([p[x] for p in parts], self.draft_model.heads) for x in DRAFTED}
        if SUMS in parts[0]:
            stages = (parts[at : at + size] for at in range(0, self.ranks, size))
            tensors[SUMS] = torch.cat([torch.stack([part[SUMS] for part in stage]).mean(0) for stage in stages])
        # The first rank of the last stage has the outputs; states have one rank.
        transfer.take(name, parts[-size] | tensors)


def _contents(
    segment: Segment, copy: str, selection: Selection | None
) -> Iterator[tuple[str, str, Any, Callable[[], bytes]]]:
    """Yield the files of a segment: kind, stable key, the object that identifies the content, its encoder (`encode_span`)."""
    span, key = segment.span, segment.span_key
    assert span is not None
    yield "span", f"{key} in {copy}" if key and copy else key, span.origin, partial(encode_span, span, copy, selection)
    if segment.patch is not None:
        patch, basis = segment.patch, segment.patch.basis
        yield "patch", segment.key, patch.left, lambda: _encoded("patch", patch)
        if basis is not None:
            yield "basis", basis.id, basis.right, lambda: _encoded("basis", basis)


def encode_span(span: SpanKV, copy: str = "", selection: Selection | None = None) -> bytes:
    """Return a span as the store frames it, or as it was read; without KV of which workers keep a ``copy``, but its name.

    Raises FileNotFoundError for what is selected of a copy that is gone.
    """
    if span.k.is_meta and not copy:
        raise FileNotFoundError("the copy of a prompt has given way to others")
    if span.blob is not None and not copy:
        return span.blob
    tensors, meta = {} if copy else {"k": span.k, "v": span.v}, {"start": span.start, "copy": copy}
    tensors |= {"positions": span.positions, **outputs_named(span.outputs), **named(span.states)}
    if selection is not None:
        tensors |= {SLOTS: selection.slots} | ({} if selection.sums is None else {SUMS: selection.sums})
        meta["merged"] = selection.merged
    return codec.encode_tensors(tensors, meta, checked=False)


def _encoded(kind: str, record: Patch | SharedBasis) -> bytes:
    """Return a patch without its shared basis, or a basis, which has a file of its own for all its patches."""
    return codec.encode_tensors(record.tensors(), {kind: record.describe()}, checked=False)


def _free_bytes(folder: Path) -> int:
    """Return the bytes that may be written; a reserve stays free for vLLM's own queues, which fail when the folder is full."""
    total, _, free = shutil.disk_usage(folder)
    return free - min(RESERVE_BYTES, total // 16)


def check_room(folder: Path, size: int) -> None:
    """Raise OSError where a folder's file system has no room for ``size`` more bytes."""
    free = max(0, _free_bytes(folder))
    if size > free:
        raise OSError(errno.ENOSPC, f"{folder.parent} must have room for {size} more bytes, got {free}; free some")


def _read_capture(path: Path) -> dict[str, torch.Tensor]:
    tensors, meta = codec.decode_tensors(path.read_bytes(), checked=False)
    if meta.get("sum") != sum_of_tensors(tensors):
        raise StoreCorrupt(f"{path.name} is not what the worker wrote")
    return tensors


def sum_of_tensors(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a checksum over names, dtypes, shapes and bytes of contiguous tensors on the host."""
    table = repr([(name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())])
    return sum_of(table.encode()) + sum(sum_of(codec.raw_bytes(tensor)) for tensor in tensors.values())


def _remove(folder: Path, lock: int, pid: int) -> None:
    """Remove a transport's folder; a forked child that exits leaves its parent's alone."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
