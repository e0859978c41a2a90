"""Choice of the load kernel of a device: Triton's on a GPU, LLVM's on a CPU, once a trial has shown it correct; else torch's."""

import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from ctxwin.kv.kernels.cpu import CpuKernel
from ctxwin.kv.kernels.parts import ReferenceKernel, SpanSlice
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch

Kernel = Literal["cpu", "llvm", "reference", "triton"]
"""``cpu``: torch operators, one layer at a time, on any device. ``llvm``: one pass over many layers, on CPUs. ``triton``: one
launch for many layers, on GPUs. ``reference``: the slow oracle."""

KERNEL = "CTXWIN_KERNEL"
"""Environment variable that names the load kernel of this process and those it starts, tested or not."""

Make = Callable[..., Any]
_log = logging.getLogger("ctxwin.engines")
_good: dict[tuple[Any, ...], bool] = {}  # whether a layout on a device gets the fast kernel
_faults: list[str] = []
_lock = threading.Lock()


def choose(
    spec: KVSpec, dtype: torch.dtype, device: torch.device, heads: int | None = None, kernel: Kernel | None = None
) -> Kernel:
    """The load kernel for a layout on a device.

    Args:
        spec: layout of the model.
        dtype: dtype that is served.
        device: where it is served.
        heads: how many KV heads are served; None is all of them.
        kernel: takes this one, whatever it is; None asks the environment (`KERNEL`), and then the device.

    Returns:
        ``triton`` on a GPU where Triton is installed, ``llvm`` on a CPU where llvmlite is (vLLM brings it along), if `trial`
        finds no fault; ``cpu`` otherwise. A fault is logged once, as a warning, and is one of `faults`.

    Raises:
        ValueError: no kernel of that name. Cost: the first call for a layout compiles the kernel: some seconds on a GPU,
        one on a CPU; nothing afterwards.
    """
    named = kernel if kernel is not None else os.environ.get(KERNEL) or None
    if named is not None:
        if named not in get_args(Kernel):
            where = "" if kernel is not None else f" in {KERNEL}"
            raise ValueError(f"kernel must be one of {', '.join(get_args(Kernel))}, got {named!r}{where}")
        chosen: Kernel = named  # type: ignore[assignment]  # mypy does not narrow by get_args
        return chosen
    if spec.in_rows or len({(kind.rope.rotary_dim, kind.rope.pairing) for kind in spec.alike}) > 1:
        return "cpu"  # fast kernels are compiled for one
    fast: Kernel = "llvm" if device.type == "cpu" else "triton"
    package = "llvmlite" if fast == "llvm" else "triton"
    if device.type not in ("cpu", "cuda") or importlib.util.find_spec(package) is None:
        return "cpu"
    if fast == "llvm" and dtype is torch.float64:
        return "cpu"
    count = spec.heads if heads is None else heads
    rope = spec.rope
    key = (str(device), dtype, count, spec.k_dim, spec.v_dim, rope.rotary_dim, rope.pairing)
    with _lock:
        if key not in _good:
            fault = fault_of(lambda: trial(load_class(fast), replace(spec, heads=count), dtype, device))
            if fault is not None:
                report(f"the {fast} load kernel is not used on {device} for {dtype}: {fault}")
            _good[key] = fault is None
        return fast if _good[key] else "cpu"


def faults() -> list[str]:
    """Why a fast kernel is not used, or not everywhere, in this process: a line for each device and layout."""
    return list(_faults)


def report(fault: str) -> None:
    """Count a fault among `faults` and log it as a warning."""
    _faults.append(fault)
    _log.warning("%s; torch operators run there", fault)


def trial(
    make: Make, spec: KVSpec, dtype: torch.dtype, device: torch.device, tokens: Sequence[int] = (37, 9, 5)
) -> str | None:
    """Test a kernel's results on a device; return a line about the error, or None where they are correct.

    Small random parts of each kind (moved and patched, moved, resting and patched with the deficit itself) are held
    against the reference in float64. Nothing may be further from it than one rounding to ``dtype`` and float32's own
    arithmetic; tf32 or another rotation is.

    Args:
        make: the kernel's class.
        spec, dtype, device: as in `choose`.
        tokens: of the three parts; the last two lose their first one to a cut.

    Raises whatever the kernel raises.
    """
    layers = 2  # with patches, and without
    small = replace(spec, layers=layers, kinds=())
    parts = samples(small, dtype, tokens)
    wide = [replace(p, span=replace(p.span, k=p.span.k.double(), v=p.span.v.double())) for p in parts]
    heads = (0, spec.heads)
    oracle = ReferenceKernel(wide, small, dtype=torch.float64, device=torch.device("cpu"), heads=heads)
    kernel = make(parts, small, dtype=dtype, device=device, heads=heads)
    unit = torch.finfo(dtype).eps / 2
    for i in range(layers):
        for name, got, want in zip(("keys", "values"), kernel.layer(i), oracle.layer(i), strict=True):
            away = (got.to("cpu").double() - want).abs() - unit * want.abs()
            bound = 2e-6 * float(want.abs().max())
            if not float(away.max()) <= bound:  # NaN is no number within the bound
                return f"{name} of layer {i} are {float(away.max()):.2g} away from the reference, more than {bound:.2g}"
    return None


def samples(spec: KVSpec, dtype: torch.dtype, tokens: Sequence[int]) -> list[SpanSlice]:
    """Three random parts, one of each kind and always the same; patches cover layer 0."""
    noise = torch.Generator().manual_seed(0)
    width = spec.heads * (spec.k_dim + spec.v_dim)
    parts = []
    for i, count in enumerate(tokens):
        k = torch.randn(spec.layers, count, spec.heads, spec.k_dim, generator=noise).to(dtype)
        v = torch.randn(spec.layers, count, spec.heads, spec.v_dim, generator=noise).to(dtype)
        positions = torch.randint(0, 50, (3, count), generator=noise)
        rank, dense = 21, i == 2
        left = torch.randn(*((1, count, width) if dense else (count, rank)), generator=noise).to(dtype)
        right = None if dense else torch.randn(1, rank, width, generator=noise).to(dtype)
        patch = Patch.of(spec, layout="joint", layers=(0,), rank=rank, left=left, right=right, dense=dense)
        start = (3000, 77, 0)[i % 3]
        parts.append(SpanSlice(SpanKV(k, v, positions, 0), start, None if i == 1 else patch, min(i, 1)))
    return parts


def load_class(kernel: Kernel) -> Make:
    """Return the class of a kernel; a fast one is imported only now, for what it needs comes with engines."""
    if kernel in ("cpu", "reference"):
        return CpuKernel if kernel == "cpu" else ReferenceKernel
    if kernel == "llvm":
        from ctxwin.kv.kernels.llvm_kernel import LlvmKernel

        return LlvmKernel
    from ctxwin.kv.kernels.triton_kernel import TritonKernel

    return TritonKernel


def fault_of(check: Callable[[], str | None]) -> str | None:
    """Return what ``check`` returns, None where it finds no fault; what a compiler or a driver raises in it is one."""
    try:
        return check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
