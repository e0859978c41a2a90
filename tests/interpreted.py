"""vLLM engines that serve from resident copies of spans, by the Triton load kernel under Triton's interpreter or in its place."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxwin.kv.kernels import CacheStrides, SpanSlice, api, choice
from ctxwin.kv.kernels.cpu import CpuKernel
from ctxwin.kv.kernels.load_stream import LoadStream
from ctxwin.kv.kernels.parts import Heads
from ctxwin.kv.layout import KVSpec

PACKAGE = "ctxwin.kv.kernels"


class Count:
    """A number that is counted in forked processes, too."""

    def __init__(self) -> None:
        self._value = multiprocessing.Value("q", 0)

    def add(self, count: int) -> None:
        with self._value.get_lock():
            self._value.value += count

    @property
    def value(self) -> int:
        return self._value.value


class LateLoads(LoadStream):
    """A stream on a processor that writes as late as it may: as a layer is waited for, or in the background some steps later."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._queued: list[tuple[Callable[[], object], set[str]]] = []
        self._later: list[Callable[[], object]] = []
        self.awaited = Count()

    def queue(self, write: Callable[[], object], layers: Any) -> None:
        if self._background:
            self._later.append(write)
        else:
            self._queued.append((write, set(layers)))
            self._written |= dict.fromkeys(layers, super().event())
            self._missed.update(layers)

    def wait(self, layer: str) -> None:
        super().wait(layer)
        while any(layer in layers for _, layers in self._queued):
            self.awaited.add(1)
            self._queued.pop(0)[0]()

    def wait_all(self) -> None:
        for write, _ in self._queued:
            write()
        self._queued.clear()

    def finish(self) -> bool:
        self.wait_all()
        return super().finish()

    def event(self, *, loads: bool = False) -> Any:
        if not loads or (not self._later and not self._queued):
            return super().event(loads=loads)
        writes, self._later, asked = self._later, [], itertools.count(1)

        def write_all() -> None:
            while writes:
                writes.pop(0)()

        def synchronize() -> None:
            write_all()
            self.wait_all()

        def query() -> bool:
            if written := next(asked) >= 3:
                write_all()
            return written

        return SimpleNamespace(query=query, synchronize=synchronize)


@contextlib.contextmanager
def interpreted_kernel() -> Iterator[Any]:
    """Give `TritonKernel`, its program bound to the interpreter, which Triton decides when the module is imported."""
    names = [f"{PACKAGE}.fused", f"{PACKAGE}.triton_kernel"]
    package = importlib.import_module(PACKAGE)

    def forget() -> None:
        for name in names:
            sys.modules.pop(name, None)
            vars(package).pop(name.rpartition(".")[2], None)

    forget()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            module = importlib.import_module(names[1])
        assert module.interpreted()
        yield module.TritonKernel
    finally:
        forget()


class CopiesKernel(CpuKernel):
    """Torch operators in the place of `TritonKernel`: they read resident copies and write paged caches as well, faster than the
    interpreter."""

    def __init__(self, parts: Sequence[SpanSlice], spec: KVSpec, *, heads: Heads, **options: Any) -> None:
        def copied(part: SpanSlice) -> SpanSlice:
            kv, first = {}, getattr(part.resident, "first", 0)
            for name, rows in (("k", part.resident.k), ("v", part.resident.v)) if part.resident else ():
                kv[name] = torch.full(getattr(part.span, name).shape, torch.nan, dtype=rows.dtype)
                kv[name][first : first + len(rows), :, slice(*heads)] = rows
            return replace(part, span=replace(part.span, **kv)) if kv else part

        super().__init__([copied(part) for part in parts], spec, heads=heads, **options)

    def store(self, first: int, caches: Sequence[torch.Tensor], strides: CacheStrides, slots: torch.Tensor) -> None:
        size = strides.block_size
        for i, cache in enumerate(caches, first):
            for rows, (begin, *steps) in zip(self.layer(i), (strides.k, strides.v), strict=True):
                placed = cache.as_strided((len(cache), size, *rows.shape[1:]), steps, cache.storage_offset() + begin)
                placed[slots // size, slots % size] = rows


@contextlib.contextmanager
def resident_copies(open_engine: Callable[[], Any], max_bytes: int = 1 << 28, interpret: bool = True) -> Iterator[Any]:
    """Open vLLM as on a GPU: it keeps copies of spans, loads from them by the kernel of one, late, schedules ahead and writes its
    store behind answers; in processes of its own as well, which are forked.

    ``interpret``: whether that is Triton's, else `CopiesKernel`. It counts the ``copies_served``, those that the host had no part
    in (``kept_served``) and ``bytes_copied`` from the host; it serves at least one, and is closed in the end.
    """
    from vllm.platforms.cpu import CpuPlatform

    from ctxwin_vllm import engine as engines
    from ctxwin_vllm.paged import STREAMS
    from ctxwin_vllm.resident import RESIDENT_BYTES, ResidentSpans

    attach, repository, configure = ResidentSpans.attach, engines.SpanRepository, CpuPlatform.check_and_update_config

    def behind(*args: Any, **options: Any) -> Any:
        return repository(*args, **{**options, "behind": True})

    def configured(config: Any) -> None:
        ahead = config.scheduler_config.async_scheduling is not False  # vLLM's default, but on a CPU
        configure(config)
        config.scheduler_config.async_scheduling = ahead
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # a spawned one would have none of this

    served, kept, copied = Count(), Count(), Count()

    def attached(self: ResidentSpans, parts: Any, heads: Any = None) -> Any:
        before = self.copied_bytes
        made = attach(self, parts, heads)
        copied.add(self.copied_bytes - before)
        served.add(sum(part.resident is not None for part in made))
        kept.add(sum(part.span.k.is_meta for part in made))
        return made

    with contextlib.ExitStack() as kernel, pytest.MonkeyPatch.context() as patch:
        if interpret:
            kernel.enter_context(interpreted_kernel())
        else:
            load_class = choice.load_class
            patch.setattr(api, "load_class", lambda name: CopiesKernel if name == "triton" else load_class(name))
        patch.setenv(choice.KERNEL, "triton")
        patch.setenv(RESIDENT_BYTES, str(max_bytes))
        patch.setattr(ResidentSpans, "attach", attached)
        patch.setattr(engines, "SpanRepository", behind)
        patch.setitem(STREAMS, torch.device("cpu"), loads := LateLoads(torch.device("cpu")))
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(configured))
        engine = open_engine()
        engine.copies_served, engine.kept_served, engine.bytes_copied = served, kept, copied
        try:
            yield engine
            config = engine._core.driver.config
            assert config.scheduler_config.async_scheduling or config.parallel_config.pipeline_parallel_size > 1
            assert served.value
            if engine._core.driver.local:
                paged = engine._core.transport.paged
                assert paged.kernel == "triton" and paged.direct, "the kernel writes the paged cache"
                assert paged.loads is loads and loads.awaited.value and 0 < paged.resident.nbytes <= max_bytes
            else:
                assert kept.value
        finally:
            engine.close()
