"""A thread whose torch operators are not shared out among others.

Where vLLM computes in the process of its caller, there are more threads of OpenMP than processors: some for every thread
that has ever computed. They stop spinning between operators then, and waking them costs more than the tenth of a
millisecond that an operator of a load takes: with two threads a load took twice as long as with one. Processes of vLLM's
own have no such threads, and load on all that they compute with.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from ctxwin.kv.kernels import Placing

_P = ParamSpec("_P")
_R = TypeVar("_R")


def layers_of(placing: Placing) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The layers of ``placing`` in order, each computed by a thread alone while the caller uses the one before.

    Raises what computing raises. What it yields is valid until the next one is asked for.
    """
    under_way: deque[Future[tuple[torch.Tensor, torch.Tensor]]] = deque()
    for i in range(placing.layers):
        under_way.append(_thread().submit(_layer, placing, i))
        if i:
            yield under_way.popleft().result()
    yield under_way.popleft().result()


@torch.inference_mode()
def _layer(placing: Placing, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return placing.layer(i)


def alone(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Calls ``function`` in a thread that computes alone, and waits for it; raises what it raises."""
    return _thread().submit(function, *args, **kwargs).result()


@lru_cache(maxsize=1)
def _thread() -> ThreadPoolExecutor:
    """One for the process: engines of one process take turns anyway."""
    usual: list[int] = []

    def start() -> None:
        usual.append(torch.get_num_threads())
        torch.set_num_threads(1)

    made = ThreadPoolExecutor(1, "ctxwin-load", initializer=start)
    made.submit(int).result()
    # OpenMP keeps the number for each thread, but torch hands the last one that was set on to threads to come.
    restore = threading.Thread(target=torch.set_num_threads, args=(usual[0],))
    restore.start()
    restore.join()
    return made
