"""A fleet of servers with windows on Ray Serve: `fleet` for ``serve run`` and YAML, ``ctxwin fleet`` as the short way.

A `Front` reads each request and derives a `hints.Hint` from it; `WindowRouter` sends it to the place of its window, conversation
or chunks; a `Replica` is one vLLM with windows, as ``ctxwin serve`` runs it. Windows are records of a shared store, so any
replica can take one over.

Importing this package does not load Ray; its names are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxwin.extras import optional_imports

if TYPE_CHECKING:
    from ctxwin_ray.application import FleetArguments, fleet

__all__ = ["FleetArguments", "fleet"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_imports():
        from ctxwin_ray import application
    return getattr(application, name)
