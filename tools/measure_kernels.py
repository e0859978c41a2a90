"""Measure the cost of a load: ``python tools/measure_kernels.py``.

Copy, rotate, and rotate with a joint patch and with a quantized one of its bytes, each by the reference and by the fast
kernels, construction included, on random KV; and unpack the quantized one, as reading it from a store does. All are run once
per round, one after the other, so that a busy machine affects all of them; read the median over the rounds, the least shows
what the machine can do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

import torch

from ctxwin.kv.kernels.api import LoadPlan
from ctxwin.kv.kernels.choice import Kernel
from ctxwin.kv.kernels.parts import SpanSlice
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.patch import Patch
from ctxwin.kv.quantize import quantize


@dataclass(frozen=True)
class Setting:
    """One load: ``tokens`` in all, split over ``parts``, from the processor's memory to ``device``; the rest as in `KVSpec`.

    ``frame`` is the position of stored spans: engines form them after a system prompt.
    """

    tokens: int = 2048
    layers: int = 24
    heads: int = 2
    dim: int = 64
    rank: int = 32
    parts: int = 1
    frame: int = 32
    dtype: str = "bfloat16"
    pairing: str = "half"
    rounds: int = 15
    device: str = "cpu"

    def spec(self) -> KVSpec:
        """The layout; plain RoPE over the whole head."""
        freqs = tuple(10000.0 ** (-2 * i / self.dim) for i in range(self.dim // 2))
        rope = RopeSpec(inv_freq=freqs, rotary_dim=self.dim, pairing=self.pairing)  # type: ignore[arg-type]
        return KVSpec("measured", "gqa", self.layers, self.heads, self.dim, self.dim, rope, self.dtype)


@dataclass(frozen=True)
class Row:
    """Time of one move over all layers."""

    what: str
    kernel: str
    median_ms: float
    least_ms: float
    megabytes: float


def measure(setting: Setting) -> list[Row]:
    """Rows for copy, rotate and patch; the copy reads and writes every byte once, layer by layer. Triton's kernel is among
    them on a GPU.

    Raises:
        ValueError: no tokens, layers, heads, parts or rounds, or more parts than tokens. Cost: ``rounds`` loads of each
        kind.
    """
    if min(setting.layers, setting.heads, setting.parts, setting.rounds) < 1 or setting.tokens < setting.parts:
        raise ValueError(f"layers, heads, parts and rounds must be >= 1 and tokens >= parts, got {setting}")
    spec, dtype, device = setting.spec(), getattr(torch, setting.dtype), torch.device(setting.device)
    plain = _parts(setting, spec, dtype)
    patched = {name: _parts(setting, spec, dtype, form) for name, form in (("rank", _joint), ("quantized", _quantized))}
    moves: dict[tuple[str, str], Callable[[], None]] = {("copy", ""): lambda: _copy(plain, device)}
    for kernel in get_args(Kernel):
        if kernel == ("triton" if device.type == "cpu" else "llvm"):
            continue
        moves["rotate", kernel] = _load(plain, spec, dtype, device, kernel)
        for name, parts in patched.items():
            moves[f"rotate, {name} {setting.rank}", kernel] = _load(parts, spec, dtype, device, kernel)
    moves["unpack", ""] = lambda: _unpack([part.patch for part in patched["quantized"]])
    times: dict[tuple[str, str], list[float]] = {name: [] for name in moves}
    for warm in [True, *[False] * setting.rounds]:
        for name, move in moves.items():
            began = time.perf_counter()
            move()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if not warm:
                times[name].append((time.perf_counter() - began) * 1e3)
    size = spec.span_bytes(setting.tokens, dtype.itemsize) / 1e6
    return [Row(what, kernel, median(t), min(t), size) for (what, kernel), t in times.items()]


_Form = Callable[[Setting, KVSpec, int, torch.Generator, torch.dtype], Patch]


def _parts(setting: Setting, spec: KVSpec, dtype: torch.dtype, form: _Form | None = None) -> list[SpanSlice]:
    noise = torch.Generator().manual_seed(0)
    parts, at = [], 100
    for i in range(setting.parts):
        size = setting.tokens // setting.parts + (i < setting.tokens % setting.parts)
        k = torch.randn(spec.layers, size, spec.heads, spec.k_dim, generator=noise).to(dtype)
        v = torch.randn(spec.layers, size, spec.heads, spec.v_dim, generator=noise).to(dtype)
        span = SpanKV(k, v, torch.arange(size).expand(3, -1), setting.frame)
        parts.append(SpanSlice(span, at, form(setting, spec, size, noise, dtype) if form is not None else None))
        at += size
    return parts


def _joint(setting: Setting, spec: KVSpec, tokens: int, noise: torch.Generator, dtype: torch.dtype) -> Patch:
    width = spec.heads * (spec.k_dim + spec.v_dim)
    left_factor = torch.randn(tokens, setting.rank, generator=noise).to(dtype)
    right_factor = torch.randn(spec.layers, setting.rank, width, generator=noise).to(dtype)
    return Patch.of(
        spec, layout="joint", layers=tuple(range(spec.layers)), rank=setting.rank, left=left_factor, right=right_factor
    )


def _quantized(setting: Setting, spec: KVSpec, tokens: int, noise: torch.Generator, dtype: torch.dtype) -> Patch:
    """Return factors of spectra that fall as those of released models do, in the bytes of joint ones."""
    width = spec.heads * (spec.k_dim + spec.v_dim)
    scales = torch.arange(1, min(tokens, width) + 1) ** -0.8
    matrices = [
        torch.randn(tokens, len(scales), generator=noise) * scales @ torch.randn(len(scales), width, generator=noise)
        for _ in range(spec.layers)
    ]
    factors = quantize(matrices, setting.rank * (tokens + spec.layers * width) * dtype.itemsize)
    left_factor, right_factor = factors.factors(tokens, width, dtype)
    covered, rank = tuple(range(spec.layers)), left_factor.shape[-1]
    return Patch.of(
        spec, layout="quantized", layers=covered, rank=rank, left=left_factor, right=right_factor, quantized=factors
    )


def _unpack(patches: Sequence[Patch | None]) -> None:
    for patch in patches:
        assert patch is not None
        Patch.from_tensors(patch.tensors(), patch.describe())


def _load(
    parts: Sequence[SpanSlice], spec: KVSpec, dtype: torch.dtype, device: torch.device, kernel: Kernel
) -> Callable[[], None]:
    def load() -> None:
        plan = LoadPlan(parts, spec, dtype=dtype, device=device, kernel=kernel)
        for i in range(plan.layers):
            plan.layer(i)

    return load


def _copy(parts: Sequence[SpanSlice], device: torch.device) -> None:
    tokens = sum(part.tokens for part in parts)
    k = torch.empty(tokens, *parts[0].span.k.shape[2:], dtype=parts[0].span.k.dtype, device=device)
    v = torch.empty(tokens, *parts[0].span.v.shape[2:], dtype=parts[0].span.v.dtype, device=device)
    for i in range(len(parts[0].span.k)):
        at = 0
        for part in parts:
            k[at : at + part.tokens].copy_(part.span.k[i])
            v[at : at + part.tokens].copy_(part.span.v[i])
            at += part.tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows as a table or, with ``--json``, as ``{"setting": ..., "threads": ..., "rows": [...]}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in vars(Setting()).items():
        choices = {"dtype": ["bfloat16", "float16", "float32"], "pairing": ["half", "interleaved"]}.get(name)
        parser.add_argument(
            f"--{name}", type=type(default), default=default, choices=choices, help=f"default {default}"
        )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = vars(parser.parse_args(arguments))
    as_json, setting = options.pop("json"), Setting(**options)
    rows = measure(setting)
    if as_json:
        report = {"setting": vars(setting), "threads": torch.get_num_threads(), "rows": [vars(row) for row in rows]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("move", "kernel", "median ms", "least ms", "MB")
    for row in rows:
        table.add_row(row.what, row.kernel, f"{row.median_ms:.2f}", f"{row.least_ms:.2f}", f"{row.megabytes:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
