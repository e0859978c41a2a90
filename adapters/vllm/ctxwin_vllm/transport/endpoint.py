"""vLLM's side of the transport between processes; see `shared_memory` for its files."""

import json
import logging
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from ctxwin.errors import StoreCorrupt
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.kernels import SpanSlice
from ctxwin.kv.kernels.staging import to_host
from ctxwin.kv.layout import KVSpec, SpanKV, SpanOrigin, outputs_in
from ctxwin.kv.patch import Patch
from ctxwin.kv.states import states_in
from ctxwin.store import codec
from ctxwin.store.fp8 import unpack_fp8
from ctxwin.store.lru import LRUCache
from ctxwin_vllm.lifecycle import watchdog
from ctxwin_vllm.lifecycle.folders import read_json, sum_of, write_file, write_json
from ctxwin_vllm.resident import Selection
from ctxwin_vllm.transport.base import SLOTS, SUMS, Endpoint, RequestMeta, SaveSpec, blank_span, is_handle, overlaps
from ctxwin_vllm.transport.shared_memory import check_room, sum_of_tensors

LIVE_BYTES = 2 << 30
"""Spans and patches that each endpoint keeps decoded. They are mapped, not copied: the memory is the folder's. Factors in
few bits are unpacked, and count for both."""
_LEAST_BYTES = 32 << 10  # counted for a record at least, since a process may have some 65,000 mappings
_CHECKED = 4
"""Entries looked up in the folder for each new one; more than one, so that those that are gone do not add up."""
_MAX_REQUESTS = 4096
_WRITES = 8  # reads that wait for the thread that writes them, each of up to `SAVE_BYTES` of the device's memory
_SPEC, _META = TypeAdapter(KVSpec), TypeAdapter(RequestMeta)
V = TypeVar("V")
_log = logging.getLogger("ctxwin.engines")


class _FileCache(LRUCache[V]):
    """What was read of files that the engine removes, which ``exists`` tells of a key."""

    def __init__(self, max_bytes: int, exists: Callable[[str], bool]) -> None:
        super().__init__(max_bytes)
        self._exists = exists
        self._to_check: Iterator[str] = iter(())

    def drop_removed(self) -> None:
        """Drop entries whose files are gone, a few at a time: their memory is in use until then."""
        for _ in range(_CHECKED):
            key = next(self._to_check, None)
            if key is None:
                self._to_check = iter([key for key, _ in self.items()])
                return
            if not self._exists(key):
                self.pop(key)


class SharedMemoryEndpoint(Endpoint):
    """vLLM's side: the scheduler reads request metadata, workers read spans and write captures."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.path = Path(source)
        raw = read_json(self.path / "spec.json")
        if raw is None:
            raise RuntimeError(f"the ctxwin KV connector must find {self.path / 'spec.json'}; was its engine closed?")
        self.kv = _SPEC.validate_python(raw)
        self._writer, self._writing = ThreadPoolExecutor(1, "ctxwin-write"), deque[Future[None]]()
        # vLLM looks up a waiting request in every step.
        self._requests: _FileCache[RequestMeta] = _FileCache(_MAX_REQUESTS, self._exists)
        self._kept: _FileCache[SpanOrigin] = _FileCache(sys.maxsize, lambda file: (self.path / file).exists())
        self._live: _FileCache[Any] = _FileCache(LIVE_BYTES, lambda key: (self.path / key.rpartition("@")[0]).exists())

    def request_meta(self, handle: str) -> RequestMeta | None:
        """As `Endpoint.request_meta`. Cost: one read for each handle, then a stat."""
        if not is_handle(handle) or not self._exists(handle):
            self._requests.pop(handle)
            return None
        meta = self._requests.get(handle)
        raw = read_json(self.path / f"job-{handle}.json") if meta is None else None
        if raw is not None:
            self._requests.drop_removed()
            meta = _META.validate_python(raw["job"])
            self._requests.put(handle, meta, 1)
        return meta

    def awaits(self, handle: str) -> bool:
        return os.access(f"{self.path}/reserved-{handle}", os.F_OK)

    def report_hit(self, handle: str, local: int, planned: int) -> None:
        self._try_report(handle, f"seen-{handle}.json", {"local": local, "planned": planned})

    def fail(self, handle: str, error: BaseException) -> None:
        self._try_report(handle, f"error-{handle}.json", {"error": f"{type(error).__name__}: {error}"})

    def refuse(self, error: BaseException) -> None:
        write_json(self.path / "refused.json", {"error": str(error)})

    def parts(self, handle: str, begin: int, end: int) -> list[SpanSlice]:
        raw = read_json(self.path / f"job-{handle}.json") if is_handle(handle) else None
        if raw is None:
            raise LookupError("the transfer was removed")
        entries, ahead = raw["loads"], raw["job"]["expected_hit"]
        slices = []
        for i, first, last in overlaps((entry["tokens"] for entry in entries), begin - ahead, end - ahead):
            entry = entries[i]
            basis = entry["basis"] and self._get(entry["basis"], lambda t, m: SharedBasis.from_tensors(t, m["basis"]))
            patch = entry["patch"] and self._get(entry["patch"], partial(_patch, basis))
            span = self._get(entry["span"], self._span)
            if span.tokens != entry["tokens"]:
                raise ValueError(f"{entry['span'][0]} must hold {entry['tokens']} tokens, got {span.tokens}")
            slices.append(SpanSlice(span, entry["start"], patch, first, last, entry["approximate"]))
        return slices

    def read_now(self, save: SaveSpec, job: RequestMeta) -> bool:
        missing = sorted(set(job.captures) - set(save.ranges))
        if missing:
            self.fail(save.handle, RuntimeError(f"the request ended before {missing} were computed"))
        return bool(missing)

    def save(self, save: SaveSpec) -> None:
        with self._failing(save.handle):
            assert self.paged is not None
            captures = [(name, self.read(save, name)) for name in save.ranges]
            read = self.paged.loads.event()
            if self.behind:
                self.flush(_WRITES - 1)
                self._writing.append(self._writer.submit(self._write, save.handle, captures, read))
            else:
                self._write(save.handle, captures, read)

    def flush(self, most: int = 0) -> None:
        while len(self._writing) > most:
            self._writing.popleft().result()

    def _write(self, handle: str, captures: Sequence[tuple[str, dict[str, torch.Tensor]]], read: Any) -> None:
        """Write captures for the engine, once what was queued before ``read`` is done."""
        assert self.paged is not None
        with self._failing(handle), self.paged.loads.reading(read):
            for capture in captures:
                self.write_capture(handle, *capture)

    def write_capture(self, handle: str, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a capture (this rank's heads) for the engine. Raises OSError where there is no room for it."""
        if self._exists(handle):
            hosts = tensors | dict(zip("kv", to_host(tensors["k"], tensors["v"]), strict=True))
            hosts = {key: tensor.to("cpu").contiguous() for key, tensor in hosts.items()}
            pieces = codec.tensor_pieces(hosts, {"sum": sum_of_tensors(hosts)})
            check_room(self.path, sum(map(len, pieces)))
            self._keep(handle, f"kept-{handle}-{name}.{self.rank}", tensors["k"], tensors["v"])
            self._report(handle, f"out-{handle}-{name}.{self.rank}", *pieces)

    def _keep(self, handle: str, file: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep a copy on the device for loads of the span that the engine makes of a capture, as long as its file is there."""
        self._kept.drop_removed()
        self._live.drop_removed()  # they hold origins, too
        origin = SpanOrigin()
        if self.paged is not None and self.paged.keep(origin, k, v, partial(self._forget, file)):
            self._kept.put(file, origin, 1)
            self._try_report(handle, file, {})

    def _forget(self, file: str) -> None:
        self._kept.pop(file)
        (self.path / file).unlink(missing_ok=True)

    @contextmanager
    def _failing(self, handle: str) -> Iterator[None]:
        """Report what fails to the engine, which computes it again."""
        try:
            yield
        except Exception as error:
            self.fail(handle, error)
            _log.warning("reading spans back from the paged cache failed: %s", error)

    def _exists(self, handle: str) -> bool:
        return os.access(f"{self.path}/job-{handle}.json", os.F_OK)  # a path of pathlib's takes longer than the look

    def _try_report(self, handle: str, name: str, report: dict[str, Any]) -> None:
        """Report to the engine, or log why not: an error here, on a full disk for example, would end vLLM for all requests.

        Without the report the request ends with vLLM's own reason, or lacks its media or captures.
        """
        try:
            self._report(handle, name, json.dumps(report).encode())
        except OSError as error:
            _log.warning("%s could not be written for the engine: %s", name.partition("-")[0], error)

    def _report(self, handle: str, name: str, *data: bytes | memoryview) -> None:
        """Write a file of a request, and remove it again if the engine has meanwhile removed the request."""
        write_file(self.path / name, *data)
        if not self._exists(handle):
            (self.path / name).unlink(missing_ok=True)

    def _get(self, file: tuple[str, int], make: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> Any:
        """Return a record, made from its file's tensors and meta. Raises OSError or StoreCorrupt. Cost: a read, or a stat."""
        name, total = file
        path = self.path / name
        key = f"{name}@{path.stat().st_mtime_ns}"  # a file that was rewritten is read again
        record = self._live.get(key)
        if record is None:
            self._live.drop_removed()
            blob = _map(path)
            if sum_of(blob) != total:
                raise StoreCorrupt(f"{name} is not what the engine wrote")
            try:
                record = make(*codec.decode_tensors(blob, checked=False))
            except (KeyError, TypeError, ValueError) as error:
                raise StoreCorrupt(f"{name} is not what it is called: {error}") from error
            size = len(blob) + getattr(record, "unpacked_nbytes", 0)
            self._live.put(key, record, max(size, _LEAST_BYTES))
        return record

    def _span(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> SpanKV:
        tensors, copy = unpack_fp8(tensors, meta), meta.get("copy")
        origin = self._kept.get(f"{copy}.{self.rank}") if copy else SpanOrigin()
        if origin is not None and SLOTS in tensors:
            assert self.paged is not None
            origin = self.paged.select(origin, Selection(tensors[SLOTS], meta["merged"], tensors.get(SUMS)))
        if origin is None:
            raise LookupError("the copy of a span on the device has given way to others")
        start, rest = int(meta["start"]), {"outputs": outputs_in(tensors), "states": states_in(tensors)}
        if copy:
            span = blank_span(self.kv, tensors["positions"], start, "meta", **rest)
        else:
            span = SpanKV(tensors["k"], tensors["v"], tensors["positions"], start, **rest)
        object.__setattr__(span, "origin", origin)
        return span


def _map(path: Path) -> Any:
    """Return a file's bytes, read-only and without a copy. Its writer replaces files and never shortens one."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""


_endpoints: weakref.WeakValueDictionary[str, SharedMemoryEndpoint] = weakref.WeakValueDictionary()


def open_endpoint(source: str) -> SharedMemoryEndpoint:
    """Return the endpoint of this process, which from now on ends soon after the engine's process (see `watchdog`).

    Raises RuntimeError where the transport is gone.
    """
    endpoint = _endpoints.get(source)
    if endpoint is None:
        _endpoints[source] = endpoint = SharedMemoryEndpoint(source)
        watchdog.end_with_owner(endpoint.path)
    return endpoint


def _patch(basis: SharedBasis | None, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> Patch:
    return Patch.from_tensors(tensors, meta["patch"], basis)
