"""A thread whose torch operators are not split among others.

Where vLLM computes in its caller's process, OpenMP has more threads than there are processors: some for every thread that has
ever computed. They no longer spin between operators then, and waking them costs more than the tenth of a millisecond that an
operator of a load takes: a load took twice as long with two threads as with one. vLLM's own processes have no such surplus,
and load on all their threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from ctxwin.kv.kernels import Placing

_P = ParamSpec("_P")
_R = TypeVar("_R")


def layers_of(placing: Placing) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The layers of ``placing`` in order, each computed by a thread alone while the caller uses the one before.

    Raises what computing raises. Each layer is valid until the next one is requested.
    """
    coming = _thread().submit(_layer, placing, 0)
    for i in range(1, placing.layers):
        ready, coming = coming, _thread().submit(_layer, placing, i)
        yield ready.result()
    yield coming.result()


@torch.inference_mode()
def _layer(placing: Placing, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return placing.layer(i)


def alone(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls ``function`` in a thread that computes alone, and waits for it; raises what it raises."""
    return _thread().submit(function, *args, **kwargs).result()


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    """One per process: its engines take turns anyway."""
    usual: list[int] = []

    def start() -> None:
        usual.append(torch.get_num_threads())
        torch.set_num_threads(1)

    made = ThreadPoolExecutor(1, "ctxwin-load", initializer=start)
    made.submit(int).result()
    # OpenMP keeps the number for each thread, but torch passes the last one that was set on to new threads.
    restore = threading.Thread(target=torch.set_num_threads, args=(usual[0],))
    restore.start()
    restore.join()
    return made
