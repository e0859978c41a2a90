"""Chunk data for vLLM's other processes: files in shared memory, named in a job file under an unguessable handle.

A `Spool` belongs to the process of the engine, a `SpoolReader` to each process of vLLM that runs the connector. Nothing is
pickled: KV travels as the store's checked blobs (`ctxwin.store.codec`), instructions as JSON.

| file                    | written by | content                                                       |
|-------------------------|------------|---------------------------------------------------------------|
| ``spec.json``           | engine     | the model's `KVSpec`                                          |
| ``span-<digest>-<n>``   | engine     | a span, by the id of its KV; kept while there is room         |
| ``patch-<digest>-<n>``  | engine     | a patch; one over a shared basis names it                     |
| ``basis-<digest>-<n>``  | engine     | a shared basis, once for all its patches                      |
| ``embed/``              | engine     | vision embeddings for the EC connector (`ecfiles`)            |
| ``job-<handle>.json``   | engine     | one `Transfer`: `Job`, and where each span goes               |
| ``seen-<handle>.json``  | scheduler  | tokens it found in its own prefix cache, tokens it wants      |
| ``out-<handle>-<name>.<rank>`` | worker | a capture, the KV heads of one rank                       |
| ``error-<handle>.json`` | worker     | why a load or a capture failed                                |
| ``refused.json``        | worker     | why the model's cache cannot be served, at start-up           |
| ``lock``                | engine     | nothing; locked as long as the spool is used                  |

Every file is written under another name and renamed, so that a reader sees all of it or nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.engines.vllm import ecfiles
from ctxwin.engines.vllm.lifecycle import watchdog
from ctxwin.engines.vllm.lifecycle.folders import LOCK, PREFIX, read_json, shared_memory, sweep, write_file
from ctxwin.engines.vllm.transfers import Job, Placed, Transfer, is_handle, new_handle
from ctxwin.errors import EngineFailed, StoreCorrupt
from ctxwin.hashing import digest
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.store import codec

if TYPE_CHECKING:
    import torch

    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.patch import Patch

SPOOL = "ctxwin_spool"
"""Key of the spool's folder inside the connector's extra config; absent where everything is one process."""
MAX_BYTES = 2 << 30
"""Spans and patches kept in a spool unless told otherwise, or half of what the folder's file system has free."""
LIVE_BYTES = 512 << 20
"""Decoded spans and patches that each reader keeps at hand."""
WAIT_S = 120.0
"""How long a capture may take after its request has ended: a step of the other requests of the batch."""
_EMBEDDINGS = "embed"
_MOST_JOBS = 4096
_log = logging.getLogger("ctxwin.engines")


class Spool:
    """The engine's side.

    Args:
        kv: layout of the model's KV (all heads).
        folder: where the spool is made; shared memory by default.
        max_bytes: bound on the spans and patches kept for later requests. Those of running requests always stay.

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
            raise EngineFailed(f"the spool folder {str(root)!r} must be writable: {error}") from error
        self.kv = kv
        self.max_bytes = min(MAX_BYTES, free // 2) if max_bytes is None else max_bytes
        self.alive: Callable[[], bool] = lambda: True  # set by the engine: whether vLLM's processes still run
        self.ranks = 1
        self._held: OrderedDict[str, int] = OrderedDict()  # bytes by file name, least recently used first
        self._used: Counter[str] = Counter()  # running jobs by file name
        self._jobs: dict[str, tuple[list[str], tuple[str, ...]]] = {}  # files and captures of running transfers
        self._named: dict[str, tuple[str, weakref.ref[torch.Tensor] | None]] = {}  # file and tensor by kind and id
        self._serial = itertools.count()
        self._bytes = 0
        self._lock = threading.Lock()
        # Also when it is collected, and when the interpreter ends.
        self._remove = weakref.finalize(self, _remove, self.path, held, os.getpid())
        self.embeddings = self.path / _EMBEDDINGS
        self.embeddings.mkdir()
        write_file(self.path / "spec.json", json.dumps(asdict(kv)).encode())

    @property
    def name(self) -> watchdog.Lifeline:
        """What the connector's extra config holds; vLLM's processes that get it end with this one."""
        return watchdog.Lifeline(str(self.path))

    def __len__(self) -> int:
        """Transfers that have not been removed."""
        with self._lock:
            return len(self._jobs)

    def add(self, transfer: Transfer) -> str:
        """Writes a transfer and what it needs; returns its handle.

        Raises OSError where there is no room. Cost: one write of each span that no earlier transfer brought.
        """
        handle = new_handle()
        names: list[str] = []
        try:
            entries = []
            for placed in transfer.loads:
                span = self._file("span", placed, handle, names)
                patch = None if placed.patch is None else self._file("patch", placed, handle, names)
                over = placed.patch is not None and placed.patch.basis is not None
                entries.append(
                    {
                        "begin": placed.begin,
                        "tokens": placed.span.tokens,
                        "start": placed.start,
                        "span": span,
                        "patch": patch,
                        "basis": self._file("basis", placed, handle, names) if over else None,
                    }
                )
            for identifier, tensor in transfer.embeddings.items():
                self._embedding(identifier, tensor, names)
            job = {"job": asdict(transfer.job), "loads": entries}
            write_file(self.path / f"job-{handle}.json", json.dumps(job).encode())
        except BaseException:
            self._unlease(names, handle)
            raise
        with self._lock:
            self._jobs[handle] = names, tuple(transfer.captures)
        return handle

    def collect(self, handle: str, transfer: Transfer, finished: bool) -> None:
        """Brings what vLLM's processes reported into ``transfer``; waits for its captures where it ended well."""
        seen = read_json(self.path / f"seen-{handle}.json")
        if seen is not None:
            transfer.local_tokens, transfer.planned_tokens = int(seen["local"]), int(seen["planned"])
        self._failed(handle, transfer)
        if transfer.error is not None or not finished:
            # What was handed over for it may be what is broken: the next request writes it anew. Of embeddings that
            # cannot be used nobody says so: vLLM just ends the request.
            self._forget(handle)
        if transfer.error is not None:
            return
        transfer.loaded_tokens = transfer.planned_tokens
        transfer.bytes_loaded = transfer.planned_tokens * self.kv.token_bytes
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

    # -- inside ------------------------------------------------------------------------------------------------------

    def _file(self, kind: str, placed: Placed, handle: str, names: list[str]) -> str:
        """The name of a span's, patch's or basis' file, written where it is not there, and leased into ``names``."""
        known_as, tensor, encode = placed.id, placed.span.k, partial(encode_span, placed.span)
        if kind == "patch":
            assert placed.patch is not None
            known_as, tensor, encode = placed.patch_id, placed.patch.left, partial(encode_patch, placed.patch)
        elif kind == "basis":
            assert placed.patch is not None and placed.patch.basis is not None
            basis = placed.patch.basis
            known_as, tensor, encode = basis.id, basis.right, partial(encode_basis, basis)
        key = f"{kind}-{digest('spool', known_as)}" if known_as else f"{kind}-{handle}-{placed.begin}"
        with self._lock:
            name, at_hand = self._named.get(key, ("", None))
            # The very tensor that was written: a name alone would trust every caller to use it once only.
            known = name in self._held and at_hand is not None and at_hand() is tensor
            if not known:
                name = f"{key}-{next(self._serial)}"
                self._named[key] = name, weakref.ref(tensor)
            self._used[name] += 1
            names.append(name)
            if known:
                self._held.move_to_end(name)
        if known and (self.path / name).exists():
            return name
        self._put(name, encode())
        return name

    def _embedding(self, identifier: str, tensor: torch.Tensor, names: list[str]) -> None:
        """Vision embeddings where vLLM's EC connector looks for them; their name is a digest of their content."""
        name = f"{_EMBEDDINGS}/{ecfiles.file_name(identifier)}"
        with self._lock:
            known = name in self._held
            self._used[name] += 1
            names.append(name)
            if known:
                self._held.move_to_end(name)
        if not (known and (self.path / name).exists()):
            self._put(name, ecfiles.encode(tensor, self.kv.identity))

    def _put(self, name: str, blob: bytes) -> None:
        self._make_room(len(blob))
        write_file(self.path / name, blob)
        with self._lock:
            self._bytes += len(blob) - self._held.pop(name, 0)
            self._held[name] = len(blob)

    def _make_room(self, size: int) -> None:
        with self._lock:
            for name in [n for n in self._held if not self._used[n]]:
                if self._bytes + size <= self.max_bytes:
                    break
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._bytes -= self._held.pop(name, 0)
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

    def _forget(self, handle: str) -> None:
        with self._lock:
            for name in self._jobs.get(handle, ((), ()))[0]:
                if self._used[name] <= 1:
                    self._drop(name)

    def _failed(self, handle: str, transfer: Transfer) -> None:
        error = read_json(self.path / f"error-{handle}.json")
        if error is not None and transfer.error is None:
            transfer.error = RuntimeError(str(error["error"]))

    def _await_capture(self, handle: str, name: str, transfer: Transfer, until: float) -> None:
        """Polls: a rename in shared memory tells nobody, and the file is there within a step."""
        from ctxwin.engines.vllm.ranks import gather

        paths = [self.path / f"out-{handle}-{name}.{rank}" for rank in range(self.ranks)]
        pause = 0.0002
        while not all(path.exists() for path in paths):
            self._failed(handle, transfer)
            if transfer.error is not None:
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
        heads = self.kv.heads
        transfer.captured[name] = gather([p["k"] for p in parts], heads), gather([p["v"] for p in parts], heads)


@dataclass(frozen=True)
class SpoolLoad:
    """One span of a job as the worker reads it: see `Placed`, with names of files for tensors."""

    begin: int
    tokens: int
    start: int
    span: str
    patch: str | None
    basis: str | None = None


class SpoolReader:
    """The side of vLLM's processes: the scheduler reads jobs, workers read spans and write captures."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        raw = read_json(self.path / "spec.json")
        if raw is None:
            raise RuntimeError(f"the ctxwin KV connector must find {self.path / 'spec.json'}; was its engine closed?")
        rope: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.pop("rope").items()}
        self.kv = KVSpec(**raw, rope=RopeSpec(**rope))
        self._jobs: OrderedDict[str, Job] = OrderedDict()  # of a request that waits, vLLM asks in every step
        self._live: OrderedDict[tuple[str, int], tuple[Any, int]] = OrderedDict()
        self._live_bytes = 0

    def end_with_engine(self) -> None:
        """Ends this process soon after the engine's, where it does not watch for that already; see `watch`."""
        watchdog.end_with_owner(self.path)

    def job(self, handle: str) -> Job | None:
        """None for a handle whose job is not there (any more). Cost: one read for each handle, then a stat."""
        if not is_handle(handle):
            return None
        if not self._wanted(handle):
            self._jobs.pop(handle, None)
            return None
        known = self._jobs.get(handle)
        if known is not None:
            return known
        raw = self._raw(handle)
        if raw is None:
            return None
        job = raw["job"]
        captures = {str(k): (int(v[0]), None if v[1] is None else int(v[1])) for k, v in job.pop("captures").items()}
        self._jobs[handle] = made = Job(**job, captures=captures)
        while len(self._jobs) > _MOST_JOBS:
            self._jobs.popitem(last=False)
        return made

    def loads(self, handle: str) -> list[SpoolLoad]:
        """What to load; raises LookupError where the job is gone."""
        raw = self._raw(handle)
        if raw is None:
            raise LookupError("the transfer was taken back")
        return [SpoolLoad(**entry) for entry in raw["loads"]]

    def span(self, name: str) -> SpanKV:
        """Raises FileNotFoundError or StoreCorrupt. Cost: a read and a SHA-256, nothing while it is at hand."""
        found: SpanKV = self._get(name, decode_span)
        return found

    def patch(self, name: str, basis: str | None = None) -> Patch:
        """As `span`; ``basis``: the file of the shared basis that the patch lies over."""
        over: SharedBasis | None = None if basis is None else self._get(basis, decode_basis)
        found: Patch = self._get(name, partial(decode_patch, basis=over))
        return found

    def seen(self, handle: str, local: int, planned: int) -> None:
        """Tells the engine what the scheduler counts on."""
        self._tell(handle, f"seen-{handle}.json", {"local": local, "planned": planned})

    def give(self, handle: str, name: str, rank: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Hands a capture (this rank's heads) back. Raises OSError where there is no room for it."""
        if self._wanted(handle):
            self._report(handle, f"out-{handle}-{name}.{rank}", codec.encode_tensors({"k": k, "v": v}))

    def fail(self, handle: str, error: BaseException) -> None:
        """Tells the engine why what it waits for does not come."""
        self._tell(handle, f"error-{handle}.json", {"error": f"{type(error).__name__}: {error}"})

    def refuse(self, error: BaseException) -> None:
        """Tells the engine why this process cannot serve its model; it dies of ``error`` next."""
        write_file(self.path / "refused.json", json.dumps({"error": str(error)}).encode())

    def _wanted(self, handle: str) -> bool:
        return (self.path / f"job-{handle}.json").exists()

    def _tell(self, handle: str, name: str, said: dict[str, Any]) -> None:
        """Reports where it can: an error here, on a full disk for example, would end vLLM for everybody. The request goes
        without: it ends with vLLM's word alone, or has its media or captures missed."""
        try:
            self._report(handle, name, json.dumps(said).encode())
        except OSError as error:
            _log.warning("%s could not be written for the engine: %s", name.partition("-")[0], error)

    def _report(self, handle: str, name: str, data: bytes) -> None:
        """Writes a file of a job. The engine removes the job first: who finds it there afterwards leaves no file behind."""
        write_file(self.path / name, data)
        if not self._wanted(handle):
            (self.path / name).unlink(missing_ok=True)

    def _raw(self, handle: str) -> dict[str, Any] | None:
        return read_json(self.path / f"job-{handle}.json") if is_handle(handle) else None

    def _get(self, name: str, decode: Callable[[bytes], Any]) -> Any:
        path = self.path / name
        key = name, path.stat().st_mtime_ns  # a file that was written anew is read anew
        found = self._live.get(key)
        if found is not None:
            self._live.move_to_end(key)
            return found[0]
        blob = path.read_bytes()
        record = decode(blob)
        self._live[key] = record, len(blob)
        self._live_bytes += len(blob)
        while self._live_bytes > LIVE_BYTES and len(self._live) > 1:
            _, (_, size) = self._live.popitem(last=False)
            self._live_bytes -= size
        return record


def refusal(spool: Spool) -> str | None:
    """What a worker said in `SpoolReader.refuse`."""
    found = read_json(spool.path / "refused.json")
    return None if found is None else str(found["error"])


def encode_span(span: SpanKV) -> bytes:
    return codec.encode_tensors({"k": span.k, "v": span.v, "positions": span.positions}, {"start": span.start})


def decode_span(blob: bytes) -> SpanKV:
    """Raises StoreCorrupt."""
    tensors, meta = codec.decode_tensors(blob)
    try:
        return SpanKV(tensors["k"], tensors["v"], tensors["positions"], int(meta["start"]))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"a file of the spool is no span: {error!r}") from error


def encode_patch(patch: Patch) -> bytes:
    """A patch without its shared basis, which `encode_basis` makes a file of for all its patches."""
    return codec.encode_tensors(patch.tensors(), {"patch": patch.describe()})


def decode_patch(blob: bytes, basis: SharedBasis | None = None) -> Patch:
    """Raises StoreCorrupt, also where ``basis`` is not the one that the patch was projected on."""
    from ctxwin.kv.patch import Patch

    tensors, meta = codec.decode_tensors(blob)
    try:
        return Patch.from_tensors(tensors, meta["patch"], basis)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"a file of the spool is no patch: {error!r}") from error


def encode_basis(basis: SharedBasis) -> bytes:
    return codec.encode_tensors(basis.tensors(), {"basis": basis.describe()})


def decode_basis(blob: bytes) -> SharedBasis:
    """Raises StoreCorrupt."""
    from ctxwin.kv.basis import SharedBasis

    tensors, meta = codec.decode_tensors(blob)
    try:
        return SharedBasis.from_tensors(tensors, meta["basis"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupt(f"a file of the spool is no shared basis: {error!r}") from error


def _remove(folder: Path, held: int, pid: int) -> None:
    """Ends a spool; a forked child that exits leaves its parent's alone."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
