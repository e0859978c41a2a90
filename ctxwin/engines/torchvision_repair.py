"""Makes transformers and vLLM import beside a CPU build of torch.

The package index pairs CPU torch with CUDA builds of torchvision and torchaudio. Torchvision then fails on import
(``operator torchvision::nms does not exist``) although its Python transforms, all that the Qwen processors need, would
work; torchaudio fails to load its library and takes ``import transformers`` with it. `repair` declares the two missing
operator schemas and marks an unloadable torchaudio or torchcodec as not installed: both are for audio and video files that
ctxwin reads by other means. Where all of them load, it changes nothing.

`repair` acts in this process; ctxwin calls it when an engine is opened. It cannot reach the child processes in which vLLM
inspects models: `require_fit` refuses to start them with such libraries, unless the environment has a developer's import hook
(``tools/ctxwin_import_hook.py``), which repairs each of its processes. This module imports torch only inside `repair`.
"""

import importlib.util
import logging
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ctxwin.errors import EngineFailed

HOOK = "ctxwin_import_hook"
"""Module of the import hook, loaded when a process of an environment that has it starts."""
_OPTIONAL = ("torchaudio", "torchcodec")
_log = logging.getLogger("ctxwin.engines")
_library: Any = None  # keeps the operator schemas registered
_done: tuple[str, ...] | None = None


def repair() -> tuple[str, ...]:
    """Names of what had to be repaired in this process (``torchvision``, ``torchaudio``, ``torchcodec``); idempotent.

    Cost on a healthy install: loading the libraries once, which transformers and vLLM do anyway.
    """
    global _done
    if _done is not None:
        return _done
    _done = ()
    if importlib.util.find_spec("torch") is None:
        return _done
    broken = _torchvision_broken()
    if broken:
        _declare_ops()
    _done = (*(["torchvision"] if broken else []), *(name for name in _OPTIONAL if _unloadable(name)))
    if _done:
        _log.info("%s do not match this torch build; repaired for this process", " and ".join(_done))
    return _done


def require_fit() -> None:
    """Raise EngineFailed where vLLM's child processes would meet libraries that were built for another torch.

    Repairs this process. Cost: loading torch, torchvision and torchaudio, which vLLM does anyway.
    """
    if HOOK not in sys.modules and (broken := repair()):
        raise EngineFailed(
            f"vLLM's processes would not start: built for another torch: {', '.join(broken)}; install the builds of this torch "
            "(for its CPU build, from the index that it came from), or open the model as hf:MODEL"
        )


def _torchvision_broken() -> bool:
    spec = PathFinder.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations or "torchvision.ops" in sys.modules:
        return False
    import torch

    if hasattr(torch.ops.torchvision, "nms"):  # loaded, or declared by somebody else
        return False
    libraries = [p for root in spec.submodule_search_locations for p in Path(root).glob("_C*") if p.suffix != ".py"]
    for path in libraries:
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError):
            return True
    return not libraries


def _declare_ops() -> None:
    global _library
    import torch

    _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _unloadable(name: str) -> bool:
    """Return True if an installed package does not load, and mark it as not installed."""
    if name in sys.modules or PathFinder.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except (OSError, RuntimeError, ImportError):
        for loaded in [n for n in sys.modules if n == name or n.startswith(name + ".")]:
            del sys.modules[loaded]
        # None is Python's own mark for "not installed": imports raise ModuleNotFoundError, find_spec returns None.
        sys.modules[name] = None  # type: ignore[assignment]
        return True
    return False
