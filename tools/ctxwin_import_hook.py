"""An import hook for a developer's environment, so that vLLM's child processes import torchvision beside a CPU build of torch.

``python tools/ctxwin_import_hook.py`` copies this module and ``ctxwin-repair.pth`` into the site-packages of its interpreter, as
``make install`` does for ``.venv``; ``--remove`` deletes both. **Every Python process of that environment then runs the hook**:
a finder that finds nothing, and calls `ctxwin.engines.torchvision_repair.repair` when torchvision, torchaudio, torchcodec,
transformers or vllm is first imported. Where these fit the installed torch, the repair changes nothing.

No distribution has this file: users install libraries that fit.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_TRIGGERS = frozenset({"torchvision", "torchaudio", "torchcodec", "transformers", "vllm"})


class _Hook:
    """Finds nothing; runs the repair once, just before one of the packages concerned is imported."""

    is_due = True

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if cls.is_due and name in _TRIGGERS:
            cls.is_due = False  # the repair imports them as well
            try:
                from ctxwin.engines.torchvision_repair import repair
            except ImportError:  # ctxwin has left the environment
                return None
            repair()
        return None


def install() -> None:
    """Add the hook to this process."""
    sys.meta_path.insert(0, _Hook)


def paths(folder: Path | None = None) -> tuple[Path, Path]:
    """Return where an environment has this module and the file that runs it; ``folder``: its site-packages."""
    folder = folder or Path(sysconfig.get_path("purelib"))
    return folder / f"{Path(__file__).stem}.py", folder / "ctxwin-repair.pth"


def write(folder: Path | None = None) -> None:
    """Add the hook to an environment, this one by default. Idempotent."""
    module, line = paths(folder)
    shutil.copyfile(__file__, module)
    line.write_text(f"import {module.stem}; {module.stem}.install()\n")


def remove(folder: Path | None = None) -> None:
    """Remove the hook from an environment, this one by default. Idempotent."""
    for path in reversed(paths(folder)):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    action = remove if "--remove" in sys.argv[1:] else write
    action()
    sys.stdout.write(f"{action.__name__}: {', '.join(map(str, paths()))}\n")
