"""An opt-in import hook for a whole environment: ``ctxwin-repair.pth``, which lets vLLM's child processes import torchvision.

**This changes every Python process of the environment**, not only those that use ctxwin: a ``.pth`` file in
site-packages runs at interpreter start. The line in this one puts a finder into ``sys.meta_path`` that finds nothing and calls
`ctxwin.engines.torchvision_repair.repair` when torchvision, torchaudio, torchcodec, transformers or vllm is first
imported. Where those libraries fit the installed torch, the repair changes nothing.

It is never written by importing or installing ctxwin with pip. It is written by ``ctxwin doctor --fix``, by
``python -m ctxwin.engines.repair_install``, and by this repository's ``make install``; ``ctxwin doctor`` says whether it is
there, and ``python -m ctxwin.engines.repair_install --remove`` (or deleting the file) takes it away.
"""

from __future__ import annotations

import sys
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


def remove() -> Path:
    """Removes the file, if it is there; returns the path it has or had."""
    path().unlink(missing_ok=True)
    return path()


if __name__ == "__main__":
    sys.stdout.write(f"removed {remove()}\n" if "--remove" in sys.argv[1:] else f"wrote {write()}\n")
