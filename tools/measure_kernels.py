"""Measure the cost of a load: ``python tools/measure_kernels.py``.

Copy (of the same bytes, by one call of torch's), serve as stored, rotate, and rotate with a joint patch and with a quantized
one of its bytes, each by the reference and by the fast kernels, construction included, on random KV, into a paged cache where
the kernel writes one; and unpack the quantized one, as reading it from a store does. All are run once per round, one after the
other, so that a busy machine affects all of them; read the median over the rounds, the least shows what the machine can do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import get_args

import torch

from ctxwin.kv.kernels.api import LoadPlan
from ctxwin.kv.kernels.choice import Kernel
from ctxwin.kv.kernels.parts import SpanSlice
from ctxwin.kv.kernels.strides import CacheStrides
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin.kv.patch import Patch
from ctxwin.kv.quantize import quantize


@dataclass(frozen=True)
class Setting:
    """One load: ``tokens`` in all, split over ``parts``, from the processor's memory to ``device``; the rest as in `KVSpec`.

    ``frame`` is the position of stored spans: engines form them after a system prompt. ``cache``: whether a block's keys lie
    token by token or dimension by dimension. ``values``: dimensions of a value, if not those of a key.
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
    cache: str = "rows"
    values: int = 0
    rounds: int = 15
    device: str = "cpu"

    def spec(self) -> KVSpec:
        """The layout; plain RoPE over the whole head."""
        freqs = tuple(10000.0 ** (-2 * i / self.dim) for i in range(self.dim // 2))
        rope = RopeSpec(inv_freq=freqs, rotary_dim=self.dim, pairing=self.pairing)  # type: ignore[arg-type]
        return KVSpec("measured", "gqa", self.layers, self.heads, self.dim, self.values or self.dim, rope, self.dtype)


@dataclass(frozen=True)
class Row:
    """Time of one move over all layers."""

    what: str
    kernel: str
    median_ms: float
    least_ms: float
    megabytes: float


def measure(setting: Setting) -> list[Row]:
    """Rows for copy, rotate and patch; the copy reads and writes every byte once. Triton's kernel is among them on a GPU.

    Raises:
        ValueError: no tokens, layers, heads, parts or rounds, or more parts than tokens. Cost: ``rounds`` loads of each
        kind.
    """
    if min(setting.layers, setting.heads, setting.parts, setting.rounds) < 1 or setting.tokens < setting.parts:
        raise ValueError(f"layers, heads, parts and rounds must be >= 1 and tokens >= parts, got {setting}")
    spec, dtype, device = setting.spec(), getattr(torch, setting.dtype), torch.device(setting.device)
    plain = _parts(setting, spec, dtype)
    patched = {name: _parts(setting, spec, dtype, form) for name, form in (("rank", _joint), ("quantized", _quantized))}
    still = [replace(part, start=setting.frame) for part in plain]
    source = torch.zeros(spec.span_bytes(setting.tokens, dtype.itemsize), dtype=torch.uint8)
    target = torch.ones_like(source, device=device)
    moves: dict[tuple[str, str], Callable[[], object]] = {("copy", ""): lambda: target.copy_(source)}
    caches, strides = _caches(setting, spec, dtype, device)
    load = partial(_load, spec=spec, caches=caches, strides=strides)
    for kernel in get_args(Kernel):
        if kernel == ("triton" if device.type == "cpu" else "llvm"):
            continue
        moves["as stored", kernel] = load(still, kernel=kernel)
        moves["rotate", kernel] = load(plain, kernel=kernel)
        for name, parts in patched.items():
            moves[f"rotate, {name} {setting.rank}", kernel] = load(parts, kernel=kernel)
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


_Form = Callable[[Setting, KVSpec, int, torch.Generator], Patch]
_FACTORS = torch.bfloat16  # as they are stored, whatever is served


def _parts(setting: Setting, spec: KVSpec, dtype: torch.dtype, form: _Form | None = None) -> list[SpanSlice]:
    noise = torch.Generator().manual_seed(0)
    parts, at = [], 100
    for i in range(setting.parts):
        size = setting.tokens // setting.parts + (i < setting.tokens % setting.parts)
        k = torch.randn(spec.layers, size, spec.heads, spec.k_dim, generator=noise).to(dtype)
        v = torch.randn(spec.layers, size, spec.heads, spec.v_dim, generator=noise).to(dtype)
        span = SpanKV(k, v, torch.arange(size).expand(3, -1), setting.frame)
        parts.append(SpanSlice(span, at, form(setting, spec, size, noise) if form is not None else None))
        at += size
    return parts


def _joint(setting: Setting, spec: KVSpec, tokens: int, noise: torch.Generator) -> Patch:
    width = spec.heads * (spec.k_dim + spec.v_dim)
    left_factor = torch.randn(tokens, setting.rank, generator=noise).to(_FACTORS)
    right_factor = torch.randn(spec.layers, setting.rank, width, generator=noise).to(_FACTORS)
    return Patch.of(
        spec, layout="joint", layers=tuple(range(spec.layers)), rank=setting.rank, left=left_factor, right=right_factor
    )


def _quantized(setting: Setting, spec: KVSpec, tokens: int, noise: torch.Generator) -> Patch:
    """Return factors of spectra that fall as those of released models do, in the bytes of joint ones."""
    width = spec.heads * (spec.k_dim + spec.v_dim)
    scales = torch.arange(1, min(tokens, width) + 1) ** -0.8
    matrices = [
        torch.randn(tokens, len(scales), generator=noise) * scales @ torch.randn(len(scales), width, generator=noise)
        for _ in range(spec.layers)
    ]
    factors = quantize(matrices, setting.rank * (tokens + spec.layers * width) * _FACTORS.itemsize)
    left_factor, right_factor = factors.factors(tokens, width, _FACTORS)
    covered, rank = tuple(range(spec.layers)), left_factor.shape[-1]
    return Patch.of(
        spec, layout="quantized", layers=covered, rank=rank, left=left_factor, right=right_factor, quantized=factors
    )


def _unpack(patches: Sequence[Patch | None]) -> None:
    for patch in patches:
        assert patch is not None
        Patch.from_tensors(patch.tensors(), patch.describe())


def _caches(
    setting: Setting, spec: KVSpec, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], CacheStrides]:
    """A cache of blocks of 128 tokens for each layer, a block's keys before its values, head by head."""
    size, heads, k, v = 128, spec.heads, spec.k_dim, spec.v_dim
    step = size * heads * (k + v)
    caches = [torch.zeros(-(-setting.tokens // size), step, dtype=dtype, device=device) for _ in range(spec.layers)]
    token, number = (k, 1) if setting.cache == "rows" else (1, size)
    return caches, CacheStrides(size, (0, step, token, size * k, number), (size * heads * k, step, v, size * v, 1))


def _load(
    parts: Sequence[SpanSlice], spec: KVSpec, caches: Sequence[torch.Tensor], strides: CacheStrides, kernel: Kernel
) -> Callable[[], None]:
    slots = torch.arange(sum(part.tokens for part in parts), device=caches[0].device)

    def load() -> None:
        plan = LoadPlan(parts, spec, dtype=caches[0].dtype, device=caches[0].device, kernel=kernel)
        if plan.stores:
            plan.store(0, caches, strides, slots)
        else:
            for i in range(plan.layers):
                plan.layer(i)

    return load


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows as a table or, with ``--json``, as ``{"setting": ..., "threads": ..., "rows": [...]}``."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in vars(Setting()).items():
        choices = {
            "dtype": ["bfloat16", "float16", "float32"],
            "pairing": ["half", "interleaved"],
            "cache": ["rows", "columns"],
        }.get(name)
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
