"""A fleet of servers with windows on Ray Serve: `fleet` for ``serve run`` and YAML, ``ctxwin fleet`` as the short way.

A `Front` reads each request and derives a `hints.Hint` from it; `WindowRouter` sends it to the place of its window, conversation
or chunks; a `Replica` is one vLLM with windows, as ``ctxwin serve`` runs it. Windows are records of a shared store, so any
replica can take one over.
"""

from ctxwin.extras import optional_imports

with optional_imports():
    import ray.serve  # noqa: F401

from ctxwin_server.ray.fleet import FleetArguments, fleet

__all__ = ["FleetArguments", "fleet"]
