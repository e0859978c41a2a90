"""An opt-in import hook for a whole environment: ``ctxwin-repair.pth``, which lets vLLM's child processes import torchvision.

**This changes every Python process of the environment**, not only those that use ctxwin: a ``.pth`` file in site-packages
runs when the interpreter starts. The line in this one puts a finder into ``sys.meta_path`` that finds nothing and calls
`ctxwin.engines.torchvision_repair.repair` when torchvision, torchaudio, torchcodec, transformers or vllm is first imported.
Where those libraries fit the installed torch, the repair changes nothing.

Neither importing ctxwin nor installing it with pip writes the file. ``ctxwin doctor --fix``, ``python -m
ctxwin.engines.repair_install`` and this repository's ``make install`` do; ``ctxwin doctor`` says whether it exists, and
``python -m ctxwin.engines.repair_install --remove`` (or deleting the file) removes it.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from ctxwin.engines.torchvision_repair import hooked, repair
from ctxwin.errors import EngineFailed

LINE = "import sys; exec('try:\\n import ctxwin.engines.torchvision_repair as t; t.install_hook()\\nexcept ImportError: pass')\n"


def path() -> Path:
    """Where this environment has the file, if it does."""
    return Path(sysconfig.get_path("purelib")) / "ctxwin-repair.pth"


def require() -> None:
    """Raises EngineFailed where vLLM's child processes need the file and this environment does not have it.

    Repairs this process. Cost: loading torch, torchvision and torchaudio, which vLLM does anyway.
    """
    if hooked() or path().is_file():
        return
    if broken := repair():
        raise EngineFailed(
            f"vLLM's processes would not start: built for another torch: {', '.join(broken)}; run `ctxwin doctor --fix`, which "
            f"writes an import hook for this environment ({path()}), or install the builds of this torch"
        )


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
