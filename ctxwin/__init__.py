"""ctxwin: a context window whose edits are cache edits.

Importing this package imports neither torch nor vllm nor transformers nor cv2; they load when an engine is opened or a
medium decoded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.fidelity import Fidelity
    from ctxwin.library.library import Library
    from ctxwin.opening import open_engine
    from ctxwin.store import open_store
    from ctxwin.window.answer import Answer, Disposability, Plan, PlanEntry, PlanRequest, Usage
    from ctxwin.window.async_window import AsyncWindow
    from ctxwin.window.state import State
    from ctxwin.window.window import Window

__version__ = "0.1.0"

_EXPORTS = {
    "chunk": ("Chunk",),
    "opening": ("open_engine",),
    "fidelity": ("Fidelity",),
    "library.library": ("Library",),
    "store": ("open_store",),
    "window.answer": ("Answer", "Disposability", "Plan", "PlanEntry", "PlanRequest", "Usage"),
    "window.async_window": ("AsyncWindow",),
    "window.state": ("State",),
    "window.window": ("Window",),
}  # fmt: skip
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "Answer", "AsyncWindow", "Chunk", "Disposability", "Fidelity", "Library", "Plan", "PlanEntry", "PlanRequest", "State",
    "Usage", "Window", "open_engine", "open_store",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        if isinstance(getattr(import_module("ctxwin.errors"), name, None), type):
            # `from ctxwin import name` would drop the message of an AttributeError.
            raise ImportError(f"ctxwin.{name} has become ctxwin.errors.{name}; import it from there", name=__name__)
        raise AttributeError(f"module 'ctxwin' has no attribute {name!r}")
    value = getattr(import_module(f"ctxwin.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
