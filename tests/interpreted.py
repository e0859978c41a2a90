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
    """Open vLLM in this process so that it keeps copies of spans as on a GPU, and loads from them by the kernel of one.

    It is closed in the end, and must have served from copies.
    """
    from ctxwin.kv.kernels.choice import KERNEL
    from ctxwin_vllm.resident import RESIDENT_BYTES, ResidentSpans

    served = 0
    attach = ResidentSpans.attach

    def attached(self: ResidentSpans, parts: Any) -> Any:
        nonlocal served
        made = attach(self, parts)
        served += sum(part.resident is not None for part in made)
        return made

    with interpreted_kernel(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNEL, "triton")
        patch.setenv(RESIDENT_BYTES, str(max_bytes))
        patch.setattr(ResidentSpans, "attach", attached)
        engine = open_engine()
        try:
            yield engine
            paged = engine._core.transport.paged
            assert paged.kernel == "triton" and paged.direct, "the kernel writes the paged cache"
            assert served and 0 < paged.resident.nbytes <= max_bytes
        finally:
            engine.close()
