"""The side of vLLM's processes of the transport between processes; see `shared_memory` for its files."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ctxwin.engines.vllm.lifecycle import watchdog
from ctxwin.engines.vllm.lifecycle.folders import read_json, write_file, write_json
from ctxwin.engines.vllm.ranks import own_heads
from ctxwin.engines.vllm.transport.base import Endpoint, Job, Save, is_handle, overlaps
from ctxwin.engines.vllm.transport.shared_memory import DRAFTED, check_room, sum_of
from ctxwin.errors import StoreCorrupt, UnsupportedModel
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.kernels import Part
from ctxwin.kv.layout import KVSpec, SpanKV, outputs_in
from ctxwin.kv.patch import Patch
from ctxwin.kv.states import States, named, states_in
from ctxwin.store import codec
from ctxwin.store.narrow import widened
from ctxwin.store.recent import Recent

LIVE_BYTES = 512 << 20
"""Decoded spans and patches that each endpoint remembers."""
_MOST_JOBS = 4096
_SPEC, _JOB = TypeAdapter(KVSpec), TypeAdapter(Job)
_log = logging.getLogger("ctxwin.engines")


class SharedMemoryEndpoint(Endpoint):
    """The side of vLLM's processes: the scheduler reads jobs, workers read spans and write captures."""

    def __init__(self, source: str) -> None:
        self.path = Path(source)
        raw = read_json(self.path / "spec.json")
        if raw is None:
            raise RuntimeError(f"the ctxwin KV connector must find {self.path / 'spec.json'}; was its engine closed?")
        self.kv = _SPEC.validate_python(raw)
        self._rank = 0
        self._jobs: Recent[Job] = Recent(_MOST_JOBS)  # vLLM asks about a waiting request in every step
        self._live: Recent[Any] = Recent(LIVE_BYTES)

    def job(self, handle: str) -> Job | None:
        """As `Endpoint.job`. Cost: one read for each handle, then a stat."""
        if not is_handle(handle) or not self._wanted(handle):
            self._jobs.pop(handle)
            return None
        known = self._jobs.get(handle)
        raw = read_json(self.path / f"job-{handle}.json") if known is None else None
        if raw is not None:
            known = _JOB.validate_python(raw["job"])
            self._jobs.put(handle, known, 1)
        return known

    def seen(self, handle: str, local: int, planned: int) -> None:
        self._tell(handle, f"seen-{handle}.json", {"local": local, "planned": planned})

    def fail(self, handle: str, error: BaseException) -> None:
        self._tell(handle, f"error-{handle}.json", {"error": f"{type(error).__name__}: {error}"})

    def refuse(self, error: BaseException) -> None:
        write_json(self.path / "refused.json", {"error": str(error)})

    def open_cache(
        self, layers: Mapping[str, Any], block_size: int, groups: Sequence[Sequence[str]], speculative: Any = None
    ) -> None:
        from ctxwin.engines.vllm.drafter import DrafterKV, drafter_spec, split
        from ctxwin.engines.vllm.internals import pipeline, stage_layers, tensor_parallel
        from ctxwin.engines.vllm.paged import PagedKV
        from ctxwin.engines.vllm.paged_states import PagedStates

        try:
            (rank, size), (stage, stages) = tensor_parallel(), pipeline()
            if stages > 1 and self.kv.kinds:
                raise UnsupportedModel(
                    f"pipeline_parallel_size must be 1 for a model whose layers are of several kinds, got {stages}; serve it "
                    "by tensor_parallel_size or from replicas"
                )
            self._rank = stage * size + rank
            self.heads = own_heads(self.kv.heads, rank, size)
            here = stage_layers(self.kv.layers, stage, stages)
            own = replace(self.kv, layers=len(here), heads=self.heads.stop - self.heads.start)
            self.states = PagedStates(layers, groups, self.kv.maps) if self.kv.recurrent else None
            drafted = drafter_spec(speculative, self.kv)
            if drafted is not None:
                layers, theirs = split(layers, self.kv.layers)
                self.drafter = DrafterKV(theirs, drafted, block_size, rank, size)
            self.paged = PagedKV(layers, own, block_size, first=here.start)
        except Exception as error:
            self.refuse(error)
            raise

    def parts(self, handle: str, begin: int, end: int) -> list[Part]:
        raw = read_json(self.path / f"job-{handle}.json") if is_handle(handle) else None
        if raw is None:
            raise LookupError("the transfer was taken back")
        entries = raw["loads"]
        found = []
        for i, first, last in overlaps((entry["tokens"] for entry in entries), begin, end):
            entry = entries[i]
            basis = entry["basis"] and self._get(entry["basis"], lambda t, m: SharedBasis.from_tensors(t, m["basis"]))
            patch = entry["patch"] and self._get(entry["patch"], partial(_patch, basis))
            span = self._get(entry["span"], _span)
            if span.tokens != entry["tokens"]:
                raise ValueError(f"{entry['span'][0]} must hold {entry['tokens']} tokens, got {span.tokens}")
            found.append(Part(span, entry["start"], patch, first, last, entry["approximate"]))
        return found

    def read_now(self, save: Save, job: Job) -> bool:
        missing = sorted(set(job.captures) - set(save.ranges))
        if missing:
            self.fail(save.handle, RuntimeError(f"the request ended before {missing} were computed"))
        return bool(missing)

    def save(self, save: Save) -> None:
        try:
            assert self.paged is not None
            for name, (begin, end) in save.ranges.items():
                k, v = self.paged.read(save.blocks, begin, end)
                here = self.states is not None and end == save.computed
                states = self.states.read(save.states) if here and self.states is not None else {}
                drafted = None if self.drafter is None else self.drafter.paged.read(save.blocks, begin, end)
                self.give(save.handle, name, k, v, states, drafted)
        except Exception as error:
            self.fail(save.handle, error)
            _log.warning("reading spans back from the paged cache failed: %s", error)

    def give(
        self,
        handle: str,
        name: str,
        k: torch.Tensor,
        v: torch.Tensor,
        states: States | None = None,
        drafted: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Returns a capture (this rank's heads). Raises OSError where there is no room for it."""
        if self._wanted(handle):
            beside = {} if drafted is None else dict(zip(DRAFTED, drafted, strict=True))
            blob = codec.encode_tensors({"k": k, "v": v, **beside, **named(states or {})})
            check_room(self.path, len(blob))
            self._report(handle, f"out-{handle}-{name}.{self._rank}", blob)

    def _wanted(self, handle: str) -> bool:
        return (self.path / f"job-{handle}.json").exists()

    def _tell(self, handle: str, name: str, said: dict[str, Any]) -> None:
        """Reports where it can: an error here, on a full disk for example, would end vLLM for everybody.

        Untold, the request ends with vLLM's word alone, or misses its media or captures.
        """
        try:
            self._report(handle, name, json.dumps(said).encode())
        except OSError as error:
            _log.warning("%s could not be written for the engine: %s", name.partition("-")[0], error)

    def _report(self, handle: str, name: str, data: bytes) -> None:
        """Writes a file of a job, and removes it again if the engine, which removes the job first, has meanwhile done so."""
        write_file(self.path / name, data)
        if not self._wanted(handle):
            (self.path / name).unlink(missing_ok=True)

    def _get(self, file: tuple[str, int], make: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> Any:
        """A record, made from its file's tensors and meta. Raises OSError or StoreCorrupt. Cost: a read, or a stat."""
        name, total = file
        path = self.path / name
        key = f"{name}@{path.stat().st_mtime_ns}"  # a file that was written anew is read anew
        record = self._live.get(key)
        if record is None:
            blob = path.read_bytes()
            if sum_of(blob) != total:
                raise StoreCorrupt(f"{name} is not what the engine wrote")
            try:
                record = make(*codec.decode_tensors(blob, checked=False))
            except (KeyError, TypeError, ValueError) as error:
                raise StoreCorrupt(f"{name} is not what it is called: {error}") from error
            self._live.put(key, record, len(blob))
        return record


_endpoints: weakref.WeakValueDictionary[str, SharedMemoryEndpoint] = weakref.WeakValueDictionary()


def open_endpoint(source: str) -> SharedMemoryEndpoint:
    """The endpoint of this process, which from now on ends soon after the engine's, see `watchdog`.

    Raises RuntimeError where the transport is gone.
    """
    found = _endpoints.get(source)
    if found is None:
        _endpoints[source] = found = SharedMemoryEndpoint(source)
        watchdog.end_with_owner(found.path)
    return found


def _span(tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> SpanKV:
    tensors = widened(tensors, meta)
    kv = tensors["k"], tensors["v"], tensors["positions"]
    return SpanKV(*kv, int(meta["start"]), outputs_in(tensors), states_in(tensors))


def _patch(basis: SharedBasis | None, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> Patch:
    return Patch.from_tensors(tensors, meta["patch"], basis)
