"""The Triton load kernel under Triton's interpreter, and vLLM engines that serve from resident copies of spans by it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PACKAGE = "ctxwin.kv.kernels"


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


@contextlib.contextmanager
def resident_copies(open_engine: Callable[[], Any], max_bytes: int = 1 << 28) -> Iterator[Any]:
    """Open vLLM in this process as on a GPU: it keeps copies of spans, loads from them by the kernel of one, schedules ahead and
    writes its store behind answers.

    It is closed in the end, and must have served from copies.
    """
    from vllm.platforms.cpu import CpuPlatform

    from ctxwin.kv.kernels.choice import KERNEL
    from ctxwin_vllm import engine as engines
    from ctxwin_vllm.resident import RESIDENT_BYTES, ResidentSpans

    served = 0
    attach, repository, configure = ResidentSpans.attach, engines.SpanRepository, CpuPlatform.check_and_update_config

    def behind(*args: Any, **options: Any) -> Any:
        return repository(*args, **{**options, "behind": True})

    def configured(config: Any) -> None:
        ahead = config.scheduler_config.async_scheduling is not False  # vLLM's default, but on a CPU
        configure(config)
        config.scheduler_config.async_scheduling = ahead

    def attached(self: ResidentSpans, parts: Any) -> Any:
        nonlocal served
        made = attach(self, parts)
        served += sum(part.resident is not None for part in made)
        return made

    with interpreted_kernel(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNEL, "triton")
        patch.setenv(RESIDENT_BYTES, str(max_bytes))
        patch.setattr(ResidentSpans, "attach", attached)
        patch.setattr(engines, "SpanRepository", behind)
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(configured))
        engine = open_engine()
        try:
            yield engine
            assert engine._core.driver.config.scheduler_config.async_scheduling
            paged = engine._core.transport.paged
            assert paged.kernel == "triton" and paged.direct, "the kernel writes the paged cache"
            assert served and 0 < paged.resident.nbytes <= max_bytes
        finally:
            engine.close()
