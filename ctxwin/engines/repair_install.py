"""Writes the ``.pth`` file that makes the torchvision repair act in every process of this environment.

``python -m ctxwin.engines.repair_install`` after installing; vLLM inspects model classes in child processes, which a
repair made by a running program does not reach. Harmless where nothing is broken: see `ctxwin.engines.torchvision_repair`.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

LINE = "import sys; exec('try:\\n import ctxwin.engines.torchvision_repair as t; t.install_hook()\\nexcept ImportError: pass')\n"


def path() -> Path:
    """Where this environment has the file, if it does."""
    return Path(sysconfig.get_path("purelib")) / "ctxwin-repair.pth"


def write() -> Path:
    """Writes ``ctxwin-repair.pth`` into this environment's site-packages; returns its path. Idempotent."""
    path().write_text(LINE)
    return path()


if __name__ == "__main__":
    write()
