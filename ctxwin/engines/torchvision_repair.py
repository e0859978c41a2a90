"""Makes transformers and vLLM import beside a CPU build of torch.

The package index pairs CPU torch with CUDA builds of torchvision and torchaudio. Torchvision then fails on import
(``operator torchvision::nms does not exist``) although its Python transforms, all that the Qwen processors need, would
work; torchaudio fails to load its library and takes ``import transformers`` with it. `repair` declares the two missing
operator schemas and marks an unloadable torchaudio or torchcodec as not installed: both are for audio and video files that
ctxwin reads by other means. Where all of them load, it changes nothing.

`repair` acts in this process; ctxwin calls it when an engine is opened. It cannot reach the child processes in which vLLM
inspects models: only for these is the import hook needed (`install_hook`, written into an environment by
`ctxwin.engines.repair_install`). This module imports torch only inside `repair`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_TRIGGERS = frozenset({"torchvision", "torchaudio", "torchcodec", "transformers", "vllm"})
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
    _done = ()  # importing torch below may re-enter through the hook
    if importlib.util.find_spec("torch") is None:
        return _done
    broken = _torchvision_broken()
    if broken:
        _declare_ops()
    _done = (*(["torchvision"] if broken else []), *(name for name in _OPTIONAL if _unloadable(name)))
    if _done:
        _log.info("%s do not match this torch build; repaired for this process", " and ".join(_done))
    return _done


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


class _Hook:
    """A finder that finds nothing; it runs `repair` just before one of the packages concerned is imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _TRIGGERS and _done is None:
            repair()
        return None


def hooked() -> bool:
    """Return True if the hook is installed in this process."""
    return _Hook in sys.meta_path


def install_hook() -> None:
    """Runs `repair` when torchvision, torchaudio, torchcodec, transformers or vllm is first imported; idempotent, O(1)."""
    if not hooked():
        sys.meta_path.insert(0, _Hook)
