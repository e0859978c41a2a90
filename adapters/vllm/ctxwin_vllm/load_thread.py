"""A thread whose torch operators run on one core.

Where vLLM computes in its caller's process, OpenMP has more threads than there are cores: some for every thread that has ever
computed. They do not spin between operators then, and waking them costs more than the tenth of a millisecond that an operator
of a load takes: a load took twice as long with two threads as with one. vLLM's own processes have no such surplus, and load on
all their threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from ctxwin.kv.kernels import LoadPlan

_P = ParamSpec("_P")
_R = TypeVar("_R")


def layers_of(plan: LoadPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the layers of ``plan`` in order, each computed by the load thread while the caller uses the previous one.

    Raises what computing raises. Each layer is valid until the next one is requested.
    """
    future = _thread().submit(_layer, plan, 0)
    for i in range(1, plan.layers):
        ready, future = future, _thread().submit(_layer, plan, i)
        yield ready.result()
    yield future.result()


@torch.inference_mode()
def _layer(plan: LoadPlan, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return plan.layer(i)


def alone(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call ``function`` in the load thread and wait for it; raises what it raises."""
    return _thread().submit(function, *args, **kwargs).result()


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    """Return the load thread: one per process, since its engines take turns anyway."""
    threads: list[int] = []

    def start() -> None:
        threads.append(torch.get_num_threads())
        torch.set_num_threads(1)

    executor = ThreadPoolExecutor(1, "ctxwin-load", initializer=start)
    executor.submit(int).result()
    # OpenMP keeps the number per thread, but torch gives new threads the number that was set last.
    restore = threading.Thread(target=torch.set_num_threads, args=(threads[0],))
    restore.start()
    restore.join()
    return executor
