"""Windows measured one by one on one engine: none finds what another has stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

_CONDITIONED = ("span/", "patch/", "orbit/")


@contextmanager
def isolated(engine: Engine) -> Iterator[None]:
    """Drops KV and patches that were stored meanwhile; vision embeddings stay.

    A chunk whose exact KV another window has left behind would be served from it: right, and no longer what a window on its
    own does. It also bounds the store. Windows opened inside must be closed inside, else what they lease stays.
    """
    before = _held(engine)
    try:
        yield
    finally:
        for key in _held(engine) - before:
            engine.repo.delete(key)


def _held(engine: Engine) -> set[str]:
    return {key for prefix in _CONDITIONED for key in engine.store.list(prefix)}
