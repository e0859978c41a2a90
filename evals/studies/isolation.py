"""Isolation of windows that are measured one after the other on one engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

_CONDITIONED = ("span/", "patch/", "orbit/")


@contextmanager
def isolated(engine: Engine) -> Iterator[None]:
    """Drop conditioned KV and patches that were stored inside; vision embeddings stay.

    Otherwise a chunk could be served from exact KV of an earlier window, which a window alone would not have. This also
    bounds the store. Windows opened inside must be closed inside, or the KV that they lease stays.
    """
    existing = _conditioned_keys(engine)
    try:
        yield
    finally:
        for key in _conditioned_keys(engine) - existing:
            engine.repo.delete(key)


def _conditioned_keys(engine: Engine) -> set[str]:
    return {key for prefix in _CONDITIONED for key in engine.store.list(prefix)}
